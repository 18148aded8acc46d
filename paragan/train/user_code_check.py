"""Networks and objectives of the user's own, tried on a few images before they are trained: what cannot be trained is
refused in one line, and not met in the middle of a run."""

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
from paragan.data.loader.device_transfer import to_model_input
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.losses.class_losses import require_outputs

MAX_LANE_IMAGES = 4  # images of a lane
RELATIVE_TOLERANCE = 5e-3  # of the largest number: what is the same but for rounding


def check_user_networks(
    game: Game, dataset: Dataset, lanes: int, lanes_share_pass: bool, conditioning: str = ""
) -> Game:
    """The game, once its networks and objective did what they should on two lanes of a few images; `restless` where
    they draw random numbers of torch's own. merged: whether lanes share a pass; conditioning: what
    else D has to say (losses/conditional.py). Everything is as it was afterwards."""
    hand = _make_micro_batch(game, dataset, tuple(range(min(lanes, 2))))
    before = {player: _parameter_addresses(player) for player in game.players}
    with torch.random.fork_rng(devices=[]), _preserve_buffers(game):
        with _wrap_user_errors(hand):
            made = _generate(game, hand)
            _check_shapes(game, made, conditioning)
            _check_losses(game, hand, made)
        for player in game.players:
            _check_storage(player, before[player])
        _check_buffer_writes(game, hand, lanes_share_pass)
        restless = not _all_equal(_module_outputs(game, hand), _module_outputs(game, hand))
        if restless:
            _check_repeatable(game, hand)
        if lanes_share_pass and len(hand.rng.lanes) > 1:
            _check_lane_coupling(game, hand)
    return replace(game, uses_torch_rng=restless)


def _make_micro_batch(game: Game, dataset: Dataset, lanes: tuple[int, ...]) -> Batch:
    """Lanes of a few images each."""
    per_lane = min(game.d_lane_batch, game.g_lane_batch, MAX_LANE_IMAGES)
    rows = np.arange(per_lane * len(lanes)) % len(dataset.images)
    device = game.g.flat.params.device
    real = to_model_input(torch.from_numpy(dataset.images[rows]).to(device), torch.contiguous_format)
    labels = None if game.labels is None else torch.from_numpy(game.labels[rows]).to(device)
    return Batch(real, labels, LaneRng(0, 0, lanes, per_lane, device))


@torch.no_grad()
def _generate(game: Game, micro_batch: Batch) -> Batch:
    return game.generate(micro_batch, "G")


@contextlib.contextmanager
def _preserve_buffers(game: Game) -> Iterator[None]:
    """Buffers, and the lanes that layers expect, are left as they were."""
    kept = [(buffer, buffer.clone()) for player in game.players for buffer in player.net.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
        for player in game.players:
            player.set_images_per_lane(player.lane_batch or 1)


@contextlib.contextmanager
def _wrap_user_errors(micro_batch: Batch) -> Iterator[None]:
    """Whatever a user's own code raises, in one line."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        labels = "labels that are None (data.labels=false, or the data have none)"
        if micro_batch.labels is not None:
            labels = f"labels [{len(micro_batch.labels)}] (data.labels=false leaves them out)"
        raise UsageError(
            f"the networks fail on {len(micro_batch.images)} images (bs / num_workers) of {list(micro_batch.images.shape)} with "
            f"{labels}: {type(error).__name__}: {error}"
        ) from error


def _check_shapes(game: Game, fakes: Batch, conditioning: str) -> None:
    found = fakes.images
    wanted = [found.shape[0] if isinstance(found, Tensor) else 0, *game.shape]
    count = fakes.rng.per_lane * len(fakes.rng.lanes)
    if not isinstance(found, Tensor) or list(found.shape) != wanted or len(found) != count:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        what = "inputs" if game.conditioning_input else "latents"
        raise UsageError(f"the generator gives {shape} for {count} {what}; images are {[count, *game.shape]}")
    if isinstance(game.objective, UserObjective):
        return  # what its D says is between the two
    with torch.no_grad():
        verdict = run_discriminator(game.d.net, fakes.images, fakes.labels)
    logits = verdict.logits
    if not isinstance(logits, Tensor) or list(logits.shape) != [count]:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(f"the discriminator gives {shape} for {count} images; logits are [{count}]")
    require_outputs(conditioning, verdict, fakes.labels)


def _check_losses(game: Game, micro_batch: Batch, fakes: Batch) -> None:
    """Both losses are scalars that a player can descend, and reach it."""
    turns: Sequence[tuple[Player, Callable[[], Loss]]] = (
        (game.d, lambda: game.objective.discriminator(game.d.net, micro_batch, fakes, 0)),
        (game.g, lambda: game.objective.generator(game.d.net, game.generate(micro_batch, "G"), micro_batch, 0)),
    )
    for player, loss in turns:
        with player.requiring_grad():
            total = _check_loss(player, loss())
            reached = total.requires_grad and any(
                grad is not None for grad in torch.autograd.grad(total, player.flat.parameters, allow_unused=True)
            )
            if not reached:
                raise UsageError(f"the loss of {player.name} depends on none of its parameters: there is no gradient")


def _check_loss(player: Player, loss: Any) -> Tensor:
    """The loss itself, once it is one number, and what it shows is too."""
    total = loss.total if isinstance(loss, Loss) else None
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
        raise UsageError(
            f"the objective gives {player.name} {_describe_value(loss)}; a paragan.Loss with a scalar is due"
        )
    if not total.isfinite():
        raise UsageError(
            f"the loss of {player.name} is {total.item():g} before anything was trained: networks and objective have "
            "to give finite numbers for the data as they are"
        )
    for name, part in loss.parts.items():
        if not isinstance(part, Tensor) or part.dim():
            raise UsageError(
                f"the objective shows {_describe_value(part)} as {name}; a scalar tensor is due (x.detach().mean())"
            )
    return total


def _describe_value(value: Any) -> str:
    total = value.total if isinstance(value, Loss) else value
    within = "a Loss of " if isinstance(value, Loss) else ""
    return within + (f"a tensor {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__)


def _parameter_addresses(player: Player) -> dict[str, int]:
    """Where every parameter lies."""
    return {name: p.data_ptr() for name, p in player.net.named_parameters()}


def _check_storage(player: Player, before: dict[str, int]) -> None:
    """Parameters stay where the trainer laid them out: it moves that memory, and no other."""
    after = _parameter_addresses(player)
    moved = [name for name in after if name in before and after[name] != before[name]]
    for names, what in (
        (moved, "gets other memory"),
        ([name for name in after if name not in before], "is made"),
        ([name for name in before if name not in after], "is lost"),
    ):
        if names:
            raise UsageError(
                f"{names[0]} of {player.name} {what} in a forward pass, and nobody would train it: make parameters in "
                "__init__, and change them in place"
            )


def _check_buffer_writes(game: Game, micro_batch: Batch, lanes_share_pass: bool) -> None:
    """What a forward pass leaves in a buffer depends on how lanes share passes; only what nobody reads may."""
    for player in game.players:
        before = {name: buffer.clone() for name, buffer in player.net.named_buffers()}
        _module_outputs(game, micro_batch)
        changed = [name for name, b in player.net.named_buffers() if not torch.equal(b, before.get(name, b))]
        if changed and lanes_share_pass and _buffers_affect_eval(game, player, micro_batch, before):
            raise UsageError(
                f"{changed[0]} of {player.name} changes in a forward pass, in a way lanes cannot see; use "
                "--device.lanes_per_pass=1 (lane by lane)"
            )


def _buffers_affect_eval(game: Game, player: Player, micro_batch: Batch, before: dict[str, Tensor]) -> bool:
    """Whether what a network says in evaluation depends on what a pass in training has left in its buffers."""
    modes = [(part, part.training) for part in player.net.modules()]
    player.net.eval()
    now = _module_outputs(game, micro_batch)
    for name, buffer in player.net.named_buffers():
        buffer.copy_(before.get(name, buffer))
    then = _module_outputs(game, micro_batch)
    for part, training in modes:
        part.training = training
    return not _all_equal(now, then)


def _check_repeatable(game: Game, micro_batch: Batch) -> None:
    """With torch's random numbers and the buffers as they were, a pass is what it was."""
    passes: list[list[tuple[str, Tensor]]] = []
    for _ in range(2):
        with _preserve_buffers(game):
            micro_batch.rng.seed_torch("trial")
            passes.append(_named_module_outputs(game, micro_batch))
    for (name, before), (_, after) in zip(*passes):
        if before.shape != after.shape or _differs(before, after):
            raise UsageError(
                f"{name} gives something else in every pass, and not by torch's random numbers, so no run could be "
                "repeated or go on: draw with torch.rand and its like, and keep no count outside of buffers"
            )


def _check_lane_coupling(game: Game, micro_batch: Batch) -> None:
    """A lane's images do not depend on those it shares a pass with."""
    with _without_dropout(game):
        whole = _named_module_outputs(game, micro_batch)
        if not _all_equal([t for _, t in whole], [t for _, t in _named_module_outputs(game, micro_batch)]):
            return  # nobody can tell
        parts = [_named_module_outputs(game, part) for part in _split_lanes(micro_batch)]
    if any(len(part) != len(whole) for part in parts):
        return
    for (name, together), *apart in zip(whole, *parts):
        alone = [t for _, t in apart]
        if together.shape[1:] != alone[0].shape[1:] or len(together) != sum(map(len, alone)):
            continue  # no row an image
        if _differs(together, torch.cat(alone)):
            raise UsageError(
                f"{name} couples the images of a pass in a way lanes cannot see; use --device.lanes_per_pass=1 (lane by lane)"
            )


def _split_lanes(micro_batch: Batch) -> list[Batch]:
    """Lane by lane."""
    count, size = len(micro_batch.rng.lanes), micro_batch.rng.per_lane
    labels = [None] * count if micro_batch.labels is None else micro_batch.labels.split(size)
    return [
        Batch(real, y, replace(micro_batch.rng, lanes=(lane,)))
        for lane, real, y in zip(micro_batch.rng.lanes, micro_batch.images.split(size), labels)
    ]


@contextlib.contextmanager
def _without_dropout(game: Game) -> Iterator[None]:
    parts = [part for player in game.players for part in player.net.modules()]
    dropping = [part for part in parts if isinstance(part, nn.modules.dropout._DropoutNd) and part.training]
    for part in dropping:
        part.training = False
    yield
    for part in dropping:
        part.training = True


def _module_outputs(game: Game, micro_batch: Batch) -> list[Tensor]:
    """What both networks say of a hand."""
    return [tensor for _, tensor in _named_module_outputs(game, micro_batch)]


@torch.no_grad()
def _named_module_outputs(game: Game, micro_batch: Batch) -> list[tuple[str, Tensor]]:
    """(module, what it gave), in the order in which they were done."""
    found: list[tuple[str, Tensor]] = []

    def record_output(name: str) -> Callable[..., None]:
        return lambda module, inputs, out: found.extend((name, t.float().clone()) for t in _float_tensors(out))

    hooks = [
        part.register_forward_hook(record_output(f"{name or type(part).__name__} of {player.name}"))
        for player in game.players
        for name, part in player.net.named_modules()
    ]
    try:
        made = game.generate(micro_batch, "G")
        game.d.net(made.images, made.labels)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _float_tensors(output: Any) -> list[Tensor]:
    """Those in what a module gave, of one row or more."""
    if isinstance(output, Tensor):
        return [output] if output.dim() and output.is_floating_point() else []
    inside = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in inside for tensor in _float_tensors(part)]


def _differs(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and bool((a - b).abs().max() > RELATIVE_TOLERANCE * (1e-6 + a.abs().max()))


def _all_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
