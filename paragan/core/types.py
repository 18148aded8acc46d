"""Types that data, networks, objectives and the game share: batches, losses and what D returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paragan.core.rng import LaneRng


class DiscriminatorOutput(NamedTuple):
    """What D returns for N images.

    logits       : [N] how real each image is, float32 or wider
    class_logits : [N, K] logits of an auxiliary classifier
    embedding    : [N, E] of the images, of length 1
    proxies      : [N, E] of their labels, of length 1, in the same space
    """

    logits: Tensor
    class_logits: Tensor | None = None
    embedding: Tensor | None = None
    proxies: Tensor | None = None

    def split(self, index: int) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
        """Return the output for the first `index` images, and for the others."""
        first = [t if t is None else t[:index] for t in self]
        others = [t if t is None else t[index:] for t in self]
        return DiscriminatorOutput(*first), DiscriminatorOutput(*others)  # pyright: ignore[reportArgumentType]


# A discriminator: (images, labels) -> logits [N], or a DiscriminatorOutput.
DiscriminatorFn = Callable[[Tensor, Tensor | None], Tensor | DiscriminatorOutput]


def run_discriminator(d: DiscriminatorFn, images: Tensor, labels: Tensor | None) -> DiscriminatorOutput:
    """Run D on images [N, C, H, W] and labels [N]; logits alone are wrapped in a DiscriminatorOutput."""
    output = d(images, labels)
    return output if isinstance(output, DiscriminatorOutput) else DiscriminatorOutput(output)


@dataclass(frozen=True)
class Batch:
    """The images of some lanes at one position, with their random numbers.

    images    : [N, C, H, W] float32 in [-1, 1], or records of numbers [N, ...]
    labels    : [N] int64, or None in an unconditional game
    rng       : random numbers of these lanes at this position
    latents   : [N, latent], or another input of G, where G has just generated the images
    perturbed : [N, C, H, W] images of latents close to `latents`, where the objective needs them
    """

    images: Tensor
    labels: Tensor | None
    rng: LaneRng
    latents: Tensor | None = None
    perturbed: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """A loss: the scalar `total` that a player minimises, and detached scalars worth logging."""

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
