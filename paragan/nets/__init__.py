"""Families of networks: a config class each, which builds a generator and a discriminator for a `Spec`.

The resolution is an argument: every family builds networks for all resolutions that it supports. What a family cannot
build is refused by `check(spec)`, before anything is built. See docs/networks.md.
"""

from typing import Annotated

from pydantic import Field

from paragan.core.schema import name_shorthand
from paragan.nets.biggan import BigGAN
from paragan.nets.biggan_deep import BigGANDeep
from paragan.nets.contragan import ContraGAN
from paragan.nets.dcgan import DCGAN
from paragan.nets.denoiser import DenoiserConfig
from paragan.nets.diffusers_unet import DiffusersUNet
from paragan.nets.edm import EDM
from paragan.nets.gat import GAT
from paragan.nets.r3gan import R3GAN
from paragan.nets.sagan import SAGAN
from paragan.nets.sngan import SNGAN
from paragan.nets.spec import Spec
from paragan.nets.stylegan2 import StyleGAN2
from paragan.nets.super_resolution import SuperResolution
from paragan.nets.vocoder import HiFiGAN
from paragan.nets.vq_autoencoder import VQAutoencoder

Nets = Annotated[
    DCGAN
    | SNGAN
    | SAGAN
    | BigGAN
    | BigGANDeep
    | ContraGAN
    | R3GAN
    | StyleGAN2
    | GAT
    | EDM
    | DiffusersUNet
    | VQAutoencoder
    | HiFiGAN
    | SuperResolution,
    Field(discriminator="name"),
    name_shorthand,
]

__all__ = [
    "DCGAN",
    "EDM",
    "GAT",
    "R3GAN",
    "SAGAN",
    "SNGAN",
    "BigGAN",
    "BigGANDeep",
    "ContraGAN",
    "DenoiserConfig",
    "DiffusersUNet",
    "HiFiGAN",
    "Nets",
    "Spec",
    "StyleGAN2",
    "SuperResolution",
    "VQAutoencoder",
]
