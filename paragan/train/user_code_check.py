"""Try networks and objectives of the user's own on a few images, before a folder is created.

On two lanes of a few images each: shapes, both losses and their gradients, parameters that stay in the memory where
the trainer put them, buffers that change, and lanes merged in one pass against lanes alone. The first module whose
output differs is named. Networks that draw torch's own random numbers are recognised by two passes that differ; during
training torch is then seeded before each pass (`Game.uses_torch_rng`). What cannot be trained is refused in one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paragan.config.user_code import UserObjective
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, Loss, run_discriminator
from paragan.data.dataset import Dataset
from paragan.data.loader.device_transfer import read_model_input
from paragan.game.game import Game
from paragan.game.late_start import LateStart
from paragan.game.player import Player
from paragan.losses.class_losses import require_outputs

MAX_LANE_IMAGES = 4
RELATIVE_TOLERANCE = 5e-3  # relative to the largest value; below, a difference is rounding
OBJECTIVE_TOLERANCE = 1e-3  # the same, of losses and gradients


def check_user_networks(
    game: Game, dataset: Dataset, lanes: int, lanes_share_pass: bool, conditioning: str = ""
) -> Game:
    """Try the networks and the objective of a game; nothing of it is changed.

    Args:
        lanes: of the whole run.
        lanes_share_pass: whether several lanes may share a pass.
        conditioning: what else D has to return (losses/class_losses.py).

    Returns:
        The game, with `uses_torch_rng` set where its networks draw torch's random numbers.

    Raises:
        UsageError: it cannot be trained.
    """
    micro_batch = _make_micro_batch(game, dataset, tuple(range(min(lanes, 2))))
    addresses = {player: _parameter_addresses(player) for player in game.players}
    with torch.random.fork_rng(devices=[]), _preserve_buffers(game):
        with _wrap_user_errors("the generator", micro_batch):
            fakes = _generate(game, micro_batch)
        with _wrap_user_errors("the discriminator or the objective", micro_batch):
            _check_shapes(game, fakes, conditioning)
            _check_replayed_fields(game, fakes)
            _check_losses(game, micro_batch, fakes)
            _check_late_start(game, micro_batch)
            _check_written_in_forward(game, micro_batch, fakes)
        for player in game.players:
            _check_storage(player, addresses[player])
        _check_buffer_writes(game, micro_batch, lanes_share_pass)
        uses_torch_rng = not _all_equal(_module_outputs(game, micro_batch), _module_outputs(game, micro_batch))
        if uses_torch_rng:
            _check_repeatable(game, micro_batch)
        if len(micro_batch.rng.lanes) > 1 and not uses_torch_rng:
            _check_synchronised(game, micro_batch)
        if lanes_share_pass and len(micro_batch.rng.lanes) > 1:
            _check_lane_coupling(game, micro_batch)
            _check_objective_coupling(game, micro_batch)
    return replace(game, uses_torch_rng=uses_torch_rng)


def check_losses(game: Game, dataset: Dataset) -> None:
    """Try both losses once, on a few images.

    Raises:
        UsageError: one of them fails, is not finite, or has no gradient.
    """
    micro_batch = _make_micro_batch(game, dataset, (0,))
    with torch.random.fork_rng(devices=[]), _preserve_buffers(game):
        with _wrap_user_errors("the generator", micro_batch):
            fakes = _generate(game, micro_batch)
        with _wrap_user_errors("the discriminator or the objective", micro_batch):
            _check_losses(game, micro_batch, fakes)


def _make_micro_batch(game: Game, dataset: Dataset, lanes: tuple[int, ...]) -> Batch:
    """Make a batch of lanes with a few images each."""
    per_lane = min(game.d_lane_batch, game.g_lane_batch, MAX_LANE_IMAGES)
    rows = np.arange(per_lane * len(lanes)) % len(dataset.images)
    device = game.g.flat.params.device
    real = read_model_input(dataset.images, rows, device)
    labels = None if game.labels is None else torch.from_numpy(game.labels[rows]).to(device)
    return Batch(real.images, labels, LaneRng(0, 0, lanes, per_lane, device), fields=real.fields)


@torch.no_grad()
def _generate(game: Game, micro_batch: Batch) -> Batch:
    return game.generate(micro_batch, "G")


@contextlib.contextmanager
def _preserve_buffers(game: Game) -> Iterator[None]:
    """Put back, on exit, the buffers and the lanes that layers expect."""
    saved = [(buffer, buffer.clone()) for player in game.players for buffer in player.net.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
        for player in game.players:
            player.set_images_per_lane(player.lane_batch or 1)


@contextlib.contextmanager
def _wrap_user_errors(part: str, micro_batch: Batch) -> Iterator[None]:
    """Turn whatever a user's own code raises into one line about this part."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        labels = "labels that are None (data.labels=false, or the data have none)"
        if micro_batch.labels is not None:
            labels = f"labels [{len(micro_batch.labels)}] (data.labels=false leaves them out)"
        raise UsageError(
            f"{part} fails for a batch of {list(micro_batch.images.shape)} with {labels}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_shapes(game: Game, fakes: Batch, conditioning: str) -> None:
    """Check the shape of G's images, and of D's logits unless the objective is the user's own."""
    count = fakes.rng.per_lane * len(fakes.rng.lanes)
    images = fakes.images
    if not isinstance(images, Tensor) or list(images.shape) != [count, *game.shape]:
        inputs = "inputs" if game.conditioning_input else "latents"
        raise UsageError(
            f"generator: returned {_describe_shape(images)} for {count} {inputs}. Return {[count, *game.shape]}"
        )
    if isinstance(game.objective, UserObjective):
        return  # what its D returns is between the two
    with torch.no_grad():
        d_output = run_discriminator(game.d.net, images, fakes.labels)
    logits = d_output.logits
    if not isinstance(logits, Tensor) or list(logits.shape) != [count]:
        raise UsageError(
            f"discriminator: returned {_describe_shape(logits)} for {count} images. Return logits of [{count}]"
        )
    require_outputs(conditioning, d_output, fakes.labels)


def _describe_shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_losses(game: Game, micro_batch: Batch, fakes: Batch) -> None:
    """Check that both losses are finite scalars with a gradient for their player."""
    for player, loss in _turn_losses(game, micro_batch, fakes):
        with player.requiring_grad():
            total = _check_loss(player, loss())
            has_gradient = total.requires_grad and any(
                grad is not None for grad in torch.autograd.grad(total, player.flat.parameters, allow_unused=True)
            )
            if not has_gradient:
                raise UsageError(f"the loss of {player.name} depends on none of its parameters: there is no gradient")


def _turn_losses(game: Game, micro_batch: Batch, fakes: Batch) -> Sequence[tuple[Player, Callable[[], Loss]]]:
    """Return both players with their loss; D gets `fakes`."""

    def g_loss() -> Loss:
        fake = replace(game.generate(micro_batch, "G"), generator=game.g.net)
        return game.objective.generator(game.d.net, fake, micro_batch, 0)

    return (game.d, lambda: game.objective.discriminator(game.d.net, micro_batch, fakes, 0)), (game.g, g_loss)


def _check_late_start(game: Game, micro_batch: Batch) -> None:
    """Check that G's loss does without D where D has not started."""

    def forbidden_d(images: Tensor, labels: Tensor | None) -> Tensor:
        raise UsageError(
            "objective.generator: calls D while fake.adversarial_weight is 0, which it is until d.start_kimg. Return "
            "the part of the loss that needs no D then"
        )

    if game.late_start != LateStart():
        fake = replace(game.generate(micro_batch, "G"), generator=game.g.net, adversarial_weight=0.0)
        with game.g.requiring_grad():
            _check_loss(game.g, game.objective.generator(forbidden_d, fake, micro_batch, 0))


def _check_replayed_fields(game: Game, fakes: Batch) -> None:
    """Check that buffers of fakes can hold the fields that the objective names: one row for each image."""
    for name in game.objective.replayed_fields:
        value = fakes.fields.get(name)
        if not isinstance(value, Tensor) or not value.dim() or len(value) != len(fakes.images):
            fields = ", ".join(fakes.fields) or "nothing but images"
            raise UsageError(
                f"replayed_fields: {name!r} is {_describe_shape(value)}, and G returns {fields}. Name fields with one "
                f"row for each of {len(fakes.images)} images"
            )


def _check_synchronised(game: Game, micro_batch: Batch) -> None:
    """Check that what a pass adds to synchronised buffers is a sum over its rows, and that only forward writes them."""
    for player in game.players:
        if not player.synchronised:
            continue
        with _preserve_buffers(game):
            for layer in player.synchronised:
                layer.fill(1)  # a moving average that begins at 0 would look like a sum
            merged = _tracked_moments(game, player, [micro_batch])
            by_lane = _tracked_moments(game, player, _split_lanes(micro_batch))
        for layer, a, b in zip(player.synchronised, merged, by_lane):
            if _differs(a, b):
                raise UsageError(
                    f"{layer.name} of {player.name}: what a pass over several lanes adds to {', '.join(layer.names)} "
                    "is not the sum of what each lane adds. Add to them in forward, and use them in apply_synchronised"
                )


def _tracked_moments(game: Game, player: Player, batches: Sequence[Batch]) -> list[Tensor]:
    """Return what passes over batches add to each module with synchronised buffers."""
    with player.tracking_moments():
        for batch in batches:
            fake = replace(game.generate(batch, "G"), generator=game.g.net)
            if player is game.d:
                run_discriminator(game.d.net, fake.images.detach(), fake.labels)
    moments = [layer.moments.clone() for layer in player.synchronised]
    player.moments.zero_()
    return moments


def _check_written_in_forward(game: Game, micro_batch: Batch, fakes: Batch) -> None:
    """Check that backward does not write synchronised buffers: it may run more than once, or not at all."""
    for player, loss in _turn_losses(game, micro_batch, fakes):
        before = [(layer, layer.values()) for layer in player.synchronised]
        with player.requiring_grad():
            torch.autograd.grad(loss().total, player.flat.parameters, allow_unused=True)
        for layer, values in before:
            if not _all_equal(values, layer.values()):
                raise UsageError(
                    f"{layer.name} of {player.name}: backward writes to {', '.join(layer.names)}. Write to them in "
                    "forward"
                )


def _check_loss(player: Player, loss: Any) -> Tensor:
    """Return the total of a loss, a finite scalar; its parts must be scalars too."""
    total = loss.total if isinstance(loss, Loss) else None
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
        raise UsageError(
            f"objective: returned {_describe_value(loss)} for {player.name}. Return a paragan.Loss of a scalar"
        )
    if not total.isfinite():
        raise UsageError(
            f"objective: the loss of {player.name} is {total.item():g} before training. Networks and objective "
            "must return finite numbers for the data as they are"
        )
    for name, part in loss.parts.items():
        if not isinstance(part, Tensor) or part.dim():
            raise UsageError(
                f"Loss.parts[{name!r}]: must be a scalar tensor, got {_describe_value(part)}. Use x.detach().mean()"
            )
    return total


def _describe_value(value: Any) -> str:
    """Describe a loss: "a Loss of a tensor [8]"."""
    if isinstance(value, Loss):
        return f"a Loss of {_describe_value(value.total)}"
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _parameter_addresses(player: Player) -> dict[str, int]:
    """Return the memory address of every parameter."""
    return {name: p.data_ptr() for name, p in player.net.named_parameters()}


def _check_storage(player: Player, before: dict[str, int]) -> None:
    """Check that a pass leaves parameters in the memory where the trainer put them: it trains that memory only."""
    after = _parameter_addresses(player)
    reallocated = [name for name in after if name in before and after[name] != before[name]]
    created = [name for name in after if name not in before]
    removed = [name for name in before if name not in after]
    for names, event in ((reallocated, "gets other memory"), (created, "is created"), (removed, "is removed")):
        if names:
            raise UsageError(
                f"{names[0]} of {player.name}: {event} in a forward pass, so it would not be trained. Create "
                "parameters in __init__, and change them in place"
            )


def _check_buffer_writes(game: Game, micro_batch: Batch, lanes_share_pass: bool) -> None:
    """Check that buffers that a pass writes have no effect: what it writes depends on which lanes share the pass."""
    for player in game.players:
        before = {name: buffer.clone() for name, buffer in player.net.named_buffers()}
        _module_outputs(game, micro_batch)
        changed = [name for name, b in player.net.named_buffers() if not torch.equal(b, before.get(name, b))]
        if changed and lanes_share_pass and _buffers_affect_eval(game, player, micro_batch, before):
            raise UsageError(
                f"{changed[0]} of {player.name}: changes in a forward pass, in a way that lanes cannot see. "
                "Use --device.lanes_per_pass=1 (lane by lane)"
            )


def _buffers_affect_eval(game: Game, player: Player, micro_batch: Batch, before: dict[str, Tensor]) -> bool:
    """Return True if a network in evaluation mode depends on what a training pass wrote into its buffers."""
    modes = [(module, module.training) for module in player.net.modules()]
    player.net.eval()
    outputs_after = _module_outputs(game, micro_batch)
    for name, buffer in player.net.named_buffers():
        buffer.copy_(before.get(name, buffer))
    outputs_before = _module_outputs(game, micro_batch)
    for module, training in modes:
        module.training = training
    return not _all_equal(outputs_after, outputs_before)


def _check_repeatable(game: Game, micro_batch: Batch) -> None:
    """Check that a pass repeats itself from the same state of torch's random numbers and of the buffers."""
    passes: list[list[tuple[str, Tensor]]] = []
    for _ in range(2):
        with _preserve_buffers(game):
            micro_batch.rng.seed_torch("trial")
            passes.append(_named_module_outputs(game, micro_batch))
    for (name, first), (_, second) in zip(*passes):
        if first.shape != second.shape or _differs(first, second):
            raise UsageError(
                f"{name}: returns something else in every pass, and not by torch's random numbers, so no run could be "
                "repeated or resumed. Draw with torch.rand and the like, and keep counters in buffers"
            )


def _check_lane_coupling(game: Game, micro_batch: Batch) -> None:
    """Check that a lane's outputs do not depend on the lanes that share its pass."""
    with _without_dropout(game):
        merged = _named_module_outputs(game, micro_batch)
        repeated = _named_module_outputs(game, micro_batch)
        if not _all_equal([t for _, t in merged], [t for _, t in repeated]):
            return  # passes differ by themselves, so nothing can be compared
        lanes = [_named_module_outputs(game, lane) for lane in _split_lanes(micro_batch)]
    if any(len(outputs) != len(merged) for outputs in lanes):
        return
    for (name, merged_output), *by_lane in zip(merged, *lanes):
        lane_outputs = [t for _, t in by_lane]
        if merged_output.shape[1:] != lane_outputs[0].shape[1:] or len(merged_output) != sum(map(len, lane_outputs)):
            continue  # not one row an image
        if _differs(merged_output, torch.cat(lane_outputs)):
            raise UsageError(
                f"{name}: couples the images of a pass in a way that lanes cannot see. "
                "Use --device.lanes_per_pass=1 (lane by lane)"
            )


def _check_objective_coupling(game: Game, micro_batch: Batch) -> None:
    """Check that the losses of merged lanes are the means of those of each lane, as n ranks compute them."""
    with _without_dropout(game):
        merged = _losses_and_gradients(game, micro_batch)
        repeated = _losses_and_gradients(game, micro_batch)
        if not _all_equal(list(merged.values()), list(repeated.values())):
            return  # the losses differ by themselves, so nothing can be compared
        by_lane = [_losses_and_gradients(game, lane) for lane in _split_lanes(micro_batch)]
    for name, value in merged.items():
        if _differs(value, torch.stack([values[name] for values in by_lane]).mean(0), OBJECTIVE_TOLERANCE):
            raise UsageError(
                f"objective: the {name} is not the mean of those of its lanes, so n ranks would train otherwise than "
                "one (it is a sum, or has a statistic over the batch). Use means over images, or "
                "--device.lanes_per_pass=1 (lane by lane)"
            )


def _losses_and_gradients(game: Game, micro_batch: Batch) -> dict[str, Tensor]:
    """Return "loss of D", "gradient of D" [parameters], and those of G."""
    values: dict[str, Tensor] = {}
    with _preserve_buffers(game):
        fakes = _generate(game, micro_batch)
        for player, loss in _turn_losses(game, micro_batch, fakes):
            with player.requiring_grad():
                total = loss().total
                grads = torch.autograd.grad(total, player.flat.parameters, allow_unused=True)
            values[f"loss of {player.name}"] = total.detach().reshape(1)
            values[f"gradient of {player.name}"] = torch.cat([g.flatten() for g in grads if g is not None])
    return values


def _split_lanes(micro_batch: Batch) -> list[Batch]:
    """Return one batch for each lane."""
    size = micro_batch.rng.per_lane
    labels = [None] * len(micro_batch.rng.lanes) if micro_batch.labels is None else micro_batch.labels.split(size)
    parts: list[Batch] = []
    for number, (lane, real, y) in enumerate(zip(micro_batch.rng.lanes, micro_batch.images.split(size), labels)):
        fields = {name: values.split(size)[number] for name, values in micro_batch.fields.items()}
        parts.append(Batch(real, y, replace(micro_batch.rng, lanes=(lane,)), fields=fields))
    return parts


@contextlib.contextmanager
def _without_dropout(game: Game) -> Iterator[None]:
    modules = [module for player in game.players for module in player.net.modules()]
    dropouts = [m for m in modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for module in dropouts:
        module.training = False
    yield
    for module in dropouts:
        module.training = True


def _module_outputs(game: Game, micro_batch: Batch) -> list[Tensor]:
    """Return the outputs of all modules of both networks."""
    return [tensor for _, tensor in _named_module_outputs(game, micro_batch)]


@torch.no_grad()
def _named_module_outputs(game: Game, micro_batch: Batch) -> list[tuple[str, Tensor]]:
    """Return (module, output) of both networks, in the order in which they ran."""
    outputs: list[tuple[str, Tensor]] = []

    def record_output(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.extend((name, t.float().clone()) for t in _float_tensors(output))

    hooks = [
        module.register_forward_hook(record_output(f"{name or type(module).__name__} of {player.name}"))
        for player in game.players
        for name, module in player.net.named_modules()
    ]
    try:
        fakes = game.generate(micro_batch, "G")
        game.d.net(fakes.images, fakes.labels)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _float_tensors(output: Any) -> list[Tensor]:
    """Return the floating point tensors in a module's output, but scalars."""
    if isinstance(output, Tensor):
        return [output] if output.dim() and output.is_floating_point() else []
    if isinstance(output, dict):
        output = [*output.values()]
    if not isinstance(output, list | tuple):
        return []
    return [tensor for part in output for tensor in _float_tensors(part)]


def _differs(a: Tensor, b: Tensor, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    return a.numel() > 0 and bool((a - b).abs().max() > tolerance * (1e-6 + a.abs().max()))


def _all_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
