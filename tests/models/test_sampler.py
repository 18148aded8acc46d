"""Inputs of samples are computed for many at once, and are the same function of (seed, index) as one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paragan.core.rng import LaneRng, SampleRng
from paragan.core.types import Batch
from paragan.data.dataset import Dataset, from_arrays
from paragan.data.loader.device_transfer import read_model_input
from paragan.models.sampler import DataSource
from paragan.nets import SuperResolution, VQAutoencoder
from paragan.nets.vocoder import HiFiGAN

COUNT = 9
RANDOM = np.random.default_rng(0)
SEGMENTS = from_arrays({"wave": RANDOM.uniform(-1, 1, (COUNT, 1, 900)).astype(np.float32)}, segment=512)


def noisy_label(real: Batch) -> torch.Tensor:
    """The input of a network of the user's: labels, and all kinds of random numbers."""
    assert real.labels is not None
    rng = real.rng
    numbers = [rng.normal("a", 3), rng.uniform("b", 1), rng.choice("c", np.arange(7.0, dtype=np.float32))[:, None]]
    return torch.cat([real.labels[:, None], *numbers], 1)


def small_images(side: int) -> Dataset:
    return from_arrays(RANDOM.integers(0, 256, (COUNT, side, side, 3), np.uint8), np.arange(COUNT) % 2)


INPUTS = {
    "vq": (small_images(8), VQAutoencoder().conditioning_input),
    "super-resolution": (small_images(32), SuperResolution().conditioning_input),
    "hifigan": (SEGMENTS, HiFiGAN().conditioning_input),
    "user": (small_images(8), noisy_label),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_those_of_one_sample_at_a_time(name):
    data, conditioning_input = INPUTS[name]
    expected: list[torch.Tensor] = []
    for index in range(2 * COUNT):  # samples start again at the first image, with other random numbers
        row = np.array([index % COUNT])
        read = read_model_input(data.images, row)
        labels = None if data.labels is None else torch.from_numpy(data.labels[row])
        expected.append(conditioning_input(Batch(read.images, labels, LaneRng(3, index, (0,), 1), fields=read.fields)))
    source = DataSource(data, conditioning_input)
    tolerance = 1e-6 if name in ("super-resolution", "hifigan") else 0  # matrix products round by the number of rows
    torch.testing.assert_close(source(range(2 * COUNT), 3, 1.0), torch.cat(expected), rtol=0, atol=tolerance)
    is_random = not torch.equal(expected[0], expected[COUNT])
    assert is_random == (not torch.equal(source(range(2), 3, 1.0), source(range(2), 4, 1.0)))
    assert is_random == (name in ("super-resolution", "user"))


@pytest.mark.parametrize("side", [8, 16, 32])
def test_inputs_do_not_depend_on_the_batch(side):
    source = DataSource(small_images(side), SuperResolution().conditioning_input)
    together = source(range(40), 3, 1.0)
    for indices in (range(5, 22), range(39, 40), [38, 0, 17]):
        assert torch.equal(source(indices, 3, 1.0), together[list(indices)])


def test_a_sample_draws_what_it_draws_alone():
    together = SampleRng.of(1, [4, 2]).normal("x", 2)
    assert torch.equal(together, torch.cat([LaneRng(1, index, (0,), 1).normal("x", 2) for index in (4, 2)]))
