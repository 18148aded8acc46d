"""One optimizer step of one player, and several that move together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paragan.comm.bucket import Exchange
from paragan.comm.process_group import Group
from paragan.core.devices import BACKENDS, ContextManager, backend_of
from paragan.core.types import Batch, Loss
from paragan.game.graph_capture import GraphRecorder
from paragan.game.player import Player


def no_op(step: int) -> None:
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
    needs_new_reals: bool = True
    on_step_end: Callable[[int], None] = no_op
    recorder: GraphRecorder | None = None

    def backward(self, micro_batches: Sequence[Batch], step: int) -> Iterator[tuple[Turn, Loss, int]]:
        """Backward through every hand: what one pass over some of this rank's lanes sees. The opponent is
        frozen: no weight gradients that nobody wants."""
        share = sum(len(hand.rng.lanes) for hand in micro_batches)
        with self.player.requiring_grad():
            for i, hand in enumerate(micro_batches, 1):
                weight = self.weight * len(hand.rng.lanes) / share
                yield self, self._run_pass(hand, step, weight, is_last=i == len(micro_batches)), len(hand.rng.lanes)
        self.player.flat.mark_backward_done()

    def _run_pass(self, micro_batch: Batch, step: int, weight: float, is_last: bool) -> Loss:
        """One pass, forward and backward."""
        if self.recorder is None:
            return self._forward_backward(micro_batch, step, weight, reduce_moments=is_last)
        loss = self.recorder.run(
            lambda hand: self._forward_backward(hand, step, weight, reduce_moments=False), micro_batch, step, weight
        )
        if is_last:
            self.player.all_reduce_moments(self.team)
        return loss

    def _forward_backward(self, micro_batch: Batch, step: int, weight: float, reduce_moments: bool) -> Loss:
        with self.player.tracking_moments():
            loss = self.loss(micro_batch, step)
        if reduce_moments:
            self.player.all_reduce_moments(self.team)  # travels under backward
        total = loss.total if weight == 1 else loss.total * weight
        total.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss


TurnGroup = tuple[Turn, ...]  # turns computed at one point, which then move together


def start_exchanges(turn_groups: Sequence[TurnGroup], step: int) -> None:
    """A round begins, and with it the exchange of every player's first turn: what is known leaves. What a round that
    failed has left is dropped."""
    first = {turn.player: turn for beat in reversed(turn_groups) for turn in reversed(beat)}
    for player, turn in reversed(first.items()):
        player.flat.abort()
        player.flat.start_exchange(turn.exchange, step)


def play_turns(
    turns: TurnGroup, micro_batches: Sequence[Batch], step: int, total_images: int, new_images: int
) -> list[tuple[Turn, Loss, int]]:
    """Play one beat. images: real images seen after this round; moved: by this round.

    Returns what each pass lost, and on how many lanes."""
    losses: list[tuple[Turn, Loss, int]] = []
    with contextlib.ExitStack() as mail:
        for turn in turns:
            turn.player.prepare_step(total_images)
            mail.enter_context(turn.player.flat.exchanging(turn.exchange, step, passes=len(micro_batches)))
        with player_streams([turn.player for turn in turns]) as streams:
            for turn, stream in zip(turns, streams):
                with stream:
                    losses += turn.backward(micro_batches, step)
    for turn in turns:
        turn.player.step(total_images, new_images)
        turn.on_step_end(step)
    return losses


def player_streams(players: Sequence[Player]) -> contextlib.AbstractContextManager[list[ContextManager]]:
    """Where the turn of each is computed: the first where everything is, the others on streams of their own beside it,
    where the device has such and passing through a network does not write to it."""
    device = players[0].flat.params.device
    kind = BACKENDS["cpu"] if any(player.mutates_buffers for player in players) else backend_of(device)
    return kind.side_streams(device, len(players))


def alternating(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D, `d_steps` times, then G against the D that results."""
    return (*((d,) for _ in range(d_steps)), (g,))


def simultaneous(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D and G at once, both from where they stand; further steps of D come first."""
    return (*((d,) for _ in range(d_steps - 1)), (d, g))


def simultaneous_reuse_fakes(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D and G at once, both from where they stand when the round begins, G's images first; further steps of D come
    after."""
    return ((g, d), *((d,) for _ in range(d_steps - 1)))
