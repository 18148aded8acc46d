"""Flat parameter vectors, and the times at which exchanges continue."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY
from paragan.comm.exchange import AllReduce, NoExchange
from paragan.comm.flat_params import ALIGN_BYTES, FlatParams
from paragan.comm.traffic import Traffic, ring_all_reduce


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(7 * 16, 2))


def compute_gradients(model):
    model(torch.ones(2, 3, 8, 8)).square().sum().backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_flattening_preserves_values_and_strides(layout):
    before, model = net().to(memory_format=layout), net().to(memory_format=layout)
    flat = FlatParams.from_network(model)
    for (name, p), (other, q) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert p.stride() == q.stride()
        assert torch.equal(p, q)
        assert q.data_ptr() % ALIGN_BYTES == 0
    compute_gradients(model)
    compute_gradients(before)
    for p, q in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    flat.params.zero_()
    assert not any(p.any() for p in model.parameters())


def test_padding_is_zero():
    model = net()
    flat = FlatParams.from_network(model)
    compute_gradients(model)
    inside = torch.zeros_like(flat.grads, dtype=torch.bool)
    for start, numel in flat.slices:
        inside[start : start + numel] = True
    assert not flat.grads[~inside].any()
    assert not flat.params[~inside].any()
    assert inside.sum() == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_are_not_flattened():
    model = net()
    model[0].requires_grad_(False)
    address = model[0].weight.data_ptr()
    assert len(FlatParams.from_network(model).parameters) == 4
    assert model[0].weight.data_ptr() == address


class RecordingExchange:
    """Records the times at which it continues: (event, address of the bucket)."""

    def __init__(self):
        self.events = []

    def __call__(self, bucket, step):
        address = bucket.params.data_ptr()
        self.events.append(("started", address))
        yield GRAD_READY
        self.events.append(("gradient ready", address))
        yield ALL_RECEIVED
        self.events.append(("all received", address))

    def traffic(self, n, itemsize):
        return Traffic(n, 1)


def record_exchange(flat, model, passes=1, run_pass=compute_gradients):
    """Return the events of one exchange, and the addresses of the buckets in the order in which they were ready."""
    exchange = RecordingExchange()
    with flat.exchanging(exchange, 0, passes):
        for _ in range(passes):
            run_pass(model)
        exchange.events.append(("end of passes", 0))
    exchange.events.append(("end of turn", 0))
    flat.finish()
    return [name for name, _ in exchange.events], [at for name, at in exchange.events if name == "gradient ready"]


def test_gradients_are_sent_in_bucket_order_during_the_last_backward():
    model = net()
    flat = FlatParams.from_network(model, bucket_bytes=256)
    assert len(flat.buckets) >= 3
    events, order = record_exchange(flat, model, passes=2)
    n = len(flat.buckets)
    passes = ["started"] * n + ["gradient ready"] * n + ["end of passes"]
    assert events == [*passes, "end of turn"] + ["all received"] * n
    assert order == [bucket.params.data_ptr() for bucket in flat.buckets]


def test_unused_parameters_are_sent_as_zeros():
    model = net()
    flat = FlatParams.from_network(model, bucket_bytes=256)
    events, order = record_exchange(flat, model, run_pass=lambda m: m[0](torch.ones(1, 3, 8, 8)).sum().backward())
    n = len(flat.buckets)
    passes = ["started"] * n + ["end of passes"] + ["gradient ready"] * n
    assert events == [*passes, "end of turn"] + ["all received"] * n
    assert len(order) == n
    assert not flat.buckets[0].grads.any()


def test_no_hooks_without_an_exchange():
    model = net()
    flat = FlatParams.from_network(model)
    with flat.exchanging(NoExchange(), 0):
        compute_gradients(model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_states_are_vectors_over_the_network():
    model = net()
    flat = FlatParams.from_network(model, bucket_bytes=256)
    for i, bucket in enumerate(flat.buckets):
        bucket.state("residual").fill_(i)
    saved = flat.states()
    other = FlatParams.from_network(net(), bucket_bytes=1 << 20)  # other buckets, the same vector
    other.load_states(saved)
    assert torch.equal(other.states()["residual"], saved["residual"])
    assert saved["residual"].shape == flat.params.shape


def test_traffic_is_the_sum_over_buckets():
    flat = FlatParams.from_network(net(), bucket_bytes=256)
    assert flat.traffic(NoExchange()) == Traffic()
    assert flat.traffic(RecordingExchange()) == Traffic(flat.params.numel(), len(flat.buckets))
    assert ring_all_reduce(400, 4) == Traffic(600, 6)
    assert ring_all_reduce(400, 1) == Traffic(0, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_equals_not_overlapped(pool, size):
    """Gradients that are summed during backward equal those that are summed after it."""

    def job(world):
        class AfterBackward:
            def __call__(self, bucket, step):
                yield world.all_ranks.all_reduce_sum(torch.zeros(1))  # awaited when all passes are over
                yield world.all_ranks.all_reduce_sum(bucket.grads)

            def traffic(self, n, itemsize):
                return Traffic()

        gradients = []
        for exchange in (AllReduce(world.all_ranks), AfterBackward()):
            model = net().to(memory_format=torch.channels_last)
            flat = FlatParams.from_network(model, bucket_bytes=256)
            with flat.exchanging(exchange, 0, passes=2):
                for i in range(2):
                    model(torch.full((2, 3, 8, 8), 1.0 + world.rank + i)).square().sum().backward()
            gradients.append(flat.grads.clone())
        return gradients

    results = pool(size, job)
    for overlapped, not_overlapped in results:
        assert torch.equal(overlapped, not_overlapped)
        assert torch.equal(overlapped, results[0][0])
