"""Flat vectors and the moments at which exchanges go on."""

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


def gradients(model):
    model(torch.ones(2, 3, 8, 8)).square().sum().backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_network_does_not_change(layout):
    before, model = net().to(memory_format=layout), net().to(memory_format=layout)
    flat = FlatParams(model)
    for (name, p), (other, q) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert p.stride() == q.stride()
        assert torch.equal(p, q)
        assert q.data_ptr() % ALIGN_BYTES == 0
    gradients(model)
    gradients(before)
    for p, q in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    flat.params.zero_()
    assert not any(p.any() for p in model.parameters())


def test_padding_stays_zero():
    model = net()
    flat = FlatParams(model)
    gradients(model)
    inside = torch.zeros_like(flat.grads, dtype=torch.bool)
    for start, numel in flat.slices:
        inside[start : start + numel] = True
    assert not flat.grads[~inside].any()
    assert not flat.params[~inside].any()
    assert inside.sum() == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_are_left_where_they_are():
    model = net()
    model[0].requires_grad_(False)
    at = model[0].weight.data_ptr()
    assert len(FlatParams(model).parameters) == 4
    assert model[0].weight.data_ptr() == at


class Diary:
    """An exchange that writes down when it goes on."""

    def __init__(self):
        self.lines = []

    def __call__(self, bucket, step):
        me = bucket.params.data_ptr()
        self.lines.append(("open", me))
        yield GRAD_READY
        self.lines.append(("gradient", me))
        yield ALL_RECEIVED
        self.lines.append(("arrived", me))

    def traffic(self, n):
        return Traffic(n, 1)


def play(flat, model, diary, passes=1, forward=gradients):
    with flat.exchanging(diary, 0, passes):
        for _ in range(passes):
            forward(model)
        diary.lines.append(("end of passes", 0))
    diary.lines.append(("end of the beat", 0))
    flat.finish()
    return [word for word, _ in diary.lines], [at for word, at in diary.lines if word == "gradient"]


def test_gradients_leave_in_bucket_order_during_the_last_backward():
    model = net()
    flat = FlatParams(model, bucket_bytes=256)
    assert len(flat.buckets) >= 3
    words, order = play(flat, model, Diary(), passes=2)
    n = len(flat.buckets)
    assert words == ["open"] * n + ["gradient"] * n + ["end of passes", "end of the beat"] + ["arrived"] * n
    assert order == [bucket.params.data_ptr() for bucket in flat.buckets]


def test_a_parameter_the_loss_never_reached_leaves_as_zeros():
    model = net()
    flat = FlatParams(model, bucket_bytes=256)
    words, order = play(flat, model, Diary(), forward=lambda m: m[0](torch.ones(1, 3, 8, 8)).sum().backward())
    n = len(flat.buckets)
    assert words == ["open"] * n + ["end of passes"] + ["gradient"] * n + ["end of the beat"] + ["arrived"] * n
    assert len(order) == n
    assert not flat.buckets[0].grads.any()


def test_nothing_exchanged_means_no_hooks():
    model = net()
    flat = FlatParams(model)
    with flat.exchanging(NoExchange(), 0):
        gradients(model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_memories_survive_as_vectors_over_the_network():
    model = net()
    flat = FlatParams(model, bucket_bytes=256)
    for i, bucket in enumerate(flat.buckets):
        bucket.state("residual").fill_(i)
    saved = flat.states()
    other = FlatParams(net(), bucket_bytes=1 << 20)  # other buckets, same vector
    other.load_states(saved)
    assert torch.equal(other.states()["residual"], saved["residual"])
    assert saved["residual"].shape == flat.params.shape


def test_traffic_is_the_sum_over_buckets():
    flat = FlatParams(net(), bucket_bytes=256)
    assert flat.traffic(NoExchange()) == Traffic()
    assert flat.traffic(Diary()) == Traffic(flat.params.numel(), len(flat.buckets))
    assert ring_all_reduce(400, 4) == Traffic(600, 6)
    assert ring_all_reduce(400, 1) == Traffic(0, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_equals_not_overlapped(pool, size):
    """Gradients that travel during backward are those that travel after it."""

    def job(world):
        class Afterwards:
            def __call__(self, bucket, step):
                yield world.all_ranks.all_reduce_sum(torch.zeros(1))  # awaited when all passes are over
                yield world.all_ranks.all_reduce_sum(bucket.grads)

            def traffic(self, n):
                return Traffic()

        found = []
        for exchange in (AllReduce(world.all_ranks), Afterwards()):
            model = net().to(memory_format=torch.channels_last)
            flat = FlatParams(model, bucket_bytes=256)
            with flat.exchanging(exchange, 0, passes=2):
                for i in range(2):
                    model(torch.full((2, 3, 8, 8), 1.0 + world.rank + i)).square().sum().backward()
            found.append(flat.grads.clone())
        return found

    results = pool(size, job)
    for overlapped, afterwards in results:
        assert torch.equal(overlapped, afterwards)
        assert torch.equal(overlapped, results[0][0])
