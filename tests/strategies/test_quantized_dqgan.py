"""Results of DQGAN's theory on small games: its exchanges and its extrapolation on real ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import tiny_run
from paragan.comm.compression import block_quantizer
from paragan.comm.compression.compressors import Exact, Int8
from paragan.comm.exchange import NoExchange, OptimisticMirrorDescent
from paragan.comm.flat_params import FlatParams
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.quantized_descent import QuantizedDescent
from paragan.config.resolve import make_spec, resolve
from paragan.core.errors import RunError, UsageError
from paragan.strategies.sync import Sync
from paragan.train.build import build_game, build_networks

SIZE = 64  # of each player


class ThreeBits:
    """A user-defined compressor with levels -3 .. 3."""

    name, lossy, feedback = "three bits", True, 1.0

    def nbytes(self, n):
        return block_quantizer.num_blocks(n, 64) * block_quantizer.encoded_block_bytes(64, 4)

    def delta(self, n):
        return 1 / (1 + 63 / 36)

    def encode(self, x, out, seed):
        block_quantizer.encode_levels(x, out, block=64, bits=4, max_level=3, rule="absmax", stochastic=False, seed=seed)

    def decode(self, data, out):
        block_quantizer.decode_levels(data, out, block=64, bits=4, max_level=3)


class Point(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)))


def bilinear(exchange, rank, ranks, steps, *, rate=0.4, noise=0.0, loud=0.0):
    """Play min_x max_y sum of a_i x_i y_i on this rank; return the RMS gradient norm of the last quarter of steps.

    noise: added to every gradient; loud: added to the first number's gradient, which the norm leaves out
    """
    a = torch.linspace(0.5, 1.0, SIZE)
    x, y = FlatParams.from_network(Point(1)), FlatParams.from_network(Point(2))
    g = torch.Generator().manual_seed(rank)
    loudness = torch.full((SIZE,), noise)
    loudness[0] += loud
    distances = []
    for step in range(steps):
        with contextlib.ExitStack() as stack:
            for player in (x, y):
                stack.enter_context(player.exchanging(exchange(rate), step))
            x.grads.copy_(a * y.params + loudness * torch.randn(SIZE, generator=g)).div_(ranks)
            y.grads.copy_(-a * x.params + loudness * torch.randn(SIZE, generator=g)).div_(ranks)
        for player in (x, y):
            player.finish()
            player.params.sub_(player.grads, alpha=rate)
        distances.append(torch.hypot((a * y.params)[1:].norm(), (a * x.params)[1:].norm()))
    return float(torch.stack(distances[-steps // 4 :]).square().mean().sqrt())


def test_extrapolation_converges_where_descent_diverges():
    assert bilinear(lambda rate: OptimisticMirrorDescent(lambda: rate), 0, 1, 600) < 1e-3
    assert bilinear(lambda rate: NoExchange(), 0, 1, 600) > 1e3


def on_ranks(pool, ranks, wire, steps, feedback=1.0, **settings):
    """Play the game on several ranks, each extrapolating locally."""

    def job(world):
        return bilinear(
            lambda rate: QuantizedDescent(wire, world.all_ranks, lambda: rate, 1 / ranks, feedback),
            world.rank,
            ranks,
            steps,
            **settings,
        )

    return pool(ranks, job)[0]


@pytest.mark.slow
def test_error_feedback_ends_five_times_closer_with_three_bits(pool):
    with_feedback = on_ranks(pool, 2, ThreeBits(), 500, loud=4.0)
    without_feedback = on_ranks(pool, 2, ThreeBits(), 500, feedback=0.0, loud=4.0)
    assert with_feedback < without_feedback / 5


@pytest.mark.slow
def test_noise_falls_as_one_over_the_number_of_workers(pool):
    """The squared noise floor times the number of workers is constant: linear speed-up."""
    floors = {1: bilinear(lambda rate: OptimisticMirrorDescent(lambda: rate), 0, 1, 240, noise=0.1) ** 2}
    for ranks in (2, 4, 8):
        floors[ranks] = ranks * on_ranks(pool, ranks, Exact(), 240, noise=0.1) ** 2
    assert max(floors.values()) < 1.35 * min(floors.values())


def test_at_a_rate_of_0_nothing_moves_and_the_residual_is_kept(pool):
    def job(world):
        flat = FlatParams.from_network(Point(1))
        rates = iter([0.2, 0.2, 0.0])
        exchange = QuantizedDescent(ThreeBits(), world.all_ranks, lambda: next(rates), 1 / 2)
        results = []
        for step in range(3):
            with flat.exchanging(exchange, step):
                flat.grads.copy_(torch.sin(3 * flat.params) / 2)
            flat.finish()
            results.append((flat.grads.clone(), flat.states()["step_residual"]))
        return results

    for (first, none), (second, residual), (third, kept) in pool(2, job):
        assert not first.any()
        assert not none.any()
        assert second.any()
        assert residual.any()
        assert not third.any()
        assert torch.equal(kept, residual)


@pytest.mark.parametrize("value", [float("nan"), 1e39])
def test_a_step_that_is_not_finite_is_refused_by_all_and_changes_nothing(pool, value):
    def job(world):
        flat = FlatParams.from_network(Point(1).double(), player_name="D")
        exchange = QuantizedDescent(ThreeBits(), world.all_ranks, lambda: 1.0, 1 / 2)
        with flat.exchanging(exchange, 0):
            flat.grads.fill_(0.5)
        flat.finish()
        before = flat.states() | {"params": flat.params.clone()}
        try:
            with flat.exchanging(exchange, 1):
                flat.grads.fill_(value if world.rank else 0.5)
        except RunError as error:
            return str(error), tiny_run.is_equal(before, flat.states() | {"params": flat.params})

    (other, kept), (own, also_kept) = pool(2, job)
    assert kept
    assert also_kept
    assert "the gradient of D w is " in own
    assert "delivered numbers that are not finite" in other


def test_a_lossy_wire_carries_float32_only():
    of = tiny_run.make_run(strategy=Sync(wire=Int8()))
    data = tiny_run.make_dataset()
    of = resolve(of, data)
    pair = build_networks(of, make_spec(of.data, data), torch.device("cpu"))
    pair.d.double()
    with pytest.raises(UsageError, match="D has float64 parameters"):
        build_game(of, pair, data, torch.device("cpu"))


@pytest.mark.parametrize("strategy", ["strategy", "strategy.per_label_strategy"])
def test_the_papers_update_quantizes_a_network_as_one_vector(strategy):
    name = "per-label" if strategy.endswith("per_label_strategy") else "quantized"
    inner = "strategy.per_label_strategy=quantized" if name == "per-label" else "strategy.paper_update=true"
    run = tiny_run.make_run(f"strategy={name}", inner, f"{strategy}.paper_update=true")
    assert run.strategy.uses_single_bucket


def test_a_residual_of_the_default_form_becomes_one_of_steps():
    """A checkpoint may be of that form, or of a version whose paper_update had it."""
    flat = FlatParams.from_network(Point(0), bucket_bytes=1 << 30)
    exchange = QuantizedDescent(Exact(), SingleRankGroup(), lambda: 0.5, include_residual=False)
    bucket = flat.buckets[0]
    bucket.state("previous")
    bucket.state("residual").fill_(2.0)
    with torch.no_grad(), flat.exchanging(exchange, 0):
        assert "residual" not in bucket.states
        assert (bucket.state("step_residual") == 1.0).all()
    flat.finish()
    n = flat.parameters[0].numel()
    assert (flat.grads[:n] * 0.5 == 1.0).all(), "it is part of the step"
