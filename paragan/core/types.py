"""The words that data, objectives and the game share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paragan.core.rng import LaneRng


class DiscriminatorOutput(NamedTuple):
    """What D says of N images, where it says more than how real they are.

    logits    : [N] how real each is, float32 or wider
    classes   : [N, K] logits of an auxiliary classifier
    embedding : [N, E] of the images, of length 1
    proxies   : [N, E] of their labels, of length 1, in the same space
    """

    logits: Tensor
    class_logits: Tensor | None = None
    embedding: Tensor | None = None
    proxies: Tensor | None = None

    def split(self, index: int) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
        """Of the first `at` images, and of the others."""
        first, others = ([t if t is None else t[part] for t in self] for part in (slice(index), slice(index, None)))
        return DiscriminatorOutput(*first), DiscriminatorOutput(*others)  # pyright: ignore[reportArgumentType]


DiscriminatorFn = Callable[
    [Tensor, Tensor | None], Tensor | DiscriminatorOutput
]  # D: (images, labels) -> logits [N], or more


def run_discriminator(d: DiscriminatorFn, images: Tensor, labels: Tensor | None) -> DiscriminatorOutput:
    """What D says of some images, whether it is logits alone or more."""
    said = d(images, labels)
    return said if isinstance(said, DiscriminatorOutput) else DiscriminatorOutput(said)


@dataclass(frozen=True)
class Batch:
    """Some lanes' images at one position, and random numbers of their own.

    images  : [N, C, H, W] float32 in [-1, 1], or records of numbers [N, ...]
    labels  : [N] int64, or None in an unconditional game
    latents : [N, latent], or what else G made the images from, where it just did
    nearby  : [N, C, H, W] what G makes of latents close to those, where the objective wants it
    """

    images: Tensor
    labels: Tensor | None
    rng: LaneRng
    latents: Tensor | None = None
    perturbed: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """What a player minimises (a scalar), and what is worth showing of it (scalars, detached)."""

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
