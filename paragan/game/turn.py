"""One optimizer step of one player, and several that move together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paragan.comm.bucket import Exchange
from paragan.comm.process_group import Group
from paragan.core.devices import KINDS, Context, kind_of
from paragan.core.types import Batch, Loss
from paragan.game.graph_capture import Recorder
from paragan.game.player import Player


def nothing(step: int) -> None:
    pass


@dataclass(frozen=True)
class Turn:
    """What a player's step is computed against, with whom it is agreed, and what others get to see of it.

    weight : this rank's share of the team's gradient, own lanes / team lanes (see comm/exchange.py).
    fresh  : whether it wants a new batch of reals, or plays on with the last one.
    recorder: what plays its passes, where they are recorded and replayed.
    """

    player: Player
    loss: Callable[[Batch, int], Loss]
    exchange: Exchange
    team: Group
    weight: float = 1.0
    fresh: bool = True
    after: Callable[[int], None] = nothing
    recorder: Recorder | None = None

    def differentiate(self, hands: Sequence[Batch], step: int) -> Iterator[tuple[Turn, Loss, int]]:
        """Backward through every hand: what one pass over some of this rank's lanes sees. The opponent is
        frozen: no weight gradients that nobody wants."""
        share = sum(len(hand.draw.lanes) for hand in hands)
        with self.player.moving():
            for i, hand in enumerate(hands, 1):
                weight = self.weight * len(hand.draw.lanes) / share
                yield self, self._passed(hand, step, weight, last=i == len(hands)), len(hand.draw.lanes)
        self.player.flat.filled()

    def _passed(self, hand: Batch, step: int, weight: float, last: bool) -> Loss:
        """One pass, forward and backward."""
        if self.recorder is None:
            return self._backward(hand, step, weight, share=last)
        loss = self.recorder.play(lambda hand: self._backward(hand, step, weight, share=False), hand, step, weight)
        if last:
            self.player.share_moments(self.team)
        return loss

    def _backward(self, hand: Batch, step: int, weight: float, share: bool) -> Loss:
        with self.player.counting():
            loss = self.loss(hand, step)
        if share:
            self.player.share_moments(self.team)  # travels under backward
        total = loss.total if weight == 1 else loss.total * weight
        total.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss


Beat = tuple[Turn, ...]  # turns computed at one point, which then move together


def begin(beats: Sequence[Beat], step: int) -> None:
    """A round begins, and with it the exchange of every player's first turn: what is known leaves. What a round that
    failed has left is dropped."""
    first = {turn.player: turn for beat in reversed(beats) for turn in reversed(beat)}
    for player, turn in reversed(first.items()):
        player.flat.give_up()
        player.flat.begin(turn.exchange, step)


def play(beat: Beat, hands: Sequence[Batch], step: int, images: int, moved: int) -> list[tuple[Turn, Loss, int]]:
    """Play one beat. images: real images seen after this round; moved: by this round.

    Returns what each pass lost, and on how many lanes."""
    losses: list[tuple[Turn, Loss, int]] = []
    with contextlib.ExitStack() as mail:
        for turn in beat:
            turn.player.prepare(images)
            mail.enter_context(turn.player.flat.exchanging(turn.exchange, step, passes=len(hands)))
        with beside([turn.player for turn in beat]) as streams:
            for turn, stream in zip(beat, streams):
                with stream:
                    losses += turn.differentiate(hands, step)
    for turn in beat:
        turn.player.move(images, moved)
        turn.after(step)
    return losses


def beside(players: Sequence[Player]) -> contextlib.AbstractContextManager[list[Context]]:
    """Where the turn of each is computed: the first where everything is, the others on streams of their own beside it,
    where the device has such and passing through a network does not write to it."""
    device = players[0].flat.params.device
    kind = KINDS["cpu"] if any(player.written for player in players) else kind_of(device)
    return kind.beside(device, len(players))


def alternately(d: Turn, g: Turn, d_steps: int) -> tuple[Beat, ...]:
    """D, `d_steps` times, then G against the D that results."""
    return (*((d,) for _ in range(d_steps)), (g,))


def together(d: Turn, g: Turn, d_steps: int) -> tuple[Beat, ...]:
    """D and G at once, both from where they stand; further steps of D come first."""
    return (*((d,) for _ in range(d_steps - 1)), (d, g))


def apart(d: Turn, g: Turn, d_steps: int) -> tuple[Beat, ...]:
    """D and G at once, both from where they stand when the round begins, G's images first; further steps of D come
    after."""
    return ((g, d), *((d,) for _ in range(d_steps - 1)))
