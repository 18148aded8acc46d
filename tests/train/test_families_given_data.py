"""Families whose G gets data, in the trainer: G takes the batch, and draws random numbers where it says so."""

from __future__ import annotations

import pytest
import torch

import tiny_run
from advice import advises
from paragan.config.resolve import make_spec, resolve
from paragan.config.sections import DeviceOptions
from paragan.game.game import Game
from paragan.nets import SuperResolution, VQAutoencoder
from paragan.train.build import build_game, build_networks

SMALL = {
    "vq": VQAutoencoder(width=4, codes=8, d_width=4, d_layers=1, downsample=1),
    "kl": VQAutoencoder(width=4, quantizer="kl", d_width=4, d_layers=1, downsample=1),
    "super-resolution": SuperResolution(width=4, blocks=1, d_width=4, d_layers=1),
}


def start(name: str, **device: bool) -> Game:
    data = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run(nets=SMALL[name], device=DeviceOptions(kind="cpu", **device)), data)
    cpu = torch.device("cpu")
    return build_game(run, build_networks(run, make_spec(run.data, data), cpu), data, cpu)


@pytest.mark.parametrize("name", SMALL)
def test_g_gets_the_batch_and_only_the_gaussian_draws_torch_numbers(name):
    game = start(name)
    assert game.conditioning_input is not None
    assert game.uses_torch_rng == (name == "kl")
    batch = game.dummy_batch(2, torch.device("cpu"))
    assert game.generate(batch, "G").images.shape == batch.images.shape


def test_random_numbers_are_not_recorded():
    with advises("device.capture_passes=true: would record the random numbers that these networks draw. Leave it out"):
        start("kl", capture_passes=True)
    start("kl")
