"""What a run costs, counted before it is paid for: operations, memory, bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from paragan.comm.traffic import Traffic, ring_all_reduce
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import Role

FLOP_COUNT_IMAGES = 2  # images in the passes that are counted


@dataclass(frozen=True)
class RunCost:
    """Of one round (d_steps turns of D and one of G) over all ranks, and of the whole run."""

    rounds: int
    num_parameters: tuple[int, int]  # G, D
    round_flops: float  # of one round: multiplications and additions, counted separately
    state_bytes: int  # on every rank: parameters, gradients, two moments of Adam, the average of G
    peak_bytes: int  # on a rank, at the fullest moment of a round: state, activations, batch
    traffic: Mapping[str, Traffic]  # what one rank sends in one round, by who it is

    def to_lines(self) -> list[str]:
        g, d = self.num_parameters
        return [
            f"{self.rounds:,} rounds; G has {g:,} parameters, D {d:,}; {format_bytes(self.state_bytes)} of state a rank",
            f"{self.round_flops / 1e9:.3g} GFLOP a round, {self.round_flops * self.rounds / 1e12:.3g} TFLOP in all; "
            f"tensors take {format_bytes(self.peak_bytes)} of memory on a rank",
            *(
                f"{who} sends {t.sent_bytes / 1e6:.3g} MB in {t.messages} messages a round"
                for who, t in self.traffic.items()
            ),
        ]


def format_bytes(n: int) -> str:
    """Bytes, in words."""
    return f"{n / 1e9:.1f} GB" if n > 1e9 else f"{n / 1e6:.0f} MB"


def estimate_run_cost(
    game: Game, roles: Sequence[Role], *, rounds: int, round_flops: float, peak_bytes: int
) -> RunCost:
    """Count a game and roles that were built but not played: one that all ranks have, or one of either team.
    flops, peak_bytes: of one round, foreseen (plan/memory.py)."""
    state = sum(4 * 4 * p.flat.params.numel() for p in game.players) + 4 * game.g.flat.params.numel()
    traffic = {
        f"a rank of {role.trained_players[0].name}" if role.is_split else "each rank": role_traffic(role, game)
        for role in roles
    }
    counts = tuple(sum(p.numel() for p in player.flat.parameters) for player in game.players)
    return RunCost(rounds, (counts[0], counts[1]), round_flops, state, peak_bytes, traffic)


def role_traffic(role: Role, game: Game) -> Traffic:
    """What one rank sends in one round."""
    return sum((player_traffic(role, player) for player in game.players), Traffic())


def player_traffic(role: Role, player: Player) -> Traffic:
    """What one rank sends for a player in one round: gradients (or what the exchange sends) and batch moments."""
    turns = [turn for beat in role.round for turn in beat if turn.player is player]
    moments = (ring_all_reduce(player.moments.nbytes, turn.team.size) for turn in turns if player.batch_coupled_layers)
    posted = role.extra_traffic.get(player.name, Traffic())
    return sum(moments, sum((player.flat.traffic(turn.exchange) for turn in turns), posted))


def count_forward_flops(game: Game) -> tuple[float, float]:
    """Operations of one image's forward pass through G and through D."""
    device = game.g.flat.params.device
    per_lane = max([FLOP_COUNT_IMAGES, *(layer.lane_batch or 0 for layer in game.g.batch_coupled_layers)])
    z, y = game.generator_inputs(game.dummy_batch(per_lane, device), "D")
    with torch.no_grad():
        with FlopCounterMode(display=False) as of_g:
            images = game.g.net(z, y)
        with FlopCounterMode(display=False) as of_d:
            game.d.net(images, y)
    return of_g.get_total_flops() / per_lane, of_d.get_total_flops() / per_lane


def count_round_flops(
    g_forward_flops: float,
    d_forward_flops: float,
    batch: int,
    d_steps: int,
    extra_fakes_for_d: bool = True,
    g_batch_ratio: float = 1.0,
) -> float:
    """Operations of one round: `turn_flops`, both players'."""
    return sum(count_turn_flops(g_forward_flops, d_forward_flops, batch, d_steps, extra_fakes_for_d, g_batch_ratio))


def count_turn_flops(
    g_forward_flops: float,
    d_forward_flops: float,
    batch: int,
    d_steps: int,
    extra_fakes_for_d: bool = True,
    g_batch_ratio: float = 1.0,
) -> tuple[float, float]:
    """Operations of G's turn of a round, and of D's, of an objective that adds nothing to them (what one does add is
    counted by playing it: plan/memory.py). ratio: of G's batch to D's. A backward pass costs a forward for the inputs
    and one for the weights.

    D's turn: G forward (`for_d`: where its images are for D alone), D forward and backward on reals and fakes. G's
    turn: both forward, D's inputs and all of G backward.
    """
    return batch * g_batch_ratio * (3 * g_forward_flops + 2 * d_forward_flops), batch * d_steps * (
        extra_fakes_for_d * g_forward_flops + 2 * 3 * d_forward_flops
    )
