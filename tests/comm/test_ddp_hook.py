"""The hook for DistributedDataParallel: gradients travel over a lossy wire, and nothing of them is lost."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import standin
from advice import advises
from paragan.comm.compression.compressors import parse_wire
from paragan.comm.ddp_hook import ddp_hook
from paragan.comm.process_group import c10d
from paragan.core.errors import UsageError

SMALL_BUCKETS_MB = 0.002
SINGLE_BUCKET_MB = 100.0
CHUNK_NUMEL = 300  # of the 2225 numbers of the network
WIDTHS = (20, 40, 30, 5)


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())])


def batch(rank, step):
    return torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(100 * rank + step))


def flat_gradient(network):
    return torch.cat([p.grad.flatten() for p in network.parameters()])


def exact_gradient(step, ranks):
    """Return the mean over ranks of the gradients at the first weights."""
    network = net()
    for rank in range(ranks):
        (network(batch(rank, step)).square().mean() / ranks).backward()
    return flat_gradient(network)


def residual_of(state, network):
    """Return the residual of the network's parameters, in their order."""
    saved = state.state_dict()
    parts = [torch.zeros(p.numel()) for p in network.parameters()]
    for i, p in enumerate(network.parameters()):
        position = state._positions[p]
        parts[i] = saved.get(f"residual/{position}", parts[i])
    return torch.cat(parts)


def wrap(wire, bucket_mb, feedback=None, chunk_numel=None, network=None):
    ddp = DistributedDataParallel(network or net(), bucket_cap_mb=bucket_mb)
    state, hook = ddp_hook(wire, feedback=feedback)
    state.chunk_numel = chunk_numel or state.chunk_numel
    ddp.register_comm_hook(state, hook)
    return ddp, state


def gradients(ddp, rank, steps):
    """Return the gradients that DDP (or a network alone) leaves after each of these steps, all at the same weights."""
    result = []
    for step in steps:
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        result.append(flat_gradient(ddp))
    return result


@pytest.mark.parametrize("ranks", [2, 3])
def test_exact_wire_gives_the_mean(pool, ranks):
    def job(world):
        ddp, _ = wrap("exact", SMALL_BUCKETS_MB)
        return gradients(ddp, world.rank, range(3))

    for result in pool(ranks, job):
        for step, gradient in enumerate(result):
            torch.testing.assert_close(gradient, exact_gradient(step, ranks), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_gradients_on_a_device_equal_those_of_the_cpu(pool):
    def job(world):
        results = []
        for wire in ("exact", "int8", "topk"):
            ddp, _ = wrap(wire, SINGLE_BUCKET_MB, network=net().to(world.device))
            for step in range(3):
                ddp.zero_grad()
                x = batch(world.rank, step).to(world.device)
                with standin.recording() as syncs:
                    ddp(x).square().mean().backward()
                results.append((flat_gradient(ddp).cpu(), len(syncs)))
        return results

    on_device, on_cpu = pool(2, job, standin.NAME), pool(2, job)
    for result, expected in zip(on_device, on_cpu, strict=True):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(result, expected, strict=True))
        # DDP regroups parameters in the second step; a lossy bucket is checked before it is used
        assert [num_syncs for _, num_syncs in result][2::3] == [0, 1, 1]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("wire", ["exact", "int8", "int4", "sign", "topk"])
def test_a_bucket_larger_than_a_chunk_gives_the_same_sums(pool, wire, ranks):
    steps = range(4)

    def job(world):
        ddp, state = wrap(wire, SINGLE_BUCKET_MB, feedback=1, chunk_numel=CHUNK_NUMEL)
        sums = gradients(ddp, world.rank, steps)
        (bucket,) = state._buckets.values()
        return sums, residual_of(state, ddp.module), [chunk.grads.numel() for chunk in bucket.chunks]

    results = pool(ranks, job)
    sent, *others = (torch.stack(gradient).sum(0) for gradient, _, _ in results)
    assert all(torch.equal(sent, other) for other in others)  # replicas get the same bits
    kept = torch.stack([residual for _, residual, _ in results]).mean(0)
    exact = sum(exact_gradient(step, ranks) for step in steps)
    torch.testing.assert_close(sent + kept, exact, rtol=1e-4, atol=1e-6)
    assert (kept.abs().max() > 1e-6) == (wire != "exact")
    lengths = results[0][2]
    assert sum(lengths) == len(exact)
    assert len(lengths) == len(exact) // CHUNK_NUMEL > 1


def test_what_is_kept_survives_chunks_of_another_size(pool):
    def job(world):
        ddp, state = wrap("int4", SINGLE_BUCKET_MB, feedback=1, chunk_numel=CHUNK_NUMEL)
        gradients(ddp, world.rank, range(2))
        before = residual_of(state, ddp.module)
        again, other = wrap("int4", SINGLE_BUCKET_MB, feedback=1, chunk_numel=2 * CHUNK_NUMEL)
        other.load_state_dict(state.state_dict())
        gradient = sum(gradients(again, world.rank, range(2, 4)))
        return before, gradient, residual_of(other, again.module)

    results = pool(2, job)
    before, after = (torch.stack(residuals).mean(0) for residuals in zip(*[(r[0], r[2]) for r in results]))
    exact = sum(exact_gradient(step, 2) for step in range(2, 4))
    torch.testing.assert_close(results[0][1] + after, exact + before, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class FakeGradBucket:
    """What the hook reads of a bucket of DDP, the last of two."""

    number: int
    params: list[torch.Tensor]

    def parameters(self):
        return self.params

    def index(self):
        return self.number

    def is_last(self):
        return self.number == 1

    def buffer(self):
        return torch.cat([p.grad for p in self.params])


def test_a_bucket_that_regrouping_leaves_alone_keeps_its_residual(pool):
    """It is still being exchanged when the next bucket turns out to hold other parameters than before."""

    def job(world):
        generator = torch.Generator().manual_seed(world.rank)
        state, hook = ddp_hook("int4", feedback=1)
        a, b, c = parameters = [torch.zeros(100, requires_grad=True) for _ in range(3)]
        exact, sent = torch.zeros(100), torch.zeros(100)
        for groups in ([a], [b, c]), ([a], [c, b]), ([a], [c, b]):
            for p in parameters:
                p.grad = torch.randn(100, generator=generator)
            exact += a.grad
            state.receiving.submit(time.sleep, 0.2)  # the first bucket arrives late
            first, second = (hook(state, FakeGradBucket(i, group)) for i, group in enumerate(groups))
            sent += first.wait()
            second.wait()
        return sent, exact, state.state_dict()["residual/0"]

    results = pool(2, job)
    exact, kept = (torch.stack([result[i] for result in results]).mean(0) for i in (1, 2))
    torch.testing.assert_close(results[0][0] + kept, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bucket_mb", [SMALL_BUCKETS_MB, SINGLE_BUCKET_MB])
@pytest.mark.parametrize("wire", ["int8", "int4", "sign", "topk"])
def test_what_was_sent_and_what_is_kept_is_the_gradient(pool, wire, bucket_mb):
    steps = range(4)  # DDP groups the parameters anew after the first

    def job(world):
        ddp, state = wrap(wire, bucket_mb, feedback=1)
        return gradients(ddp, world.rank, steps), residual_of(state, ddp.module), len(state._buckets)

    results = pool(2, job)
    sent, other = (torch.stack(gradient).sum(0) for gradient, _, _ in results)
    assert torch.equal(sent, other)  # replicas get the same bits
    kept = torch.stack([residual for _, residual, _ in results]).mean(0)
    exact = sum(exact_gradient(step, 2) for step in steps)
    torch.testing.assert_close(sent + kept, exact, rtol=1e-4, atol=1e-6)
    assert kept.abs().max() > 1e-6  # it is lossy
    assert (results[0][2] > 1) == (bucket_mb == SMALL_BUCKETS_MB)


def test_a_loaded_state_sends_what_is_still_kept(pool):
    def job(world):
        ddp, state = wrap("int4", SMALL_BUCKETS_MB, feedback=1)
        before = gradients(ddp, world.rank, range(3))
        again, other = wrap("int4", SMALL_BUCKETS_MB, feedback=1)
        other.load_state_dict(state.state_dict())
        return before + gradients(again, world.rank, range(3, 6)), residual_of(other, again.module), other.step

    results = pool(2, job)
    kept = torch.stack([residual for _, residual, _ in results]).mean(0)
    exact = sum(exact_gradient(step, 2) for step in range(6))
    torch.testing.assert_close(sum(results[0][0]) + kept, exact, rtol=1e-4, atol=1e-6)
    assert results[0][2] == 6


@pytest.mark.parametrize("chunk_numel", [None, CHUNK_NUMEL])
def test_numbers_that_are_not_finite_reach_all_ranks_and_leave_the_residual(pool, chunk_numel):
    def job(world):
        ddp, state = wrap("int8", SINGLE_BUCKET_MB, chunk_numel=chunk_numel)
        gradients(ddp, world.rank, range(2))
        before = residual_of(state, ddp.module)
        ddp.zero_grad()
        if world.rank:
            next(ddp.parameters()).register_hook(lambda gradient: gradient * float("inf"))  # one of several chunks
        ddp(batch(world.rank, 2)).square().mean().backward()
        is_finite = bool(flat_gradient(ddp.module).isfinite().all())
        return is_finite, torch.equal(before, residual_of(state, ddp.module))

    assert pool(2, job) == [(False, True)] * 2


def test_it_sends_what_the_wire_says(pool):
    def job(world):
        ddp, state = wrap("int8", SINGLE_BUCKET_MB)
        gradients(ddp, world.rank, range(2))
        length = -(-sum(p.numel() for p in ddp.parameters()) // world.size)
        return state.meter.sent_bytes, 2 * 2 * (world.size - 1) * parse_wire("int8").nbytes(length)

    for sent, expected in pool(3, job):
        assert sent == expected


def test_half_precision_networks(pool):
    def job(world):
        ddp = DistributedDataParallel(net().to(torch.bfloat16))
        ddp.register_comm_hook(*ddp_hook("int8"))
        ddp(batch(world.rank, 0).bfloat16()).square().mean().backward()
        return flat_gradient(ddp.module).float()

    for gradient in pool(2, job):
        torch.testing.assert_close(gradient, exact_gradient(0, 2), rtol=0.1, atol=0.005)


def test_it_needs_a_process_group(tmp_path):
    assert not c10d.is_initialized()
    with advises("ddp_hook: there is no process group yet. Use it after torch.distributed.init_process_group"):
        ddp_hook("int8")
    c10d.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp_hook("int8")
    finally:
        c10d.destroy_process_group()


def test_bad_input_is_named(pool):
    def job(world):
        with pytest.raises(UsageError, match="wire: there is no imt8; did you mean int8"):
            ddp_hook("imt8")
        with advises("feedback=2: must be from 0 to 1. Use 1, or None for the default of the wire"):
            ddp_hook("int8", feedback=2)
        state, _ = ddp_hook("int8", feedback=1)
        ddp_hook("int8", feedback=None)
        for wrong in ({"residual/0": torch.zeros(3)}, {"step": torch.tensor(1), "lr": torch.ones(1)}):
            with advises("Use what state_dict of a ddp_hook returned"):
                state.load_state_dict(wrong)
        state.load_state_dict(ddp_hook("int8")[0].state_dict())

    pool(2, job)


def test_the_state_of_another_network_is_refused(pool):
    def job(world):
        ddp, state = wrap("int8", SINGLE_BUCKET_MB)
        gradients(ddp, world.rank, [0])
        saved = state.state_dict()
        state.load_state_dict({"step": torch.tensor(1), "residual/0": torch.zeros(3)})
        with advises("residual/0: has 3 numbers, and the parameter 800. Use the state of a run of the same network"):
            gradients(ddp, world.rank, [0])
        again, other = wrap("int8", SINGLE_BUCKET_MB)
        other.load_state_dict(saved)
        gradients(again, world.rank, [1])

    pool(2, job)
