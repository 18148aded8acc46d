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

from paragan.config.user_code import OwnObjective
from paragan.core.errors import Unusable
from paragan.core.rng import Draw
from paragan.core.types import Batch, Loss, judged
from paragan.data.dataset import Images
from paragan.data.loader.device_transfer import floats
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.losses.class_losses import refuse_silent

MOST = 4  # images of a lane
CLOSE = 5e-3  # of the largest number: what is the same but for rounding


def tried(game: Game, images: Images, lanes: int, merged: bool, conditioning: str = "") -> Game:
    """The game, once its networks and objective did what they should on two lanes of a few images; `restless` where
    they draw random numbers of torch's own. merged: whether lanes share a pass; conditioning: what
    else D has to say (losses/conditional.py). Everything is as it was afterwards."""
    hand = _hand(game, images, tuple(range(min(lanes, 2))))
    before = {player: _layout(player) for player in game.players}
    with torch.random.fork_rng(devices=[]), _restoring(game):
        with _explained(hand):
            made = _made(game, hand)
            _check_shapes(game, made, conditioning)
            _check_losses(game, hand, made)
        for player in game.players:
            _check_storage(player, before[player])
        _check_written(game, hand, merged)
        restless = not _equal(_seen(game, hand), _seen(game, hand))
        if restless:
            _check_repeatable(game, hand)
        if merged and len(hand.draw.lanes) > 1:
            _check_coupled(game, hand)
    return replace(game, restless=restless)


def _hand(game: Game, images: Images, lanes: tuple[int, ...]) -> Batch:
    """Lanes of a few images each."""
    per_lane = min(game.d_lane, game.g_lane, MOST)
    rows = np.arange(per_lane * len(lanes)) % len(images.images)
    device = game.g.flat.params.device
    real = floats(torch.from_numpy(images.images[rows]).to(device), torch.contiguous_format)
    labels = None if game.labels is None else torch.from_numpy(game.labels[rows]).to(device)
    return Batch(real, labels, Draw(0, 0, lanes, per_lane, device))


@torch.no_grad()
def _made(game: Game, hand: Batch) -> Batch:
    return game.make(hand, "G")


@contextlib.contextmanager
def _restoring(game: Game) -> Iterator[None]:
    """Buffers, and the lanes that layers expect, are left as they were."""
    kept = [(buffer, buffer.clone()) for player in game.players for buffer in player.net.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
        for player in game.players:
            player.see_lanes_of(player.lane_batch or 1)


@contextlib.contextmanager
def _explained(hand: Batch) -> Iterator[None]:
    """Whatever a user's own code raises, in one line."""
    try:
        yield
    except Unusable:
        raise
    except (Exception, SystemExit) as error:
        labels = "labels that are None (data.labels=false, or the data have none)"
        if hand.labels is not None:
            labels = f"labels [{len(hand.labels)}] (data.labels=false leaves them out)"
        raise Unusable(
            f"the networks fail on {len(hand.images)} images (bs / num_workers) of {list(hand.images.shape)} with "
            f"{labels}: {type(error).__name__}: {error}"
        ) from error


def _check_shapes(game: Game, made: Batch, conditioning: str) -> None:
    found = made.images
    wanted = [found.shape[0] if isinstance(found, Tensor) else 0, *game.shape]
    count = made.draw.per_lane * len(made.draw.lanes)
    if not isinstance(found, Tensor) or list(found.shape) != wanted or len(found) != count:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        what = "inputs" if game.given else "latents"
        raise Unusable(f"the generator gives {shape} for {count} {what}; images are {[count, *game.shape]}")
    if isinstance(game.objective, OwnObjective):
        return  # what its D says is between the two
    with torch.no_grad():
        verdict = judged(game.d.net, made.images, made.labels)
    logits = verdict.logits
    if not isinstance(logits, Tensor) or list(logits.shape) != [count]:
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Unusable(f"the discriminator gives {shape} for {count} images; logits are [{count}]")
    refuse_silent(conditioning, verdict, made.labels)


def _check_losses(game: Game, hand: Batch, made: Batch) -> None:
    """Both losses are scalars that a player can descend, and reach it."""
    turns: Sequence[tuple[Player, Callable[[], Loss]]] = (
        (game.d, lambda: game.objective.discriminator(game.d.net, hand, made, 0)),
        (game.g, lambda: game.objective.generator(game.d.net, game.make(hand, "G"), hand, 0)),
    )
    for player, loss in turns:
        with player.moving():
            total = _total(player, loss())
            reached = total.requires_grad and any(
                grad is not None for grad in torch.autograd.grad(total, player.flat.parameters, allow_unused=True)
            )
            if not reached:
                raise Unusable(f"the loss of {player.name} depends on none of its parameters: there is no gradient")


def _total(player: Player, found: Any) -> Tensor:
    """The loss itself, once it is one number, and what it shows is too."""
    total = found.total if isinstance(found, Loss) else None
    if not isinstance(total, Tensor) or total.numel() != 1 or total.dim():
        raise Unusable(f"the objective gives {player.name} {_told(found)}; a paragan.Loss with a scalar is due")
    if not total.isfinite():
        raise Unusable(
            f"the loss of {player.name} is {total.item():g} before anything was trained: networks and objective have "
            "to give finite numbers for the data as they are"
        )
    for name, part in found.parts.items():
        if not isinstance(part, Tensor) or part.dim():
            raise Unusable(f"the objective shows {_told(part)} as {name}; a scalar tensor is due (x.detach().mean())")
    return total


def _told(found: Any) -> str:
    total = found.total if isinstance(found, Loss) else found
    within = "a Loss of " if isinstance(found, Loss) else ""
    return within + (f"a tensor {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__)


def _layout(player: Player) -> dict[str, int]:
    """Where every parameter lies."""
    return {name: p.data_ptr() for name, p in player.net.named_parameters()}


def _check_storage(player: Player, before: dict[str, int]) -> None:
    """Parameters stay where the trainer laid them out: it moves that memory, and no other."""
    after = _layout(player)
    moved = [name for name in after if name in before and after[name] != before[name]]
    for names, what in (
        (moved, "gets other memory"),
        ([name for name in after if name not in before], "is made"),
        ([name for name in before if name not in after], "is lost"),
    ):
        if names:
            raise Unusable(
                f"{names[0]} of {player.name} {what} in a forward pass, and nobody would train it: make parameters in "
                "__init__, and change them in place"
            )


def _check_written(game: Game, hand: Batch, merged: bool) -> None:
    """What a forward pass leaves in a buffer depends on how lanes share passes; only what nobody reads may."""
    for player in game.players:
        before = {name: buffer.clone() for name, buffer in player.net.named_buffers()}
        _seen(game, hand)
        changed = [name for name, b in player.net.named_buffers() if not torch.equal(b, before.get(name, b))]
        if changed and merged and _is_read(game, player, hand, before):
            raise Unusable(
                f"{changed[0]} of {player.name} changes in a forward pass, in a way lanes cannot see; use "
                "--device.merge=1 (lane by lane)"
            )


def _is_read(game: Game, player: Player, hand: Batch, before: dict[str, Tensor]) -> bool:
    """Whether what a network says in evaluation depends on what a pass in training has left in its buffers."""
    modes = [(part, part.training) for part in player.net.modules()]
    player.net.eval()
    now = _seen(game, hand)
    for name, buffer in player.net.named_buffers():
        buffer.copy_(before.get(name, buffer))
    then = _seen(game, hand)
    for part, training in modes:
        part.training = training
    return not _equal(now, then)


def _check_repeatable(game: Game, hand: Batch) -> None:
    """With torch's random numbers and the buffers as they were, a pass is what it was."""
    passes: list[list[tuple[str, Tensor]]] = []
    for _ in range(2):
        with _restoring(game):
            hand.draw.seed_torch("trial")
            passes.append(_calls(game, hand))
    for (name, before), (_, after) in zip(*passes):
        if before.shape != after.shape or _far(before, after):
            raise Unusable(
                f"{name} gives something else in every pass, and not by torch's random numbers, so no run could be "
                "repeated or go on: draw with torch.rand and its like, and keep no count outside of buffers"
            )


def _check_coupled(game: Game, hand: Batch) -> None:
    """A lane's images do not depend on those it shares a pass with."""
    with _without_dropout(game):
        whole = _calls(game, hand)
        if not _equal([t for _, t in whole], [t for _, t in _calls(game, hand)]):
            return  # nobody can tell
        parts = [_calls(game, part) for part in _apart(hand)]
    if any(len(part) != len(whole) for part in parts):
        return
    for (name, together), *apart in zip(whole, *parts):
        alone = [t for _, t in apart]
        if together.shape[1:] != alone[0].shape[1:] or len(together) != sum(map(len, alone)):
            continue  # no row an image
        if _far(together, torch.cat(alone)):
            raise Unusable(
                f"{name} couples the images of a pass in a way lanes cannot see; use --device.merge=1 (lane by lane)"
            )


def _apart(hand: Batch) -> list[Batch]:
    """Lane by lane."""
    count, size = len(hand.draw.lanes), hand.draw.per_lane
    labels = [None] * count if hand.labels is None else hand.labels.split(size)
    return [
        Batch(real, y, replace(hand.draw, lanes=(lane,)))
        for lane, real, y in zip(hand.draw.lanes, hand.images.split(size), labels)
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


def _seen(game: Game, hand: Batch) -> list[Tensor]:
    """What both networks say of a hand."""
    return [tensor for _, tensor in _calls(game, hand)]


@torch.no_grad()
def _calls(game: Game, hand: Batch) -> list[tuple[str, Tensor]]:
    """(module, what it gave), in the order in which they were done."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, out: found.extend((name, t.float().clone()) for t in _tensors(out))

    hooks = [
        part.register_forward_hook(note(f"{name or type(part).__name__} of {player.name}"))
        for player in game.players
        for name, part in player.net.named_modules()
    ]
    try:
        made = game.make(hand, "G")
        game.d.net(made.images, made.labels)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _tensors(out: Any) -> list[Tensor]:
    """Those in what a module gave, of one row or more."""
    if isinstance(out, Tensor):
        return [out] if out.dim() and out.is_floating_point() else []
    inside = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else ()
    return [tensor for part in inside for tensor in _tensors(part)]


def _far(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and bool((a - b).abs().max() > CLOSE * (1e-6 + a.abs().max()))


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
