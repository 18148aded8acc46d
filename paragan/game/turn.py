"""Turns: one optimizer step of one player, and groups of turns that step at once.

All turns of a group compute their gradients from the same point, then all players step. On a GPU their passes run on
streams of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from paragan.comm.bucket import Exchange
from paragan.comm.outer_optimizer import for_later_turns
from paragan.comm.process_group import Group
from paragan.core.backends import ContextManager
from paragan.core.devices import BACKENDS, backend_of
from paragan.core.types import Batch, Loss
from paragan.game.graph_capture import GraphRecorder
from paragan.game.player import Player


def no_op(step: int) -> None:
    """Do nothing after a step."""


@dataclass(frozen=True)
class Turn:
    """One step of a player.

    loss            : (micro-batch, step) -> the loss, against whatever opponent the strategy chose
    exchange        : how the gradient is exchanged with the team
    team            : the ranks that take the same step
    weight          : this rank's part of the team's gradient, own lanes / team lanes (comm/exchange.py)
    needs_new_reals : whether it takes a new batch of reals, or uses the last one again
    step_period     : the optimizer steps in every so many rounds (with gradients that its exchange has accumulated)
    on_step_end     : called after the step
    recorder        : captures and replays its passes, if they are captured
    """

    player: Player
    loss: Callable[[Batch, int], Loss]
    exchange: Exchange
    team: Group
    weight: float = 1.0
    needs_new_reals: bool = True
    step_period: int = 1
    on_step_end: Callable[[int], None] = no_op
    recorder: GraphRecorder | None = None

    def repeated(self, times: int) -> tuple[TurnGroup, ...]:
        """Return this turn, taken `times` times in a round."""
        later = replace(self, exchange=for_later_turns(self.exchange))
        return ((self,), *([(later,)] * (times - 1)))

    def backward(self, micro_batches: Sequence[Batch], step: int) -> Iterator[tuple[Turn, Loss, int]]:
        """Run forward and backward of every micro-batch. The opponent gets no gradients.

        Yields:
            This turn, the loss of a pass, and its number of lanes.
        """
        num_lanes = sum(len(micro_batch.rng.lanes) for micro_batch in micro_batches)
        with self.player.requiring_grad():
            for i, micro_batch in enumerate(micro_batches, 1):
                lanes = len(micro_batch.rng.lanes)
                weight = self.weight * lanes / num_lanes
                yield self, self._run_pass(micro_batch, step, weight, is_last=i == len(micro_batches)), lanes
        self.player.mark_backward_done()

    def _run_pass(self, micro_batch: Batch, step: int, weight: float, is_last: bool) -> Loss:
        """Run one pass, forward and backward."""
        if self.recorder is None:
            return self._forward_backward(micro_batch, step, weight, reduce_moments=is_last)
        loss = self.recorder.run(
            lambda staged: self._forward_backward(staged, step, weight, reduce_moments=False), micro_batch, step, weight
        )
        if is_last:
            self.player.all_reduce_moments(self.team)
        return loss

    def _forward_backward(self, micro_batch: Batch, step: int, weight: float, reduce_moments: bool) -> Loss:
        with self.player.tracking_moments():
            loss = self.loss(micro_batch, step)
        if reduce_moments:
            self.player.all_reduce_moments(self.team)  # sent during backward
        total = loss.total if weight == 1 else loss.total * weight
        total.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss


TurnGroup = tuple[Turn, ...]  # turns computed from one point, whose players then step at once


def start_exchanges(turn_groups: Sequence[TurnGroup], step: int) -> None:
    """Begin a round: start the exchange of every player's first turn, after dropping what a failed round left."""
    first = {turn.player: turn for group in reversed(turn_groups) for turn in reversed(group)}
    for player, turn in reversed(first.items()):
        player.start_exchange(turn.exchange, step)


def play_turn_groups(
    turn_groups: Sequence[TurnGroup],
    next_reals: Callable[[TurnGroup], Sequence[Batch]],
    step: int,
    total_images: int,
    new_images: int,
) -> Iterator[list[tuple[Turn, Loss, int]]]:
    """Play a round.

    Args:
        turn_groups: of the round, in order.
        next_reals: (turn group) -> the micro-batches of real images that it uses.
        step: the number of the round.
        total_images: real images seen after this round.
        new_images: real images of this round.

    Yields:
        What `play_turns` returns, group by group.
    """
    start_exchanges(turn_groups, step)
    for turns in turn_groups:
        yield play_turns(turns, next_reals(turns), step, total_images, new_images)


def play_turns(
    turns: TurnGroup, micro_batches: Sequence[Batch], step: int, total_images: int, new_images: int
) -> list[tuple[Turn, Loss, int]]:
    """Play one group of turns.

    Args:
        micro_batches: this rank's lanes of the batch, pass by pass.
        total_images: real images seen after this round.
        new_images: real images of this round.

    Returns:
        The turn, the loss and the number of lanes of every pass.
    """
    losses: list[tuple[Turn, Loss, int]] = []
    with contextlib.ExitStack() as exchanges:
        for turn in turns:
            turn.player.prepare_step(total_images, new_images)
            exchanges.enter_context(turn.player.exchanging(turn.exchange, step, passes=len(micro_batches)))
        exchanges.enter_context(backward_in_this_thread())
        with player_streams([turn.player for turn in turns]) as streams:
            for turn, stream in zip(turns, streams):
                with stream:
                    losses += turn.backward(micro_batches, step)
    for turn in turns:
        turn.player.step(total_images, new_images, update=(step + 1) % turn.step_period == 0)
        turn.on_step_end(step)
    return losses


def backward_in_this_thread() -> contextlib.AbstractContextManager[object]:
    """Return a context in which autograd uses no threads of its own, as for CPUs.

    Every thread of autograd numbers what it records by itself. With a second derivative (R1), the order of sums would
    depend on how much each thread has recorded before, and a resumed run would round differently.
    """
    return torch.autograd.set_multithreading_enabled(False)


def player_streams(players: Sequence[Player]) -> contextlib.AbstractContextManager[list[ContextManager]]:
    """Return one stream per player: the current one for the first, side streams for the others.

    If the device has no streams, or a pass writes to buffers of a network, all use the current one.
    """
    device = players[0].flat.params.device
    kind = BACKENDS["cpu"] if any(player.mutates_buffers for player in players) else backend_of(device)
    return kind.side_streams(device, len(players))


def alternating(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D takes `d_steps` steps, then G one against the D that results."""
    return (*d.repeated(d_steps), (g,))


def simultaneous(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D and G step at once, from the same point. Further steps of D come before."""
    *before, last = d.repeated(d_steps)
    return (*before, (*last, g))


def simultaneous_reuse_fakes(d: Turn, g: Turn, d_steps: int) -> tuple[TurnGroup, ...]:
    """D and G step at once, from the point where the round begins; D uses the images of G's turn, which comes first.

    Further steps of D come after.
    """
    first, *after = d.repeated(d_steps)
    return ((g, *first), *after)
