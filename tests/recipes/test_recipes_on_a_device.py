"""Every family of recipes trains on an accelerator as on the CPU, bit for bit, without waiting for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import standin
import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import Run
from paragan.core.schema import apply_overrides, from_dict, to_dict
from paragan.data.dataset import Dataset, load_data
from paragan.recipes import get_recipe
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session

FAMILIES = (
    "digits",
    "biggan-cifar10",
    "sngan-cifar10",
    "fashion",
    "sagan-cifar10",
    "contragan-cifar10",
    "r3gan-cifar10",
)


def play(run: Run, dataset: Dataset, device: torch.device) -> Session:
    networks = build_networks(run, make_spec(run.data, dataset), device)
    session = build_session(run, World.solo(device), dataset, networks)
    play_round(session)
    session.lanes.close()
    return session


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_computes_what_the_cpu_computes(name, tmp_path, monkeypatch):
    device = standin.install()
    for which in ("", "_ON_STREAMS"):  # the batched iteration of each device rounds in its own way
        monkeypatch.setattr(f"paragan.nets.spectral_norm.MAX_BATCHED_NUMBERS{which}", 1 << 14)
    recipe = get_recipe(name)
    side, channels = recipe.data.resolution, recipe.data.channels
    images = np.random.default_rng(0).integers(0, 256, (24, side, side, channels), np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(24) % 4)
    settings = {"data.path": str(tmp_path / "data.npz"), "nets.width": "8", "batch": "4", "lanes": "2", "d_steps": "1"}
    dataset = load_data(str(tmp_path / "data.npz"), resolution=side)
    run = resolve(from_dict(Run, apply_overrides(to_dict(recipe), list(settings.items()))), dataset)
    expected = tiny_run.session_state(play(run, dataset, torch.device("cpu")))
    with standin.recording() as waits:
        actual = tiny_run.session_state(play(run, dataset, device))
    assert [key for key in expected if not torch.equal(expected[key], actual[key].cpu())] == []
    assert [str(wait) for wait in waits if "train/build.py" not in wait.line] == []  # which moves the networks there
