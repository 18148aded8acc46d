"""The cost of a run, computed before it is trained: operations, memory and traffic.

`paragan train -n` prints it. Memory and operations of a round come from plan/memory.py and plan/round_cost.py, which
play a round with tensors that have no storage. Traffic comes from the exchanges (`Exchange.traffic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from paragan.comm.traffic import Traffic, mean_traffic, ring_all_reduce
from paragan.core.types import primary_array
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import Role

FLOP_COUNT_IMAGES = 2  # images in the passes whose operations are counted


@dataclass(frozen=True)
class RunCost:
    """Cost of one round (d_steps turns of D and one of G) over all ranks, and the number of rounds.

    num_parameters : of G, of D
    round_flops    : of one round; a multiplication and an addition count as two operations
    state_bytes    : on a rank: parameters, gradients, two Adam moments, the average of G; of the latter three its part,
                     if they are sharded
    peak_bytes     : largest memory of a rank during a round: state, activations, batch
    traffic        : what one rank sends in one round, by a description of the rank
    """

    rounds: int
    num_parameters: tuple[int, int]
    round_flops: float
    state_bytes: int
    peak_bytes: int
    traffic: Mapping[str, Traffic]

    def to_lines(self) -> list[str]:
        """Format the cost for the screen."""
        g, d = self.num_parameters
        lines = [
            f"{self.rounds:,} rounds; G has {g:,} parameters, D {d:,}; {format_bytes(self.state_bytes)} of state per "
            "rank",
            f"{self.round_flops / 1e9:.3g} GFLOP per round, {self.round_flops * self.rounds / 1e12:.3g} TFLOP in all; "
            f"tensors take {format_bytes(self.peak_bytes)} of memory on a rank",
        ]
        for sender, traffic in self.traffic.items():
            is_rare = traffic.sent_bytes > 0 and traffic.messages == 0  # a mean that was rounded
            messages = "less than one message" if is_rare else f"{traffic.messages} messages"
            lines.append(f"{sender} sends {traffic.sent_bytes / 1e6:.3g} MB in {messages} per round")
        return lines


def format_bytes(nbytes: float) -> str:
    """Format a size with three digits: "1.5 GB", "33 MB", "120 kB"."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.3g} GB"
    if nbytes >= 1e6:
        return f"{nbytes / 1e6:.3g} MB"
    return f"{nbytes / 1e3:.3g} kB"


def estimate_run_cost(
    game: Game, roles: Sequence[Role], *, rounds: int, round_flops: float, peak_bytes: int
) -> RunCost:
    """Compute the cost of a game that was built but not played.

    Args:
        game: may consist of tensors without storage.
        roles: the role that all ranks have, or one of each team.
        rounds: of the whole run.
        round_flops: of one round over all ranks.
        peak_bytes: of a rank.
    """
    state = sum(_state_bytes(player, has_average=player is game.g) for player in game.players)
    traffic: dict[str, Traffic] = {}
    for role in roles:
        sender = f"a rank of {role.trained_players[0].name}" if role.is_split else "each rank"
        traffic[sender] = role_traffic(role, game)
    counts = tuple(sum(p.numel() for p in player.flat.parameters) for player in game.players)
    return RunCost(rounds, (counts[0], counts[1]), round_flops, state, peak_bytes, traffic)


def _state_bytes(player: Player, has_average: bool) -> int:
    ranks = player.sharded.step_group.size if player.sharded else 1
    nbytes = player.flat.params.nbytes
    return 2 * nbytes + (2 + has_average) * nbytes // ranks


def role_traffic(role: Role, game: Game) -> Traffic:
    """Return what one rank sends in one round."""
    return sum((player_traffic(role, player) for player in game.players), Traffic())


def player_traffic(role: Role, player: Player) -> Traffic:
    """Return what one rank sends for a player in one round: messages of its exchange, batch moments and snapshots."""
    turns = [turn for group in role.round for turn in group if turn.player is player]
    total = role.extra_traffic.get(player.name, Traffic())
    for turn in turns:
        total += player.flat.traffic(turn.exchange)
        if player.gradient_clip:
            total += mean_traffic(player.gradient_clip.traffic, turn.step_period)
        if player.moments.numel():
            total += ring_all_reduce(player.moments.nbytes, turn.team.size)
    return total


def count_forward_flops(game: Game) -> tuple[float, float]:
    """Count the operations of one image's forward pass through G and through D."""
    device = game.g.flat.params.device
    per_lane = max([FLOP_COUNT_IMAGES, *(layer.lane_batch or 0 for layer in game.g.batch_coupled_layers)])
    z, y = game.generator_inputs(game.dummy_batch(per_lane, device), "D")
    with torch.no_grad():
        with FlopCounterMode(display=False) as g_counter:
            images = primary_array(game.g.net(z, y), game.primary)
        with FlopCounterMode(display=False) as d_counter:
            game.d.net(images, y)
    return g_counter.get_total_flops() / per_lane, d_counter.get_total_flops() / per_lane


def count_round_flops(
    g_forward_flops: float,
    d_forward_flops: float,
    batch: int,
    d_steps: int,
    extra_fakes_for_d: bool = True,
    g_batch_ratio: float = 1.0,
) -> float:
    """Return the operations of one round: those of both players' turns (`count_turn_flops`)."""
    return sum(count_turn_flops(g_forward_flops, d_forward_flops, batch, d_steps, extra_fakes_for_d, g_batch_ratio))


def count_turn_flops(
    g_forward_flops: float,
    d_forward_flops: float,
    batch: int,
    d_steps: int,
    extra_fakes_for_d: bool = True,
    g_batch_ratio: float = 1.0,
) -> tuple[float, float]:
    """Return the operations of G's turn and of D's turns in a round, for an objective without penalties.

    A backward pass costs one forward pass for the inputs and one for the weights. D's turn: a forward pass of G if
    `extra_fakes_for_d`, forward and backward passes of D on reals and on fakes. G's turn: forward passes of both, the
    backward pass of D for its inputs and the whole backward pass of G.

    Args:
        g_forward_flops: of one image's forward pass through G (`count_forward_flops`).
        d_forward_flops: the same for D.
        batch: images of D's batch.
        d_steps: turns of D in a round.
        extra_fakes_for_d: whether G makes images that only D uses.
        g_batch_ratio: G's batch divided by D's.
    """
    g_turn = batch * g_batch_ratio * (3 * g_forward_flops + 2 * d_forward_flops)
    d_turns = batch * d_steps * (extra_fakes_for_d * g_forward_flops + 2 * 3 * d_forward_flops)
    return g_turn, d_turns
