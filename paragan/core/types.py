"""Types that data, networks, objectives and the game share: batches, losses and what D returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng


class DiscriminatorOutput(NamedTuple):
    """What D returns for N images.

    logits       : [N] how real each image is, or [N, P] how real each of its patches is; float32 or wider
    class_logits : [N, K] logits of an auxiliary classifier
    embedding    : [N, E] of the images, of length 1
    proxies      : [N, E] of their labels, of length 1, in the same space
    features     : feature maps [N, ...] of its layers, for feature matching
    patches      : of a D made of several discriminators, whose patches stand side by side in `logits`: how many each
                   has. A loss is then the sum over discriminators of the mean over the patches of each
    """

    logits: Tensor
    class_logits: Tensor | None = None
    embedding: Tensor | None = None
    proxies: Tensor | None = None
    features: tuple[Tensor, ...] = ()
    patches: tuple[int, ...] = ()

    def split(self, index: int) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
        """Return the output for the first `index` images, and for the others."""
        return self._select_rows(slice(index)), self._select_rows(slice(index, None))

    def _select_rows(self, rows: slice) -> DiscriminatorOutput:
        optional = [t if t is None else t[rows] for t in (self.class_logits, self.embedding, self.proxies)]
        class_logits, embedding, proxies = optional
        features = tuple(t[rows] for t in self.features)
        return DiscriminatorOutput(self.logits[rows], class_logits, embedding, proxies, features, self.patches)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of values [N] or [N, P] that were computed from `logits`, over images and patches. Scalar.

        If D is made of several discriminators, this is the sum of their means.
        """
        return _sum([part.mean() for part in self._split_patches(values)])

    @property
    def image_logits(self) -> Tensor:
        """[N] how real each image is: the mean over its patches, and the sum over discriminators."""
        if self.logits.dim() == 1:
            return self.logits
        return _sum([part.flatten(1).mean(1) for part in self._split_patches(self.logits)])

    def _split_patches(self, values: Tensor) -> Sequence[Tensor]:
        return values.split(self.patches, dim=1) if len(self.patches) > 1 else (values,)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


# A discriminator: (images, labels) -> logits [N], or a DiscriminatorOutput.
DiscriminatorFn = Callable[[Tensor, Tensor | None], Tensor | DiscriminatorOutput]


def run_discriminator(d: DiscriminatorFn, images: Tensor, labels: Tensor | None) -> DiscriminatorOutput:
    """Run D on images [N, C, H, W] and labels [N]; logits alone are wrapped in a DiscriminatorOutput."""
    output = d(images, labels)
    return output if isinstance(output, DiscriminatorOutput) else DiscriminatorOutput(output)


def primary_array(output: Any, name: str = "images") -> Tensor:
    """Return the array that D judges of what G returned: a tensor, or a NamedTuple with a field `images` or `name`.

    Raises:
        UsageError: it has no such field.
    """
    fields = named_fields(output)
    if not fields:
        return output
    primary = next((field for field in (name, "images") if field in fields), None)
    if primary is None:
        raise UsageError(
            f"generator: returned {type(output).__name__}({', '.join(fields)}), and D judges the field {name!r}. "
            f"Name one of them {name}"
        )
    return fields[primary]


def named_fields(output: Any) -> dict[str, Any]:
    """Return the fields of a NamedTuple by name; of anything else none."""
    as_dict = getattr(output, "_asdict", None) if isinstance(output, tuple) else None
    return as_dict() if as_dict else {}


@dataclass(frozen=True)
class Batch:
    """The images of some lanes at one position, with their random numbers.

    images    : [N, C, H, W] float32 in [-1, 1], or records of numbers [N, ...]
    labels    : [N] int64, or None in an unconditional game
    rng       : random numbers of these lanes at this position
    latents   : [N, latent], or another input of G, where G has just generated the images
    perturbed : [N, C, H, W] images of latents close to `latents`, where the objective needs them
    fields    : by name, all arrays [N, ...] of records of several, of which `images` is one; of fakes all that G
                returned in a NamedTuple
    generator : G, where it has just generated the images in its own turn
    adversarial_weight : in G's turn, the factor on the part of its loss that needs D: 0 until D starts (config
                `d.start_kimg`), then growing to 1; where it is 0, D must not be called
    """

    images: Tensor
    labels: Tensor | None
    rng: LaneRng
    latents: Tensor | None = None
    perturbed: Tensor | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generator: nn.Module | None = None
    adversarial_weight: float = 1.0


@dataclass(frozen=True)
class Loss:
    """A loss, as an objective returns it.

    total : the scalar that a player minimises
    parts : by name, detached scalars worth logging
    """

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
