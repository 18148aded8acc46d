"""How the networks are conditioned on the class.

A generator starts with a module that maps (z [N, latent], y [N]) to the input of its first layer and to the inputs of
its norms. A discriminator starts with a label map, and ends with a head (`nets/discriminator_heads.py`).
"""

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
    """Config of a pair of networks, as far as conditioning is concerned."""

    @property
    def g_conditioning(self) -> GConditioning: ...
    @property
    def d_conditioning(self) -> DConditioning: ...

    default_d_conditioning: ClassVar[DConditioningKind]
    """What `d_conditioning=auto` stands for if there are classes."""


def resolve_conditioning(
    requested: Literal["auto"] | ConditioningKind, default: ConditioningKind, spec: Spec
) -> ConditioningKind | Literal["none"]:
    """Return the conditioning to build: `auto` stands for `default` if there are classes, else for "none"."""
    if requested != "auto":
        return requested
    return default if spec.classes else "none"


def resolve_d_conditioning(nets: ConditionalNets, spec: Spec) -> DConditioningKind:
    """Return the conditioning of the discriminator."""
    return resolve_conditioning(nets.d_conditioning, nets.default_d_conditioning, spec)


def check_conditioning(nets: ConditionalNets, spec: Spec) -> None:
    """Raise `UsageError` for a conditioning without classes, and for classes without a conditioning."""
    for field, kind in (("g_conditioning", nets.g_conditioning), ("d_conditioning", nets.d_conditioning)):
        if kind == "none" and spec.classes:
            raise UsageError(
                f"nets.{field}=none: the data has {spec.classes} classes. "
                f"Use nets.{field}=auto, or --data.labels=false to ignore the classes"
            )
        if kind not in ("auto", "none") and not spec.classes:
            raise UsageError(f"nets.{field}={kind}: needs classes, and the data has none. Use nets.{field}=auto")


def require_labels(y: Tensor | None) -> Tensor:
    """Return `y`. Raises `UsageError` if it is None."""
    if y is None:
        raise UsageError("y=None: a conditional network needs labels. Use an int64 tensor [N]")
    return y


# Inputs of a generator: (z [N, latent], y) -> (input of the first layer [N, out_features], inputs of the norms).


class ZOnly(nn.Module):
    """z into the first layer, y into the norms, which ignore it unless they are conditional."""

    def __init__(self, latent: int):
        super().__init__()
        self.out_features = latent

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return z, itertools.repeat(y)


class ConcatLabel(nn.Module):
    """z and a class embedding into the first layer. The embedding is as long as z and starts from N(0, 1) like z."""

    def __init__(self, latent: int, classes: int):
        super().__init__()
        self.out_features = 2 * latent
        self.embedding = nn.Embedding(classes, latent)

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return torch.cat([z, self.embedding(require_labels(y)).to(z.dtype)], 1), itertools.repeat(None)


def g_input(kind: GConditioningKind, latent: int, classes: int) -> ZOnly | ConcatLabel:
    """Return the input module of a generator whose norms have their own class embeddings."""
    return ConcatLabel(latent, classes) if kind == "concat" else ZOnly(latent)


class SharedEmbedding(nn.Module):
    """One class embedding for all norms, each of which takes it together with z or a chunk of z.

    Args:
        kind: "batch_norm": the norms take the class. "concat": only the first layer takes it. "none": neither.
        latent: Length of z.
        z_chunks: Number of equal chunks of z, one for the first layer and one for each block (Brock et al. 2019,
            section 3.1). 1: all of z for every layer, and the class for the first layer too (BigGAN-deep).
        shared: The embedding [classes, length]; None without classes.
    """

    def __init__(self, kind: GConditioningKind, latent: int, z_chunks: int, shared: nn.Embedding | None):
        super().__init__()
        self.z_chunks = z_chunks
        self.shared = shared
        length = 0 if shared is None else shared.embedding_dim
        self.conditions_first_layer = kind == "concat" or (kind != "none" and z_chunks == 1)
        self.conditions_norms = kind == "batch_norm"
        self.out_features = latent // z_chunks + (length if self.conditions_first_layer else 0)
        self.norm_features = latent // z_chunks + (length if self.conditions_norms else 0)

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor]]:
        label = [] if self.shared is None else [self.shared(require_labels(y)).to(z.dtype)]
        first, *rest = z.chunk(self.z_chunks, 1) if self.z_chunks > 1 else (z, z)
        if self.conditions_norms:
            rest = [torch.cat([chunk, *label], 1) for chunk in rest]
        if self.conditions_first_layer:
            first = torch.cat([first, *label], 1)
        return first, rest if self.z_chunks > 1 else itertools.repeat(rest[0])


# Inputs of a discriminator: (images, y) -> input of the first block.


class LabelMap(nn.Module):
    """Images [N, C, H, W], y -> [N, C + 1, H, W]: the images with one more channel, a map of their class.

    A map has 8x8 learned numbers, each of which covers H/8 x W/8 pixels: a thousand classes at 1024 px take 64,000
    parameters instead of a billion. After Mirza and Osindero, "Conditional Generative Adversarial Nets", 2014.
    """

    extra_channels = 1

    def __init__(self, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(classes, 64)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        maps = self.embedding(require_labels(y)).to(x.dtype).view(-1, 1, 8, 8)
        maps = nn.functional.interpolate(maps, size=x.shape[2:], mode="nearest")
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return torch.cat([x, maps], 1).contiguous(memory_format=memory_format)


class NoLabelMap(nn.Module):
    """The images unchanged."""

    extra_channels = 0

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x


def d_input(kind: DConditioningKind, classes: int) -> LabelMap | NoLabelMap:
    """Return the module before a discriminator's first block."""
    return LabelMap(classes) if kind == "concat" else NoLabelMap()
