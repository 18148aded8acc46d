"""The sum over a lossy wire, and optimistic mirror descent, against simulations of all ranks in one process."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from paragan.comm.bucket import Bucket, ExchangeEvent
from paragan.comm.compressed_allreduce import CompressedAllReduce, NonFiniteMessage
from paragan.comm.compression.compressors import FP16, Exact, Int4, Int8, RandomK, Sign, TopK
from paragan.comm.exchange import OptimisticMirrorDescent
from paragan.comm.flat_params import FlatParams
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.quantized_descent import QuantizedDescent
from paragan.comm.traffic import Meter, Traffic
from paragan.core.errors import Diverged, RunError


def net(width=50):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 7))


def roundtrip(wire, x, seed=0):
    data = torch.zeros(wire.nbytes(len(x)), dtype=torch.uint8)
    out = torch.empty_like(x)
    wire.encode(x, data, seed)
    wire.decode(data, out)
    return out


def random_gradient(rank, step, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * rank + step))


def run_exchange(world, exchange, steps, bucket_bytes=256):
    """Return the gradients after every step, the residual at the end, and the sizes of the buckets."""
    flat = FlatParams.from_network(net(), bucket_bytes)
    gradients = []
    for step in range(steps):
        with flat.exchanging(exchange, step):
            flat.grads.copy_(random_gradient(world.rank, step, len(flat.grads)))
        flat.finish()
        gradients.append(flat.grads.clone())
    return gradients, flat.states().get("residual"), [len(bucket.grads) for bucket in flat.buckets]


def simulate_server(wire, size, steps, bucket_sizes, feedback):
    """Simulate the paper's server and workers, shard by shard: p = g + e, Q(p), e = p - Q(p), Q of the mean."""
    n = sum(bucket_sizes)
    sums_by_step = []
    residuals = [torch.zeros(n) for _ in range(size)]
    for step in range(steps):
        sums = []
        start = 0
        for length in bucket_sizes:
            bucket = slice(start, start + length)
            shard = -(-length // size)
            p = [size * random_gradient(r, step, n)[bucket] + residuals[r][bucket] for r in range(size)]
            p = [nn.functional.pad(x, (0, shard * size - length)).view(size, shard) for x in p]
            q = [torch.stack([roundtrip(wire, row) for row in rows]) for rows in p]
            e = [x - y for x, y in zip(p, q)]
            mean = torch.stack([sum(rows[owner] for rows in q) / size for owner in range(size)])
            q_mean = torch.stack([roundtrip(wire, row) for row in mean])
            for owner in range(size):
                e[owner][owner] += size * (mean[owner] - q_mean[owner])
            sums.append(q_mean.view(-1)[:length])
            for r in range(size):
                residuals[r][bucket] = feedback * e[r].view(-1)[:length]
            start += length
        sums_by_step.append(torch.cat(sums))
    return sums_by_step, residuals


@pytest.mark.slow(after=6)
@pytest.mark.parametrize("wire", [Int8(), Int4(), Sign(), TopK(fraction=0.1)], ids=lambda w: w.name)
@pytest.mark.parametrize("feedback", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("size", [4, 2])
def test_equals_the_papers_server(pool, wire, feedback, size):
    results = pool(size, lambda world: run_exchange(world, CompressedAllReduce(wire, world.all_ranks, feedback), 5))
    expected, residuals = simulate_server(wire, size, 5, results[0][2], feedback)
    for rank, (gradients, residual, _) in enumerate(results):
        for gradient, reference in zip(gradients, expected, strict=True):
            assert torch.equal(gradient, reference)
        if feedback:
            assert torch.equal(residual, residuals[rank])
        else:
            assert residual is None


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("size", [3, 4])
def test_vectors_of_any_length(pool, n, size):
    def job(world):
        bucket = Bucket(torch.zeros(n), random_gradient(world.rank, 0, n), 0, [(0, "w")])
        for awaited in CompressedAllReduce(Exact(), world.all_ranks)(bucket, 0):
            if not isinstance(awaited, ExchangeEvent):
                awaited.wait()
        return bucket.grads, bucket.state("residual")

    for summed, residual in pool(size, job):
        torch.testing.assert_close(summed, sum(random_gradient(r, 0, n) for r in range(size)))
        assert residual.abs().max() == 0


@pytest.mark.parametrize("wire", [Int4(), Sign(), RandomK(fraction=0.1)], ids=lambda w: w.name)
def test_sent_plus_residual_is_the_gradient(pool, wire):
    """The sum over all steps is preserved."""
    results = pool(4, lambda world: run_exchange(world, CompressedAllReduce(wire, world.all_ranks), 6))
    n = len(results[0][0][0])
    total = sum(random_gradient(rank, step, n).double() for rank in range(4) for step in range(6))
    sent = sum(gradients.double() for gradients in results[0][0])
    residual = sum(residual.double() for _, residual, _ in results) / 4
    torch.testing.assert_close(sent + residual, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_counted_bytes_equal_predicted_bytes(pool, size):
    def job(world):
        meter = Meter()
        exchange = CompressedAllReduce(Int8(), world.all_ranks.with_meter(meter))
        _, _, bucket_sizes = run_exchange(world, exchange, 3)
        predicted = sum((exchange.traffic(n, 4) for n in bucket_sizes), start=Traffic())
        return (meter.sent_bytes, meter.messages), (3 * predicted.sent_bytes, 3 * predicted.messages)

    for counted, predicted in pool(size, job):
        assert counted == predicted


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_reject_a_nonfinite_step(pool, bad):
    def job(world):
        flat = FlatParams.from_network(net(), bucket_bytes=256, player_name="D")
        exchange = CompressedAllReduce(Int4(), world.all_ranks)
        with flat.exchanging(exchange, 0):
            flat.grads.copy_(random_gradient(world.rank, 0, len(flat.grads)))
        flat.finish()
        before = flat.states()["residual"]
        try:
            with flat.exchanging(exchange, 1):
                flat.grads.copy_(random_gradient(world.rank, 1, len(flat.grads)))
                if world.rank == 1:
                    flat.parameters[1].grad.view(-1)[3] = (
                        bad  # the last layer's weight: parameters are in reverse order
                    )
            failure = None
        except RunError as error:
            failure = type(error), str(error)
        return failure, torch.equal(before, flat.states()["residual"])

    for rank, (failure, is_unchanged) in enumerate(pool(3, job)):
        assert is_unchanged
        if rank == 1:
            assert failure == (Diverged, "the gradient of D 1.weight is not finite: the step was refused")
        else:
            assert failure[0] is NonFiniteMessage
            assert "int4 wire delivered numbers that are not finite" in failure[1]


def test_number_too_large_for_the_wire_is_named(pool):
    def job(world):
        flat = FlatParams.from_network(net(), bucket_bytes=256, player_name="D")
        try:
            with flat.exchanging(CompressedAllReduce(FP16(), world.all_ranks), 0):
                if world.rank == 1:
                    flat.parameters[1].grad.view(-1)[3] = 7e4  # float32 holds it
            return ""
        except RunError as error:
            return str(error)

    refusals = pool(2, job)
    assert refusals[1] == "the gradient of D 1.weight is too large for the fp16 wire: the step was refused"
    assert "fp16 wire delivered numbers that are not finite" in refusals[0]


def test_float16_gradients_may_have_a_sum_that_float16_cannot_hold():
    flat = FlatParams.from_network(net().half(), bucket_bytes=sys.maxsize)
    exchange = QuantizedDescent(Exact(), SingleRankGroup(), lambda: 0.1)
    for step in range(2):
        with flat.exchanging(exchange, step):
            flat.grads.fill_(1000)
        flat.finish()
    assert flat.grads.sum().isinf()
    for p in flat.parameters:
        torch.testing.assert_close(p.grad, torch.full_like(p, 1000))


def test_optimistic_mirror_descent_steps_from_the_original_point():
    flat = FlatParams.from_network(net())
    lr = 0.1
    params = flat.params.clone()
    previous_gradient = torch.zeros_like(params)
    for step in range(3):
        gradient = random_gradient(0, step, len(params))
        with flat.exchanging(OptimisticMirrorDescent(lambda: lr), step):
            assert torch.equal(flat.params, torch.sub(params, previous_gradient, alpha=lr))
            flat.grads.copy_(gradient)
        flat.finish()
        assert torch.equal(flat.params, params)
        assert torch.equal(flat.grads, gradient if step else torch.zeros_like(gradient))
        previous_gradient = gradient
        flat.params.sub_(flat.grads, alpha=lr)
        params = flat.params.clone()
