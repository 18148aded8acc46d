"""Autoencoders for tests: untrained ones of the digits, and a module of the user."""

from __future__ import annotations

from pathlib import Path

import torch

from paragan.core.frozen_features import make_frozen
from paragan.models.autoencoder import load_decoder
from paragan.models.model import make_model_config, save_model
from paragan.models.sampler import LabelPrior
from paragan.nets import Spec, VQAutoencoder

USER_MODULE = """
import torch

class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 3.0))

    def to_latents(self, images):
        return torch.nn.functional.pixel_unshuffle(images, 2) * self.scale

    def from_latents(self, latents):
        return torch.nn.functional.pixel_shuffle(latents / self.scale, 2)

class Flat(Halves):
    def to_latents(self, images):
        return images.flatten(1)

    def from_latents(self, latents):
        return latents.view(-1, 1, 8, 8)

class Cropped(Halves):
    def from_latents(self, latents):
        return super().from_latents(latents)[..., :4]

class Infinite(Halves):
    def to_latents(self, images):
        return super().to_latents(images) / 0

class Deaf(torch.nn.Module):
    pass
"""


def save_autoencoder(folder: Path, quantizer: str = "kl", seed: int = 0) -> Path:
    """Write a model folder with an untrained autoencoder of grey images of 8 x 8; latents are 2 x 4 x 4 (fsq: 3)."""
    torch.manual_seed(seed)
    nets = VQAutoencoder(width=4, downsample=1, codes=8, code_dim=2, quantizer=quantizer, d_layers=1)  # pyright: ignore
    spec = Spec(8, 1)
    config = make_model_config(nets, spec, LabelPrior(()), (), kimg=0.0)
    save_model(folder, nets.generator(spec), None, config)
    return folder


def forget_loaded_autoencoders() -> None:
    """Load decoders again, as another process would."""
    load_decoder.cache_clear()
    make_frozen.cache_clear()
