"""What a strategy's exchanges cost on the links there are: a game without networks, played through the real loop.

The players are vectors; computing is waiting, and fills the buckets as backward would, so that many hosts on few cores
measure the network and not the cores.
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
from paragan.game.turn import play_turns, start_exchanges
from paragan.plan.cost import role_traffic
from paragan.plan.predict.stub_game import StubObjective, equal_layers
from paragan.strategies.base import Role, Strategy

MIN_LANES = 8  # of one image, or more
WARM_UP_ROUNDS = 2  # rounds
NAME_WIDTH = 44  # letters of a strategy in the table


@dataclass(frozen=True)
class ExchangeMeasurement:
    """One strategy on these links: a row of the file. Times are medians of the slowest rank, in ms; bytes are what the
    rank that sends most sends in a round, counted, predicted, and seen by the kernel on the interface that
    GLOO_SOCKET_IFNAME names."""

    strategy: str
    wire: str
    topology: str
    ranks: int
    params: int
    step_ms: float
    compute_ms: float
    overlap: float | None  # share of the exchanges' own time that is hidden behind computing
    efficiency: float | None  # computing over the step
    sent_bytes: int
    predicted_bytes: int
    kernel_bytes: int | None

    def to_line(self) -> str:
        """A row of the table on the screen."""
        shares = {"overlap": self.overlap, "efficiency": self.efficiency}
        hidden = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)
        who = f"{self.strategy:<{NAME_WIDTH}}{self.wire:<10}{self.topology:<13}{self.ranks:>5}"
        line = f"{who}{self.step_ms:>10.1f}{self.sent_bytes:>14,}"
        return f"{line}{self.predicted_bytes:>14,}  {hidden}".rstrip()


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
    """Play a strategy on this world; every rank calls this, and learns the same.

    params: of both players together; compute_ms: of a round, where a rank plays both on its part of the lanes; share:
    D's own part of it.
    """
    played = _time_rounds(strategy, world, num_params, compute_ms, d_compute_share, rounds)
    overlap = efficiency = None
    if compute_ms > 0 and world.size > 1:
        alone_ms = _time_rounds(strategy, world, num_params, 0.0, d_compute_share, rounds).step_ms
        computing_ms = _time_rounds(strategy, World.solo(), num_params, compute_ms, d_compute_share, rounds).step_ms
        computing_ms = _max_over_ranks(world, [computing_ms])[0]
        if not played.is_async:  # else the exchanges have no time of their own
            overlap = min(1.0, max(0.0, 1 - (played.step_ms - computing_ms) / alone_ms))
        efficiency = computing_ms / played.step_ms
    sent, predicted, kernel = map(
        int, _max_over_ranks(world, [played.sent_bytes, played.predicted_bytes, played.kernel_bytes or 0])
    )
    wire = strategy.wire.name
    return ExchangeMeasurement(
        strategy="+".join(word for word in name.split("+") if word not in (wire, f"wire={wire}")),
        wire=wire,
        topology=strategy.gossip_topology.name if strategy.gossip_topology else "all",
        ranks=world.size,
        params=num_params,
        step_ms=played.step_ms,
        compute_ms=compute_ms,
        overlap=overlap,
        efficiency=efficiency,
        sent_bytes=sent,
        predicted_bytes=predicted,
        kernel_bytes=None if played.kernel_bytes is None else kernel,
    )


@dataclass(frozen=True)
class _TimedRounds:
    """ms a round, bytes that this rank sent in one, and whether its messages may lag."""

    step_ms: float
    sent_bytes: int
    kernel_bytes: int | None
    predicted_bytes: int
    is_async: bool


def _time_rounds(
    strategy: Strategy, world: World, num_params: int, compute_ms: float, d_compute_share: float, rounds: int
) -> _TimedRounds:
    gc.collect()  # of a large game before: two may be too much
    lanes = world.size * -(-MIN_LANES // world.size)  # as many on every rank
    period = strategy.traffic_period
    rounds = period * -(-rounds // period)
    game = make_emulated_game(
        num_params, compute_ms / 1000 * world.size / lanes, d_compute_share, bucket_bytes(strategy.wire)
    )
    role = strategy.role(game, world, lanes)
    hands = [Batch(torch.zeros(len(role.share.lanes), 1), None, LaneRng(0, 0, role.share.lanes, 1))]
    for step in range(WARM_UP_ROUNDS):
        play_role_round(role, hands, step)
    times: list[float] = []
    sent, seen = sum(p.meter.sent_bytes for p in game.players), _kernel_sent_bytes()
    world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
    for step in range(WARM_UP_ROUNDS, WARM_UP_ROUNDS + rounds):
        if not role.drain:  # who may lag is not to be held up
            world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
        start = time.perf_counter()
        play_role_round(role, hands, step)
        times.append(1000 * (time.perf_counter() - start))
    if role.drain:
        times = [statistics.fmean(times)] * len(times)  # some rounds wait for links, most do not
        role.drain()
    world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
    sent = sum(p.meter.sent_bytes for p in game.players) - sent
    now = _kernel_sent_bytes()
    kernel = None if seen is None or now is None or world.size == 1 else (now - seen) // rounds
    predicted = role_traffic(role, game).sent_bytes
    return _TimedRounds(
        statistics.median(_max_over_ranks(world, times)), sent // rounds, kernel, predicted, bool(role.drain)
    )


def play_role_round(role: Role, micro_batches: list[Batch], step: int) -> None:
    start_exchanges(role.round, step)
    for beat in role.round:
        play_turns(beat, micro_batches, step, step, 1)


def _max_over_ranks(world: World, times: Sequence[float]) -> list[float]:
    rows, work = world.all_ranks.all_gather(torch.tensor(times, dtype=torch.float64))
    work.wait()
    return rows.amax(0).tolist()


def _kernel_sent_bytes() -> int | None:
    """Bytes that have left by the interface gloo was told to use, as the kernel counts them."""
    counter = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "-") / "statistics/tx_bytes"
    return int(counter.read_text()) if counter.exists() else None


# a game without networks ----------------------------------------------------------------------------------------------


class _SleepFunction(torch.autograd.Function):
    """Waits as a layer would, forward so many seconds an image and backward twice as long, and gives its weight a
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds * len(x)
        _sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        moving = ctx.needs_input_grad[1]
        _sleep(ctx.seconds * (2 if moving else 1))
        return grads[0], ctx.gradient if moving else None, None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _SleepingNet(nn.Module):
    """A network of so many parameters that computes nothing."""

    def __init__(self, num_params: int, seconds: float):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in equal_layers(num_params)])
        self.gradients = [torch.randn(len(p)) for p in self.layers]
        self.layer_s = seconds / len(self.layers)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for weight, gradient in zip(self.layers, self.gradients):
            x = _SleepFunction.apply(x, weight, gradient, self.layer_s)  # pyright: ignore
        return x


def make_emulated_game(num_params: int, round_s: float, d_compute_share: float, max_bucket_bytes: int) -> Game:
    """A lane's part of a round takes so many seconds, of which D itself has the share. D's turn is a pass of G and six
    of D (forward, and backward twice as long, on reals and on fakes), G's three of G and two of D."""
    if num_params < 2:
        raise UsageError(f"--params {num_params} must be 2 or more: both players need one")

    def player(name: str, size: int, passes: float) -> Player:
        return Player(
            name,
            _SleepingNet(size, passes),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-9, foreach=False),
            bucket_bytes=max_bucket_bytes,
        )

    g, d = (
        player("G", num_params - num_params // 2, (1 - d_compute_share) * round_s / 4),
        player("D", num_params // 2, d_compute_share * round_s / 8),
    )
    return Game(g=g, d=d, objective=StubObjective(), latent=1)
