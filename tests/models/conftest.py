from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paragan.nets import BigGAN, Spec
from paragan.nets.attention import SelfAttention
from paragan.train.model import model_config, save_model
from paragan.train.sampler import Prior


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small BigGAN of 3 classes at 32 px that has seen nothing. Look, do not touch."""
    torch.manual_seed(0)
    nets, spec = BigGAN(width=4, d_width=4, latent=8, shared=5), Spec(32, 3, 3)
    g, d = nets.generator(spec), nets.discriminator(spec)
    for part in g.modules():
        if isinstance(part, SelfAttention):
            torch.nn.init.ones_(part.gamma)
        if getattr(part, "running_mean", None) is not None:
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    folder = tmp_path_factory.mktemp("small") / "biggan"
    save_model(folder, g, d, model_config(nets, spec, Prior((0.5, 0.3, 0.2)), ["ant", "bee", "cat"], kimg=1.0))
    return folder
