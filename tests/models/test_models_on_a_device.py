"""A model on an accelerator makes the images that it makes on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import standin
from paragan.models.interpolation import sample_interpolated, slerp
from paragan.models.latent_walk import walk
from paragan.models.load import load
from paragan.models.model import load_model
from paragan.models.sampler import Sampler
from standin import memory


@pytest.fixture
def models(finished):
    """The same model on the CPU and on the device."""
    return load_model(finished), load_model(finished, standin.install())


def test_samples_and_interpolations_equal_those_of_the_cpu(models):
    images: list[list[np.ndarray]] = []
    for model in models:
        sampler = model.sampler
        labels = sampler.labels(range(9), 1)
        with standin.recording() as waits:
            samples = sampler.images(range(9), labels, seed=1, truncation=0.7)
        assert len(waits) <= 1  # the images come to the host
        a, b = (sampler.source([i], 0, 1.0) for i in (0, 1))
        between = sample_interpolated(sampler, slerp(a, b, torch.tensor([0.3])), (2, 5), 0.3)
        strip = sample_interpolated(sampler, a.expand(4, -1), (2, 5), torch.linspace(0, 1, 4))
        frames = walk(model, stops=2, frames_per_stop=3, seed=0, labels=["3"], truncation=1.0)
        images.append([samples.numpy(), between.numpy(), strip.numpy(), np.asarray(frames)])
    for expected, actual in zip(*images, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_what_load_returns_moves_to_a_device(finished):
    device = standin.install()
    model = load(finished)
    expected = model.sampler.images(range(4), None if model.labels is None else np.arange(4), seed=2)
    moved = model.sampler.to(device)
    assert torch.equal(moved.images(range(4), np.arange(4), seed=2), expected)


def test_samples_come_in_smaller_batches_where_memory_is_short(models, monkeypatch):
    sampler = models[1].sampler
    assert isinstance(sampler, Sampler)
    labels = np.arange(32) % 10
    memory.reset_peak()
    before = memory.allocated_bytes()
    expected = sampler.images(range(32), labels)
    needed = memory.peak_bytes() - before
    monkeypatch.setattr(memory, "limit_bytes", before + needed // 3)
    assert torch.equal(sampler.images(range(32), labels), expected)
    monkeypatch.setattr(memory, "limit_bytes", 1)
    with pytest.raises(torch.OutOfMemoryError):
        sampler.images(range(32), labels)
