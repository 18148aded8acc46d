from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paragan.models.model import init_per_label_model, make_model_config, save_model
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import LabelPrior
from paragan.nets import DCGAN, BigGAN, Spec
from paragan.nets.attention import SelfAttention


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small BigGAN of 3 classes at 32 px that has seen nothing. Look, do not touch."""
    torch.manual_seed(0)
    nets, spec = BigGAN(width=4, d_width=4, latent=8, shared=5), Spec(32, 3, 3)
    g, d = nets.generator(spec), nets.discriminator(spec)
    for layer in g.modules():
        if isinstance(layer, SelfAttention):
            torch.nn.init.ones_(layer.gamma)
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    folder = tmp_path_factory.mktemp("small") / "biggan"
    save_model(
        folder, g, d, make_model_config(nets, spec, LabelPrior((0.5, 0.3, 0.2)), ["ant", "bee", "cat"], kimg=1.0)
    )
    return folder


@pytest.fixture(scope="session")
def per_label(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a generator for each of two labels, at 8 px."""
    folder, nets = tmp_path_factory.mktemp("labels") / "model", DCGAN(width=4, latent=6)
    init_per_label_model(folder, Spec(8, 1, 2), LabelPrior((0.5, 0.5)), ["a", "b"])
    for label in range(2):
        torch.manual_seed(label)
        config = make_model_config(nets, Spec(8, 1), LabelPrior(()), (), kimg=0.1, batch_norm="none")
        save_model(label_dir(folder, label), nets.generator(Spec(8, 1)), None, config)
    return folder
