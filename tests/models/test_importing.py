"""Networks of BigGAN-PyTorch and StudioGAN, imported, against plain forward passes on their own state dicts."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import safetensors.torch
import torch
from torch import Tensor

import paragan
from models import theirs
from models.theirs import Theirs
from paragan.errors import Unusable
from paragan.models.importing import bring
from paragan.models.names import LIBRARIES, neutral
from paragan.train.model import load_weights

KINDS = {  # what is imported: its family here
    "biggan": (Theirs("biggan-pytorch", 32, 4, 7, 12), "biggan"),
    "biggan-128": (Theirs("biggan-pytorch", 128, 8, 3, 24, attention=(3, 0)), "biggan"),
    "biggan-64-own": (Theirs("biggan-pytorch", 64, 4, 3, 9, kind="own", attention=(-1, -1)), "sagan"),
    "biggan-own": (Theirs("biggan-pytorch", 32, 4, 3, 9, kind="own", attention=(-1, -1)), "sagan"),
    "biggan-plain": (Theirs("biggan-pytorch", 32, 4, 7, 12, spectral=False, attention=(-1, -1)), "biggan"),
    "studiogan-biggan": (Theirs("studiogan", 32, 4, 7, 12), "biggan"),
    "studiogan-biggan-128": (Theirs("studiogan", 128, 8, 3, 24, attention=(3, 0)), "biggan"),
    "studiogan-contragan": (Theirs("studiogan", 32, 4, 7, 12, head="2C"), "contragan"),
    "studiogan-sagan": (Theirs("studiogan", 32, 4, 7, 9, kind="own"), "sagan"),
    "studiogan-sagan-128": (Theirs("studiogan", 128, 8, 3, 9, kind="own", attention=(3, 0)), "sagan"),
    "studiogan-acgan": (Theirs("studiogan", 64, 8, 3, 9, kind="own", head="AC", attention=(2, 0)), "sagan"),
    "studiogan-sngan": (Theirs("studiogan", 32, 4, 7, 9, "own", "PD", (-1, -1), False), "sngan"),
    "studiogan-sngan-128": (Theirs("studiogan", 128, 2, 3, 9, "own", "PD", (-1, -1), False), "sngan"),
    "studiogan-sngan-alone": (Theirs("studiogan", 32, 4, 0, 9, "none", "W/O", (-1, -1), False), "sngan"),
}


def write(folder, of: Theirs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """g.pth and d.pth; what is in them."""
    g, d = theirs.generator(of), theirs.discriminator(of)
    torch.save(g if of.big else {"state_dict": g, "step": 100, "run_name": "x"}, folder / "g.pth")
    torch.save({f"module.{name}": value for name, value in d.items()}, folder / "d.pth")
    return g, d


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_images_and_verdicts_are_equal(tmp_path, kind):
    of, family = KINDS[kind]
    g, d = write(tmp_path, of)
    model = bring(tmp_path / "g.pth", of.library, tmp_path / "out", tmp_path / "d.pth")
    assert (model.config["net"]["name"], model.spec.resolution, model.spec.classes) == (family, of.size, of.classes)
    g, d = doubled(g), doubled(d)
    z, y = torch.randn(3, of.latent, dtype=torch.float64), torch.randint(max(of.classes, 1), (3,))
    wanted, made = theirs.images(of, g, z, y), model.sampler.g.double()(z, y)
    assert wanted.std() > 0.1  # they say something, and are not all at the ends of tanh
    torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5)
    said = discriminator(tmp_path / "out", model).double()(wanted, y)
    for name, value in theirs.verdict(of, d, wanted, y).items():
        of_ours = said if isinstance(said, Tensor) else getattr(said, name)
        torch.testing.assert_close(of_ours, value, atol=1e-5, rtol=1e-5)


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}


def discriminator(folder, model):
    nets = paragan.config.build(paragan.nets.Nets, model.config["net"])
    d = nets.discriminator(model.spec).eval()
    load_weights(d, folder / "discriminator.safetensors")
    return d
