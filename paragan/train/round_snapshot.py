"""A rank's players as they were at the end of its last complete round, to return to when a round breaks off.

A lost rank breaks a round in the middle: an all-reduce may have ended on some ranks only, and D may have stepped when
the turn of G breaks. Therefore every rank keeps a copy of its players, with the state of their exchanges, at the end of
every round. After a loss the ranks return to it, and play the round again. Data and random numbers are functions of the
lane and the position, so those who take over the lanes of a lost rank compute what it would have computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from paragan.comm.checkpoint_files import StateDict
from paragan.comm.world import World
from paragan.game.player import Player
from paragan.train import checkpoint
from paragan.train.session import Session
from paragan.train.stats import OpenTick


class RoundSnapshot:
    """A copy of the players, in memory of its own, on their device.

    step : the number of rounds that were complete; -1: there is no copy yet
    tick : the losses that were counted since the last line of stats
    """

    def __init__(self) -> None:
        self.step = -1
        self.tick: OpenTick | None = None
        self._tensors: StateDict = {}

    @torch.no_grad()
    def capture(self, session: Session) -> None:
        """Copy the players as they are now. Does not wait for the device."""
        state = full_state(session.game.players)
        for name in self._tensors.keys() - state.keys():
            del self._tensors[name]
        for name, value in state.items():
            saved = self._tensors.get(name)
            if saved is None or saved.shape != value.shape:
                self._tensors[name] = value.clone()
            else:
                saved.copy_(value)
        self.step = session.clock.step
        self.capture_tick(session)

    def capture_tick(self, session: Session) -> None:
        """Copy what was counted since the last line of stats, which the callbacks of this round may have written."""
        self.tick = session.stats.copy_tick()

    def restore(self, session: Session) -> None:
        """Put the players back to where they were."""
        state = {name: value.clone() for name, value in self._tensors.items()}  # an optimizer keeps what it gets
        for player in session.game.players:
            checkpoint.restore_player(player, state)

    def clear(self) -> None:
        """Forget the copy: the others have gone on without it."""
        self.step = -1
        self.tick = None


def full_state(players: Sequence[Player], with_exchanges: bool = True) -> StateDict:
    """Return the state of the players, by name, and that of their exchanges if it is asked for."""
    state: StateDict = {}
    for player in players:
        state |= checkpoint.player_state(player)
        if with_exchanges:
            state |= checkpoint.player_exchange_state(player)
    return state


@torch.no_grad()
def average_exchange_states(players: Sequence[Player], world: World, is_included: bool) -> None:
    """Replace what exchanges keep, such as residuals, by the mean over ranks: the rule for another number of ranks.

    So what is still to be sent stays the same; that of a lost rank is taken to be the mean of the others'. What was
    equal on all ranks stays equal. All ranks call this.

    Args:
        players: of this rank.
        world: its ranks.
        is_included: whether this rank has states of its own, rather than none or those of another rank.
    """
    states = {player.name: player.flat.states() if is_included else {} for player in players}
    names = {name: sorted(vectors) for name, vectors in states.items()}
    rows = [json.loads(text) for text in world.all_gather_str(json.dumps(names))]
    for player in players:
        means: StateDict = {}
        for name in sorted({name for row in rows for name in row[player.name]}):
            own = states[player.name].get(name)
            total = torch.zeros_like(player.flat.grads, dtype=torch.float64) if own is None else own.double()
            world.all_ranks.all_reduce_sum(total).wait()
            means[name] = total / sum(name in row[player.name] for row in rows)
        player.flat.load_states(means)
