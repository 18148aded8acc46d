"""What is done to every image before D sees it, real or fake, in D's turn and in G's."""

from typing import Annotated

from pydantic import Field

from paragan.core.schema import name_shorthand
from paragan.losses.augment.ada import ADA
from paragan.losses.augment.diffaugment import DiffAugment
from paragan.losses.augment.identity import NoAugment

Augment = Annotated[NoAugment | DiffAugment | ADA, Field(discriminator="name"), name_shorthand]

__all__ = ["ADA", "Augment", "DiffAugment", "NoAugment"]
