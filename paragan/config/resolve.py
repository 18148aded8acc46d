"""TODO: docstring of paragan/config/resolve.py"""

from __future__ import annotations

import dataclasses

from paragan.config.lag_trace import repeating
from paragan.config.run import Run, Strategy
from paragan.config.user_code import check_nets, is_own
from paragan.config.validate import refuse_numbers, refuse_unfit_objective, refuse_untold
from paragan.core.devices import kind_of, pick_device
from paragan.core.errors import Unusable
from paragan.core.rng import generator
from paragan.data.dataset import Images, load
from paragan.nets import Spec
from paragan.optim.optimizers import SGD, Side, at_rate
from paragan.strategies.async_paragan import Async
from paragan.strategies.auto import Auto


def spec_of(run: Run, images: Images) -> Spec:
    """What the networks of a run are built for."""
    classes = len(images.classes) if run.data.labels else 0
    if images.numbers:
        return Spec(0, 0, classes, images.shape)
    channels, resolution, _ = images.shape
    return Spec(resolution, channels, classes)


def load_images(run: Run) -> Images:
    """The data of a run, in memory."""
    data, alone = run.data, run.data.only is not None
    labels = data.labels or alone
    images = load(
        data.path,
        resolution=data.resolution or None,
        channels=data.channels or None,
        labels=labels,
        hold=data.hold,
        bad_share=data.bad_share,
        reach=data.reach,
    )
    return images if data.only is None else images.of_class(data.only)


def resolve(run: Run, images: Images) -> Run:
    """The record with everything filled in that was left to the data or to the device."""
    spec = spec_of(run, images)
    labelled = run.data.labels and images.labels is not None
    hold = "memory" if images.held else "stream"
    sizes = {"resolution": spec.resolution, "channels": spec.channels}
    data = dataclasses.replace(run.data, labels=labelled, hold=hold, **sizes)
    device = run.device
    if device.precision == "auto":
        fast = kind_of(pick_device(device.kind)).bf16()
        device = dataclasses.replace(device, precision="bf16" if fast else "float32")
    evaluation = run.evaluation
    if images.numbers:
        if run.data.mirror:
            raise Unusable("--mirror flips images, and the data are numbers: leave it out")
        refuse_numbers(run.objective)
        if evaluation.features == "pixels":
            evaluation = dataclasses.replace(evaluation, features="values")
    if device.one_call == "auto":
        ours = not is_own(run.nets, run.objective)  # a D of one's own may couple images
        device = dataclasses.replace(device, one_call=ours and kind_of(pick_device(device.kind)).streams)
    run = settled(dataclasses.replace(run, data=data, device=device, evaluation=evaluation))
    refuse_unfit_objective(run)
    refuse_untold(run.objective, labelled)
    check_nets(run.nets, spec_of(run, images))
    return run


def settled(run: Run) -> Run:
    """The record with everything filled in that follows from its other fields."""
    if isinstance(run.strategy, Auto):  # what follows from it is not known yet
        return run
    if isinstance(run.strategy, Async):
        run = dataclasses.replace(run, strategy=repeating(run.strategy))
    return dataclasses.replace(run, g=learning(run.g, run.strategy), d=learning(run.d, run.strategy))


def learning(side: Side, strategy: Strategy) -> Side:
    """How a player learns under a strategy that has an optimizer or a wrapper of its own."""
    optimizer, optimism = side.optimizer, side.optimism
    if strategy.plain_descent:
        if optimizer.name not in ("adam", "sgd", "rmsprop"):
            raise Unusable(f"optimizer={optimizer.name}: --strategy.exact=true moves by gradient descent; use sgd")
        optimizer = optimizer if optimizer.name == "sgd" and not optimizer.momentum else SGD(lr=optimizer.lr)
        if optimism not in ("auto", "none"):
            raise Unusable(f"optimism={optimism}: --strategy.exact=true is optimistic by itself; use none")
    optimism = strategy.optimism if optimism == "auto" else optimism
    ahead = side.extrapolation
    if optimism == "optimistic":
        ahead = strategy.extrapolation if ahead is None else ahead
    elif ahead in (None, strategy.extrapolation):  # a run's own record has it
        ahead = None
    else:
        raise Unusable(
            f"extrapolation={ahead} is for optimism=optimistic, and it is {optimism}; use extrapolation=null"
        )
    return dataclasses.replace(side, optimizer=optimizer, optimism=optimism, extrapolation=ahead)


def changed(run: Run, times: int) -> Run:
    """The run that is played after it went back so often. The record of the run stays what was asked for."""
    if not times:
        return run
    factor = run.guard.lr_factor**times
    return dataclasses.replace(run, g=_slower(run.g, factor), d=_slower(run.d, factor), seed=seed(run, times))


def seed(run: Run, times: int) -> int:
    """Of images, latents and labels."""
    if not times or not run.guard.reseed:
        return run.seed
    return int(generator(run.seed, "rollback", position=times).integers(2**63))


def _slower(side: Side, factor: float) -> Side:
    return dataclasses.replace(side, optimizer=at_rate(side.optimizer, side.optimizer.lr * factor))
