"""How two networks are told the class, and what a generator makes of latents and labels before its first layer."""

import itertools
from collections.abc import Iterable
from typing import ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.nets.spec import Spec

GConditioningKind = Literal["none", "concat", "batch_norm"]
DConditioningKind = Literal["none", "concat", "projection", "classifier", "contrastive"]
GConditioning = Literal["auto", GConditioningKind]
DConditioning = Literal["auto", DConditioningKind]
ConditioningKind = TypeVar("ConditioningKind", GConditioningKind, DConditioningKind)


class ConditionalNets(Protocol):
    """A record of two networks."""

    @property
    def g_conditioning(self) -> GConditioning: ...
    @property
    def d_conditioning(self) -> DConditioning: ...

    default_d_conditioning: ClassVar[DConditioningKind]
    """What `auto` is for D where there are classes."""


def resolve_conditioning(
    requested: Literal["auto"] | ConditioningKind, default: ConditioningKind, spec: Spec
) -> ConditioningKind | Literal["none"]:
    """What is built: as wanted; `auto` is the family's own where there are classes, and none elsewhere."""
    if requested != "auto":
        return requested
    return default if spec.classes else "none"


def resolve_d_conditioning(nets: ConditionalNets, spec: Spec) -> DConditioningKind:
    """How D is told the class."""
    return resolve_conditioning(nets.d_conditioning, nets.default_d_conditioning, spec)


def check_conditioning(nets: ConditionalNets, spec: Spec) -> None:
    """Raise `Unusable` for a conditioning without classes, and for classes that nobody is to be told."""
    for field, wanted in (("g_conditioning", nets.g_conditioning), ("d_conditioning", nets.d_conditioning)):
        if wanted == "none" and spec.classes:
            raise UsageError(
                f"nets.{field}=none, but the data has {spec.classes} classes: leave them out by --data.labels=false, "
                f"or use nets.{field}=auto"
            )
        if wanted not in ("auto", "none") and not spec.classes:
            raise UsageError(f"nets.{field}={wanted} needs classes, and there are none here: use nets.{field}=auto")


def require_labels(y: Tensor | None) -> Tensor:
    """`y` itself. Raises `Unusable` where there are no labels."""
    if y is None:
        raise UsageError("y: a conditional network needs labels, int64 [N], not None")
    return y


# Of a generator: (z [N, latent], y) -> what its first layer sees [N, inputs], and what the norms of each block see.


class ZOnly(nn.Module):
    """The first layer sees z, the norms see y: those that are not conditional ignore it."""

    def __init__(self, latent: int):
        super().__init__()
        self.out_features = latent

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return z, itertools.repeat(y)


class ConcatLabel(nn.Module):
    """The first layer sees z beside an embedding of the class, of the same length and drawn from N(0, 1) like z."""

    def __init__(self, latent: int, classes: int):
        super().__init__()
        self.out_features = 2 * latent
        self.embedding = nn.Embedding(classes, latent)

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return torch.cat([z, self.embedding(require_labels(y)).to(z.dtype)], 1), itertools.repeat(None)


def g_input(kind: GConditioningKind, latent: int, classes: int) -> ZOnly | ConcatLabel:
    """For generators whose norms have an embedding each."""
    return ConcatLabel(latent, classes) if kind == "concat" else ZOnly(latent)


class SharedEmbedding(nn.Module):
    """One embedding of the class for all norms, each of which sees it beside (a part of) z.

    shared: [classes, length], None without classes
    parts : so many equal parts of z, one for the first layer, one for each block (Brock et al. 2019, section
            3.1); 1: all of z for everybody, and the class for the first layer too (BigGAN-deep)

    With `concat` the first layer alone is told the class.
    """

    def __init__(self, kind: GConditioningKind, latent: int, z_chunks: int, shared: nn.Embedding | None):
        super().__init__()
        self.z_chunks, self.shared = z_chunks, shared
        length = 0 if shared is None else shared.embedding_dim
        self.conditions_first_layer, self.conditions_norms = (
            kind == "concat" or (kind != "none" and z_chunks == 1),
            kind == "batch_norm",
        )
        self.out_features = latent // z_chunks + length * self.conditions_first_layer
        self.norm_features = latent // z_chunks + length * self.conditions_norms  # of what a norm sees

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor]]:
        label = [] if self.shared is None else [self.shared(require_labels(y)).to(z.dtype)]
        first, *rest = z.chunk(self.z_chunks, 1) if self.z_chunks > 1 else (z, z)
        seen = [torch.cat([part, *label], 1) if self.conditions_norms else part for part in rest]
        first = torch.cat([first, *label], 1) if self.conditions_first_layer else first
        return first, seen if self.z_chunks > 1 else itertools.repeat(seen[0])


# Of a discriminator.


class LabelMap(nn.Module):
    """Images [N, C, R, R], y -> [N, C + 1, R, R]: beside them a map of their class, 8x8 learned numbers.

    Each number covers R/8 x R/8 pixels, so that a thousand classes at 1024 px are 64,000 parameters and not a
    billion. In the manner of Mirza and Osindero, "Conditional Generative Adversarial Nets", 2014.
    """

    extra_channels = 1

    def __init__(self, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(classes, 64)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        plan = self.embedding(require_labels(y)).to(x.dtype).view(-1, 1, 8, 8)
        plan = nn.functional.interpolate(plan, size=x.shape[2:], mode="nearest")
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        layout = torch.channels_last if last else torch.contiguous_format
        return torch.cat([x, plan], 1).contiguous(memory_format=layout)


class NoLabelMap(nn.Module):
    """The images alone."""

    extra_channels = 0

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x


def d_input(kind: DConditioningKind, classes: int) -> LabelMap | NoLabelMap:
    """What a discriminator's first layer sees."""
    return LabelMap(classes) if kind == "concat" else NoLabelMap()
