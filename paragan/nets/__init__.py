"""Backbones: a resolution is an argument, never a file."""

from typing import Annotated

from pydantic import Field

from paragan.config import by_name
from paragan.nets.dcgan import DCGAN
from paragan.nets.r3gan import R3GAN
from paragan.nets.sngan import SNGAN
from paragan.nets.spec import Spec

Nets = Annotated[DCGAN | SNGAN | R3GAN, Field(discriminator="name"), by_name]

__all__ = ["DCGAN", "R3GAN", "SNGAN", "Nets", "Spec"]
