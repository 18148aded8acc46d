"""Augmentation of all images that D gets: reals and fakes, in D's turn and in G's."""

from typing import Annotated

from pydantic import Field

from paragan.core.schema import name_shorthand
from paragan.losses.augment.ada import ADA
from paragan.losses.augment.diffaugment import DiffAugment
from paragan.losses.augment.identity import NoAugment

Augment = Annotated[NoAugment | DiffAugment | ADA, Field(discriminator="name"), name_shorthand]

__all__ = ["ADA", "Augment", "DiffAugment", "NoAugment"]
