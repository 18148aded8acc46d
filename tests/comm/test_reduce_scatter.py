"""The sum that a sharded optimizer gets is that of gloo's all-reduce, bit for bit, and takes bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from paragan.comm.exchange import AllReduce
from paragan.comm.flat_params import FlatParams
from paragan.comm.flat_shards import MAX_IN_FLIGHT, FlatShards, local_part, padded, part_numel
from paragan.comm.process_group import CommunicationError, SingleRankGroup
from paragan.comm.reduce_scatter import ReduceScatter

SIZES = (1, 48, 1000, 4096, 100_000, 2_100_000)  # the last one has more than two segments of gloo for each of 3 ranks


def make_flat(sizes, dtype=torch.float32, bucket_bytes=1):
    return FlatParams([(str(size), nn.Parameter(torch.zeros(size, dtype=dtype))) for size in sizes], bucket_bytes)


def reduce_random(exchange, sizes, dtype, rank):
    """Return the vectors after an exchange of random gradients, which differ by the rank in size too."""
    flat = make_flat(sizes, dtype)
    generator = torch.Generator().manual_seed(rank)
    with flat.exchanging(exchange, 0):
        for p in flat.parameters:
            p.grad.copy_(torch.randn(p.shape, generator=generator) * 10 ** (rank / 2))
    flat.finish()
    return flat


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_local_part_is_that_of_an_all_reduce(pool, ranks):
    def job(world):
        group = world.all_ranks
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            whole = reduce_random(AllReduce(group), SIZES, dtype, world.rank)
            sharded = reduce_random(ReduceScatter(group), SIZES, dtype, world.rank)
            for bucket, other in zip(whole.buckets, sharded.buckets, strict=True):
                expected = torch.zeros_like(bucket.grads)
                part = local_part(bucket, group)
                expected[part] = bucket.grads[part]
                assert torch.equal(other.grads, expected), (dtype, len(expected))
        return True

    assert all(pool(ranks, job))


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_parts_are_gathered_from_their_owners(pool, ranks):
    """Also of a slice that begins and ends within the parts of a rank, and of another dtype."""

    def job(world):
        flat = make_flat((48, 1000, 4096))
        shards = FlatShards(flat, world.all_ranks)
        whole = slice(0, len(flat.params))
        for piece in shards.pieces(whole):
            flat.params[piece] = torch.arange(piece.start, piece.stop, dtype=torch.float32)
        shards.gather_params()
        gathered = [flat.params.clone()]
        for span in (whole, slice(16, 32), slice(960, 4000)):
            values = [torch.arange(p.start, p.stop, dtype=torch.float64) for p in shards.pieces(span)]
            vector = shards.gather(values, span, is_receiver=world.is_main)
            assert (vector is None) == (not world.is_main)
            if world.is_main:
                assert torch.equal(vector, torch.arange(span.start, span.stop, dtype=torch.float64))
        return gathered

    for (params,) in pool(ranks, job):
        assert torch.equal(params, torch.arange(len(params), dtype=torch.float32))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("numel", [16, 48, 1008, 100_000])
def test_parts_tile_a_bucket_and_are_aligned(ranks, numel):
    size = part_numel(numel, 4, ranks)
    assert size % 16 == 0
    assert size * ranks >= numel
    assert size < numel / ranks + 16
    assert torch.equal(padded(torch.ones(numel), size * ranks)[:numel], torch.ones(numel))


@dataclass(frozen=True)
class CountingGroup(SingleRankGroup):
    """Two ranks that send the same, of which the messages in flight are counted."""

    size: int = 2
    counts: list[int] = field(default_factory=lambda: [0, 0])  # now, at the most
    fails: bool = False

    def all_to_all(self, x, out):
        self.counts[0] += 1
        self.counts[1] = max(self.counts)
        return CountedWork(self, x, out)


@dataclass(frozen=True)
class CountedWork:
    group: CountingGroup
    x: torch.Tensor
    out: torch.Tensor

    def wait(self):
        if self.group.fails:
            raise CommunicationError("gone")
        self.group.counts[0] -= 1
        self.out.copy_(self.x[:1].expand_as(self.out))


def test_few_buckets_have_memory_for_what_they_receive():
    group = CountingGroup()
    flat = make_flat([64] * 9)
    with flat.exchanging(ReduceScatter(group), 0):
        sum(p.sum() for p in flat.parameters).backward()
    assert group.counts == [0, MAX_IN_FLIGHT]
    for bucket in flat.buckets:
        assert bucket.grads.tolist() == [2.0] * 32 + [0.0] * 32


def test_a_failed_step_leaves_nothing_in_flight():
    exchange = ReduceScatter(CountingGroup(fails=True))
    flat = make_flat([64] * 2)
    with pytest.raises(CommunicationError), flat.exchanging(exchange, 0):
        sum(p.sum() for p in flat.parameters).backward()
    assert not exchange._in_flight
