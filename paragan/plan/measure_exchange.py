"""Measure what the exchanges of a strategy cost on the present links: `paragan bench strategies`.

An emulated game runs through the real turns and exchanges. Its networks have parameters but compute nothing: each layer
sleeps and then sets its gradient, so buckets fill as in a real backward pass. Therefore many hosts can share a few
cores, and the network is measured, not the processor.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragan.comm.flat_params import bucket_bytes
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.turn import play_turn_groups
from paragan.plan.cost import role_traffic
from paragan.plan.predict.simulated_game import StubObjective, equal_layers
from paragan.strategies.base import Role, Strategy

MIN_LANES = 8  # each of one image
WARM_UP_ROUNDS = 2
NAME_WIDTH = 44  # characters of a strategy in the table


@dataclass(frozen=True)
class ExchangeMeasurement:
    """One strategy on these links: a row of the JSON file.

    Times are medians over rounds, of the slowest rank. Bytes are those that the busiest rank sends in one round:
    counted by the exchanges, predicted by `Exchange.traffic`, and counted by the kernel on the interface that
    GLOO_SOCKET_IFNAME names.
    """

    strategy: str
    wire: str
    topology: str
    ranks: int
    params: int
    step_ms: float
    compute_ms: float
    overlap: float | None  # fraction of the exchanges' own time that is hidden behind computing
    efficiency: float | None  # computing time divided by the time of a step
    sent_bytes: int
    predicted_bytes: int
    kernel_bytes: int | None

    def to_line(self) -> str:
        """Format a row below TABLE_HEADER."""
        fractions = {"overlap": self.overlap, "efficiency": self.efficiency}
        notes = ", ".join(f"{name} {value:.0%}" for name, value in fractions.items() if value is not None)
        setting = f"{self.strategy:<{NAME_WIDTH}}{self.wire:<10}{self.topology:<13}{self.ranks:>5}"
        numbers = f"{self.step_ms:>10.1f}{self.sent_bytes:>14,}{self.predicted_bytes:>14,}"
        return f"{setting}{numbers}  {notes}".rstrip()


TABLE_HEADER = (
    f"{'strategy':<{NAME_WIDTH}}{'wire':<10}{'topology':<13}{'ranks':>5}{'ms':>10}{'sent':>14}{'predicted':>14}"
)


def measure_exchange(
    strategy: Strategy,
    name: str,
    world: World,
    *,
    num_params: int,
    compute_ms: float,
    d_compute_share: float,
    rounds: int,
) -> ExchangeMeasurement:
    """Measure a strategy on this world. All ranks call it together and get the same result.

    Args:
        strategy: to measure.
        name: as the user gave it, such as "sync+int8".
        world: whose ranks and links are used.
        num_params: of both players together.
        compute_ms: emulated computing time of a round, if a rank plays both players on its share of the lanes.
        d_compute_share: D's part of it, from 0 to 1.
        rounds: timed rounds; rounded up to whole periods of the strategy.
    """
    measured = _time_rounds(strategy, world, num_params, compute_ms, d_compute_share, rounds)
    overlap = None
    efficiency = None
    if compute_ms > 0 and world.size > 1:
        exchange_ms = _time_rounds(strategy, world, num_params, 0.0, d_compute_share, rounds).step_ms
        solo_ms = _time_rounds(strategy, World.solo(), num_params, compute_ms, d_compute_share, rounds).step_ms
        solo_ms = _max_over_ranks(world, [solo_ms])[0]
        if not measured.is_async:  # an asynchronous exchange has no time of its own
            overlap = min(1.0, max(0.0, 1 - (measured.step_ms - solo_ms) / exchange_ms))
        efficiency = solo_ms / measured.step_ms
    counts = [measured.sent_bytes, measured.predicted_bytes, measured.kernel_bytes or 0]
    sent, predicted, kernel = map(int, _max_over_ranks(world, counts))
    wire = strategy.wire.name
    return ExchangeMeasurement(
        strategy="+".join(word for word in name.split("+") if word not in (wire, f"wire={wire}")),
        wire=wire,
        topology=strategy.gossip_topology.name if strategy.gossip_topology else "all",
        ranks=world.size,
        params=num_params,
        step_ms=measured.step_ms,
        compute_ms=compute_ms,
        overlap=overlap,
        efficiency=efficiency,
        sent_bytes=sent,
        predicted_bytes=predicted,
        kernel_bytes=None if measured.kernel_bytes is None else kernel,
    )


@dataclass(frozen=True)
class _TimedRounds:
    """Means or medians of one rank's timed rounds."""

    step_ms: float
    sent_bytes: int  # by this rank, in a round
    kernel_bytes: int | None
    predicted_bytes: int
    is_async: bool  # whether messages may arrive rounds later


def _time_rounds(
    strategy: Strategy, world: World, num_params: int, compute_ms: float, d_compute_share: float, rounds: int
) -> _TimedRounds:
    gc.collect()  # frees the game before this one: memory may not suffice for two
    lanes = world.size * -(-MIN_LANES // world.size)  # the same number on every rank
    period = strategy.traffic_period
    rounds = period * -(-rounds // period)
    round_s = compute_ms / 1000 * world.size / lanes
    game = make_emulated_game(
        num_params,
        round_s,
        d_compute_share,
        bucket_bytes(strategy.wire, single_bucket=strategy.uses_single_bucket),
        strategy.num_fragments,
    )
    role = strategy.role(game, world, lanes)
    micro_batches = [Batch(torch.zeros(len(role.share.lanes), 1), None, LaneRng(0, 0, role.share.lanes, 1))]
    for step in range(WARM_UP_ROUNDS):
        play_role_round(role, micro_batches, step)
    if role.drain:
        role.drain()
    times: list[float] = []
    sent_before = sum(p.meter.sent_bytes for p in game.players)
    kernel_before = _kernel_sent_bytes()
    world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
    for step in range(WARM_UP_ROUNDS, WARM_UP_ROUNDS + rounds):
        if not role.drain:  # a barrier would hold up messages that may lag
            world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
        start = time.perf_counter()
        play_role_round(role, micro_batches, step)
        times.append(1000 * (time.perf_counter() - start))
    if role.drain:
        times = [statistics.fmean(times)] * len(times)  # a few rounds wait for messages, most do not
        role.drain()
    world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
    sent = sum(p.meter.sent_bytes for p in game.players) - sent_before
    kernel_after = _kernel_sent_bytes()
    kernel = None
    if world.size > 1 and kernel_before is not None and kernel_after is not None:
        kernel = (kernel_after - kernel_before) // rounds
    return _TimedRounds(
        step_ms=statistics.median(_max_over_ranks(world, times)),
        sent_bytes=sent // rounds,
        kernel_bytes=kernel,
        predicted_bytes=role_traffic(role, game).sent_bytes,
        is_async=bool(role.drain),
    )


def play_role_round(role: Role, micro_batches: list[Batch], step: int) -> None:
    """Play one round of a role of an emulated game."""
    for _ in play_turn_groups(role.round, lambda turns: micro_batches, step, step, 1):
        pass


def _max_over_ranks(world: World, times: Sequence[float]) -> list[float]:
    rows, work = world.all_ranks.all_gather(torch.tensor(times, dtype=torch.float64))
    work.wait()
    return rows.amax(0).tolist()


def _kernel_sent_bytes() -> int | None:
    """Return the bytes that the kernel sent on the interface that gloo uses; None without GLOO_SOCKET_IFNAME."""
    counter = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "-") / "statistics/tx_bytes"
    return int(counter.read_text()) if counter.exists() else None


# The emulated game ----------------------------------------------------------------------------------------------------


class _SleepFunction(torch.autograd.Function):
    """A layer that sleeps: `seconds` per image forward, twice as long backward; it then sets its weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient = gradient
        ctx.seconds = seconds * len(x)
        _sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_weight_grad = ctx.needs_input_grad[1]
        _sleep(ctx.seconds * (2 if needs_weight_grad else 1))
        return grads[0], ctx.gradient if needs_weight_grad else None, None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _SleepingNet(nn.Module):
    """A network of `num_params` parameters that sleeps for `seconds` per image in a forward pass."""

    def __init__(self, num_params: int, seconds: float):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in equal_layers(num_params)])
        self.gradients = [torch.randn(len(p)) for p in self.layers]
        self.layer_s = seconds / len(self.layers)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for weight, gradient in zip(self.layers, self.gradients):
            x = _SleepFunction.apply(x, weight, gradient, self.layer_s)  # pyright: ignore
        return x


def make_emulated_game(
    num_params: int, round_s: float, d_compute_share: float, max_bucket_bytes: int, fragments: int = 1
) -> Game:
    """Make a game whose networks sleep instead of computing.

    In units of a forward pass, D's turn takes one of G and six of D (forward, and backward twice as long, on reals and
    on fakes). G's turn takes three of G and two of D.

    Args:
        num_params: of both players together.
        round_s: seconds that one lane takes in a round.
        d_compute_share: D's part of it, from 0 to 1.
        max_bucket_bytes: of the flat vectors.
        fragments: parts that buckets do not cross.

    Raises:
        UsageError: there are fewer than two parameters.
    """
    if num_params < 2:
        raise UsageError(f"--params {num_params}: both players need a parameter. Use 2 or more")

    def make_player(name: str, size: int, forward_s: float) -> Player:
        return Player(
            name,
            _SleepingNet(size, forward_s),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-9, foreach=False),
            bucket_bytes=max_bucket_bytes,
            fragments=fragments,
        )

    g = make_player("G", num_params - num_params // 2, (1 - d_compute_share) * round_s / 4)
    d = make_player("D", num_params // 2, d_compute_share * round_s / 8)
    return Game(g=g, d=d, objective=StubObjective(), latent=1)
