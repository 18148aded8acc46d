"""TODO: docstring of paragan/config/resolve.py"""

from __future__ import annotations

import dataclasses

from paragan.config.run import AnyStrategy, Run
from paragan.config.user_code import check_nets, is_user_defined
from paragan.config.validate import check_labels_available, check_objective, check_objective_for_arrays
from paragan.core.devices import backend_of, pick_device
from paragan.core.errors import UsageError
from paragan.core.rng import philox_generator
from paragan.data.dataset import Dataset, load_data
from paragan.nets import Spec
from paragan.optim.optimizers import SGD, PlayerOptim, with_lr


def make_spec(run: Run, dataset: Dataset) -> Spec:
    """What the networks of a run are built for."""
    classes = len(dataset.classes) if run.data.labels else 0
    if dataset.is_array:
        return Spec(0, 0, classes, dataset.shape)
    channels, resolution, _ = dataset.shape
    return Spec(resolution, channels, classes)


def load_dataset(run: Run) -> Dataset:
    """The data of a run, in memory."""
    data, alone = run.data, run.data.only_class is not None
    labels = data.labels or alone
    images = load_data(
        data.path,
        resolution=data.resolution or None,
        channels=data.channels or None,
        labels=labels,
        cache=data.cache,
        max_bad_fraction=data.max_bad_fraction,
        remote=data.remote,
    )
    return images if data.only_class is None else images.only_class(data.only_class)


def resolve(run: Run, dataset: Dataset) -> Run:
    """The record with everything filled in that was left to the data or to the device."""
    spec = make_spec(run, dataset)
    labelled = run.data.labels and dataset.labels is not None
    hold = "memory" if dataset.in_memory else "stream"
    sizes = {"resolution": spec.resolution, "channels": spec.channels}
    data = dataclasses.replace(run.data, labels=labelled, cache=hold, **sizes)
    device = run.device
    if device.precision == "auto":
        fast = backend_of(pick_device(device.kind)).supports_bf16()
        device = dataclasses.replace(device, precision="bf16" if fast else "float32")
    evaluation = run.evaluation
    if dataset.is_array:
        if run.data.mirror:
            raise UsageError("--mirror flips images, and the data are numbers: leave it out")
        check_objective_for_arrays(run.objective)
        if evaluation.features == "pixels":
            evaluation = dataclasses.replace(evaluation, features="values")
    if device.concat_real_fake == "auto":
        ours = not is_user_defined(run.nets, run.objective)  # a D of one's own may couple images
        device = dataclasses.replace(device, concat_real_fake=ours and backend_of(pick_device(device.kind)).has_streams)
    run = fill_strategy_defaults(dataclasses.replace(run, data=data, device=device, evaluation=evaluation))
    check_objective(run)
    check_labels_available(run.objective, labelled)
    check_nets(run.nets, make_spec(run, dataset))
    return run


def fill_strategy_defaults(run: Run) -> Run:
    """The record with everything filled in that follows from its other fields."""
    if run.strategy.auto_request:  # the optimizers follow from the strategy that is chosen
        return run
    strategy = run.strategy.with_recorded_fields()
    return dataclasses.replace(
        run, strategy=strategy, g=resolve_optimizer(run.g, strategy), d=resolve_optimizer(run.d, strategy)
    )


def resolve_optimizer(player_optim: PlayerOptim, strategy: AnyStrategy) -> PlayerOptim:
    """How a player learns under a strategy that has an optimizer or a wrapper of its own."""
    optimizer, optimism = player_optim.optimizer, player_optim.optimizer_wrapper
    if strategy.requires_sgd:
        if optimizer.name not in ("adam", "sgd", "rmsprop"):
            raise UsageError(
                f"optimizer={optimizer.name}: --strategy.paper_update=true moves by gradient descent; use sgd"
            )
        optimizer = optimizer if optimizer.name == "sgd" and not optimizer.momentum else SGD(lr=optimizer.lr)
        if optimism not in ("auto", "none"):
            raise UsageError(f"optimism={optimism}: --strategy.paper_update=true is optimistic by itself; use none")
    optimism = strategy.optimizer_wrapper if optimism == "auto" else optimism
    ahead = player_optim.extrapolation
    if optimism == "optimistic":
        ahead = strategy.extrapolation if ahead is None else ahead
    elif ahead in (None, strategy.extrapolation):  # a run's own record has it
        ahead = None
    else:
        raise UsageError(
            f"extrapolation={ahead} is for optimism=optimistic, and it is {optimism}; use extrapolation=null"
        )
    return dataclasses.replace(player_optim, optimizer=optimizer, optimizer_wrapper=optimism, extrapolation=ahead)


def run_after_rollbacks(run: Run, num_rollbacks: int) -> Run:
    """The run that is played after it went back so often. The record of the run stays what was asked for."""
    if not num_rollbacks:
        return run
    factor = run.on_divergence.lr_factor**num_rollbacks
    return dataclasses.replace(
        run,
        g=_with_lr_factor(run.g, factor),
        d=_with_lr_factor(run.d, factor),
        seed=seed_after_rollbacks(run, num_rollbacks),
    )


def seed_after_rollbacks(run: Run, num_rollbacks: int) -> int:
    """Of images, latents and labels."""
    if not num_rollbacks or not run.on_divergence.reseed:
        return run.seed
    return int(philox_generator(run.seed, "rollback", position=num_rollbacks).integers(2**63))


def _with_lr_factor(player_optim: PlayerOptim, factor: float) -> PlayerOptim:
    return dataclasses.replace(
        player_optim, optimizer=with_lr(player_optim.optimizer, player_optim.optimizer.lr * factor)
    )
