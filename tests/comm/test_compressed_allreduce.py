"""The sum over a lossy wire, and looking ahead, against simulations of all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.comm.bucket import Bucket, ExchangeEvent
from paragan.comm.compressed_allreduce import CompressedAllReduce, NonFiniteMessage
from paragan.comm.compression.compressors import FP16, Exact, Int4, Int8, RandomK, Sign, TopK
from paragan.comm.exchange import NoExchange, OptimisticMirrorDescent
from paragan.comm.flat_params import FlatParams
from paragan.comm.traffic import Meter
from paragan.core.errors import Diverged, RunError


def net(width=50):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 7))


def coded(wire, x, seed=0):
    data, out = torch.zeros(wire.nbytes(len(x)), dtype=torch.uint8), torch.empty_like(x)
    wire.encode(x, data, seed)
    wire.decode(data, out)
    return out


def gradient(rank, step, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * rank + step))


def exchanged(world, exchange, steps, bucket_bytes=256):
    """What every step left in the gradients, and the residual in the end."""
    flat, found = FlatParams(net(), bucket_bytes), []
    for step in range(steps):
        with flat.exchanging(exchange, step):
            flat.grads.copy_(gradient(world.rank, step, len(flat.grads)))
        flat.finish()
        found.append(flat.grads.clone())
    return found, flat.states().get("residual"), [len(bucket.grads) for bucket in flat.buckets]


def simulated(wire, size, steps, buckets, feedback):
    """The paper's server and workers as one process, shard by shard: p = g + e, Q(p), e = p - Q(p), Q of the mean."""
    n, found = sum(buckets), []
    errors = [torch.zeros(n) for _ in range(size)]
    for step in range(steps):
        sums, first = [], 0
        for length in buckets:
            here, shard = slice(first, first + length), -(-length // size)
            owed = [size * gradient(r, step, n)[here] + errors[r][here] for r in range(size)]
            owed = [nn.functional.pad(p, (0, shard * size - length)).view(size, shard) for p in owed]
            sent = [torch.stack([coded(wire, row) for row in p]) for p in owed]
            left = [p - q for p, q in zip(owed, sent)]
            mean = torch.stack([sum(q[owner] for q in sent) / size for owner in range(size)])
            answer = torch.stack([coded(wire, row) for row in mean])
            for owner in range(size):
                left[owner][owner] += size * (mean[owner] - answer[owner])
            sums.append(answer.view(-1)[:length])
            for r in range(size):
                errors[r][here] = feedback * left[r].view(-1)[:length]
            first += length
        found.append(torch.cat(sums))
    return found, errors


@pytest.mark.parametrize("wire", [Int8(), Int4(), Sign(), TopK(fraction=0.1)], ids=lambda w: w.name)
@pytest.mark.parametrize("feedback", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("size", [2, 4])
def test_it_is_the_papers_server(pool, wire, feedback, size):
    results = pool(size, lambda world: exchanged(world, CompressedAllReduce(wire, world.all_ranks, feedback), 5))
    expected, errors = simulated(wire, size, 5, results[0][2], feedback)
    for rank, (found, error, _) in enumerate(results):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        if feedback:
            assert torch.equal(error, errors[rank])
        else:
            assert error is None


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("size", [3, 4])
def test_vectors_that_do_not_divide_or_are_shorter_than_the_ranks(pool, n, size):
    def job(world):
        bucket = Bucket(torch.zeros(n), gradient(world.rank, 0, n), 0, [(0, "w")])
        for awaited in CompressedAllReduce(Exact(), world.all_ranks)(bucket, 0):
            if not isinstance(awaited, ExchangeEvent):
                awaited.wait()
        return bucket.grads, bucket.state("residual")

    for found, error in pool(size, job):
        torch.testing.assert_close(found, sum(gradient(r, 0, n) for r in range(size)))
        assert error.abs().max() == 0


@pytest.mark.parametrize("wire", [Int4(), Sign(), RandomK(fraction=0.1)], ids=lambda w: w.name)
def test_sent_plus_kept_is_the_gradient(pool, wire):
    """Over any number of steps: the sum of what arrived and what is owed is the sum of what was given."""
    results = pool(4, lambda world: exchanged(world, CompressedAllReduce(wire, world.all_ranks), 6))
    n = len(results[0][0][0])
    given = sum(gradient(rank, step, n).double() for rank in range(4) for step in range(6))
    arrived = sum(found.double() for found in results[0][0])
    owed = sum(error.double() for _, error, _ in results) / 4
    torch.testing.assert_close(arrived + owed, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_counted_are_bytes_predicted(pool, size):
    def job(world):
        meter = Meter()
        exchange = CompressedAllReduce(Int8(), world.all_ranks.with_meter(meter))
        _, _, buckets = exchanged(world, exchange, 3)
        predicted = [exchange.traffic(n) for n in buckets]
        return (
            meter.sent_bytes,
            meter.messages,
            *(3 * sum(x) for x in zip(*((t.sent_bytes, t.messages) for t in predicted))),
        )

    for sent, messages, predicted, predicted_messages in pool(size, job):
        assert (sent, messages) == (predicted, predicted_messages)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_all_and_nothing_moves(pool, bad):
    def job(world):
        flat = FlatParams(net(), bucket_bytes=256, player_name="D")
        exchange = CompressedAllReduce(Int4(), world.all_ranks)
        with flat.exchanging(exchange, 0):
            flat.grads.copy_(gradient(world.rank, 0, len(flat.grads)))
        flat.finish()
        before = flat.states()["residual"]
        try:
            with flat.exchanging(exchange, 1):
                flat.grads.copy_(gradient(world.rank, 1, len(flat.grads)))
                if world.rank == 1:
                    flat.parameters[1].grad.view(-1)[3] = bad  # the last layer's weight: parameters run backwards
            said = None
        except RunError as error:
            said = type(error), str(error)
        return said, torch.equal(before, flat.states()["residual"])

    for rank, (said, untouched) in enumerate(pool(3, job)):
        assert untouched
        if rank == 1:
            assert said == (Diverged, "the gradient of D 1.weight is not finite: the step was refused")
        else:
            assert said[0] is NonFiniteMessage
            assert "int4 wire delivered numbers that are not finite" in said[1]


def test_what_is_too_large_for_the_wire_is_refused_by_name(pool):
    def job(world):
        flat = FlatParams(net(), bucket_bytes=256, player_name="D")
        try:
            with flat.exchanging(CompressedAllReduce(FP16(), world.all_ranks), 0):
                if world.rank == 1:
                    flat.parameters[1].grad.view(-1)[3] = 7e4  # float32 holds it
            said = None
        except RunError as error:
            said = str(error)
        return said

    said = pool(2, job)
    assert said[1] == "the gradient of D 1.weight is too large for the fp16 wire: the step was refused"
    assert "fp16 wire delivered numbers that are not finite" in said[0]


def test_lookahead_takes_the_gradient_ahead_and_steps_from_where_it_was():
    model = net()
    flat, rate = FlatParams(model), 0.1
    here = flat.params.clone()
    previous = torch.zeros_like(here)
    for step in range(3):
        seen = []
        with flat.exchanging(OptimisticMirrorDescent(NoExchange(), lambda: rate), step):
            seen.append(flat.params.clone())
            flat.grads.copy_(gradient(0, step, len(here)))
        assert torch.equal(seen[0], torch.sub(here, previous, alpha=rate))
        flat.finish()
        assert torch.equal(flat.params, here)
        previous = flat.grads.clone()
        flat.params.sub_(flat.grads, alpha=rate)
        here = flat.params.clone()
