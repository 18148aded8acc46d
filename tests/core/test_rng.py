"""Randomness and data are functions of (seed, lane, position)."""

from __future__ import annotations

import numpy as np
import torch

import tiny_run
from paragan.core.philox import epoch_permutation, philox_generator
from paragan.core.rng import LaneRng
from paragan.data.lanes import LaneLoader


def test_a_stream_is_a_function_of_its_position():
    a = philox_generator(1, "latent", 2, 64).standard_normal(5)
    assert np.array_equal(a, philox_generator(1, "latent", 2, 64).standard_normal(5))
    for other in ((2, "latent", 2, 64), (1, "label", 2, 64), (1, "latent", 3, 64), (1, "latent", 2, 65)):
        assert not np.array_equal(a, philox_generator(*other).standard_normal(5))


def test_lanes_draw_the_same_merged_or_separate():
    merged = LaneRng(5, 128, (0, 1, 2, 3), 4)
    separate = [LaneRng(5, 128, (lane,), 4) for lane in range(4)]
    assert torch.equal(merged.normal("z", 7), torch.cat([d.normal("z", 7) for d in separate]))
    assert torch.equal(merged.uniform("u", 1, 1), torch.cat([d.uniform("u", 1, 1) for d in separate]))
    values = np.array([3, 5, 9])
    assert torch.equal(merged.choice("y", values), torch.cat([d.choice("y", values) for d in separate]))


def test_an_epoch_visits_every_image_once():
    assert sorted(epoch_permutation(3, 0, 100)) == list(range(100))
    assert not np.array_equal(epoch_permutation(3, 0, 100), epoch_permutation(3, 1, 100))


def lanes(owned, start=0, mirror=False, merge=0):
    data = tiny_run.make_dataset()
    return LaneLoader(
        data.images,
        data.labels,
        local_lanes=owned,
        num_lanes=8,
        batch_size=64,
        seed=9,
        start=start,
        mirror=mirror,
        lanes_per_pass=merge,
    )


def take(source, count):
    batches = [list(source.next_micro_batches()) for _ in range(count)]

    def concatenate(micro_batches):
        parts = zip(*((h.images, h.labels, h.rng.normal("z", 3)) for h in micro_batches), strict=True)
        return tuple(torch.cat(part) for part in parts)

    return [concatenate(micro_batches) for micro_batches in batches]


def test_draws_do_not_depend_on_the_distribution_of_lanes():
    """300 images and a batch of 64: the epochs end in the middle of a batch."""
    reference = take(lanes(tuple(range(8)), mirror=True), 12)
    parts = [take(lanes(owned, mirror=True), 12) for owned in ((0, 1, 2), (3,), (4, 5, 6, 7))]
    for step in range(12):
        for i in range(3):
            assert torch.equal(reference[step][i], torch.cat([part[step][i] for part in parts]))


def test_merging_does_not_change_draws():
    one, several = take(lanes((0, 1, 2, 3)), 3), take(lanes((0, 1, 2, 3), merge=1), 3)
    assert all(torch.equal(a, b) for x, y in zip(one, several, strict=True) for a, b in zip(x, y, strict=True))


def test_going_on_in_the_middle_is_going_on():
    reference, rest = take(lanes((2, 3)), 10), take(lanes((2, 3), start=6 * 64), 4)
    assert all(torch.equal(a, b) for x, y in zip(reference[6:], rest, strict=True) for a, b in zip(x, y, strict=True))


def test_an_epoch_contains_every_image_once():
    source = lanes(tuple(range(8)))
    indices = np.concatenate([source.lane_indices(64 * step, lane) for step in range(75) for lane in range(8)])
    assert np.array_equal(np.bincount(indices), np.full(300, 64 * 75 // 300))
