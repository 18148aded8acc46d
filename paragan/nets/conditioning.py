"""How two networks are told the class, and what a generator makes of latents and labels before its first layer."""

import itertools
from collections.abc import Iterable
from typing import ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from paragan.core.errors import Unusable
from paragan.nets.spec import Spec

Telling = Literal["none", "concat", "batch_norm"]
Judging = Literal["none", "concat", "projection", "classifier", "contrastive"]
GConditioning = Literal["auto", Telling]
DConditioning = Literal["auto", Judging]
Kind = TypeVar("Kind", Telling, Judging)


class Conditioned(Protocol):
    """A record of two networks."""

    @property
    def g_conditioning(self) -> GConditioning: ...
    @property
    def d_conditioning(self) -> DConditioning: ...

    own_judging: ClassVar[Judging]
    """What `auto` is for D where there are classes."""


def chosen(wanted: Literal["auto"] | Kind, own: Kind, spec: Spec) -> Kind | Literal["none"]:
    """What is built: as wanted; `auto` is the family's own where there are classes, and none elsewhere."""
    if wanted != "auto":
        return wanted
    return own if spec.classes else "none"


def judging(nets: Conditioned, spec: Spec) -> Judging:
    """How D is told the class."""
    return chosen(nets.d_conditioning, nets.own_judging, spec)


def need_classes(nets: Conditioned, spec: Spec) -> None:
    """Raise `Unusable` for a conditioning without classes, and for classes that nobody is to be told."""
    for field, wanted in (("g_conditioning", nets.g_conditioning), ("d_conditioning", nets.d_conditioning)):
        if wanted == "none" and spec.classes:
            raise Unusable(
                f"nets.{field}=none, but the data has {spec.classes} classes: leave them out by --data.labels=false, "
                f"or use nets.{field}=auto"
            )
        if wanted not in ("auto", "none") and not spec.classes:
            raise Unusable(f"nets.{field}={wanted} needs classes, and there are none here: use nets.{field}=auto")


def needed(y: Tensor | None) -> Tensor:
    """`y` itself. Raises `Unusable` where there are no labels."""
    if y is None:
        raise Unusable("y: a conditional network needs labels, int64 [N], not None")
    return y


# Of a generator: (z [N, latent], y) -> what its first layer sees [N, inputs], and what the norms of each block see.


class Plain(nn.Module):
    """The first layer sees z, the norms see y: those that are not conditional ignore it."""

    def __init__(self, latent: int):
        super().__init__()
        self.inputs = latent

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return z, itertools.repeat(y)


class Joined(nn.Module):
    """The first layer sees z beside an embedding of the class, of the same length and drawn from N(0, 1) like z."""

    def __init__(self, latent: int, classes: int):
        super().__init__()
        self.inputs = 2 * latent
        self.embedding = nn.Embedding(classes, latent)

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor | None]]:
        return torch.cat([z, self.embedding(needed(y)).to(z.dtype)], 1), itertools.repeat(None)


def told(kind: Telling, latent: int, classes: int) -> Plain | Joined:
    """For generators whose norms have an embedding each."""
    return Joined(latent, classes) if kind == "concat" else Plain(latent)


class Shared(nn.Module):
    """One embedding of the class for all norms, each of which sees it beside (a part of) z.

    shared: [classes, length], None without classes
    parts : so many equal parts of z, one for the first layer, one for each block (Brock et al. 2019, section
            3.1); 1: all of z for everybody, and the class for the first layer too (BigGAN-deep)

    With `concat` the first layer alone is told the class.
    """

    def __init__(self, kind: Telling, latent: int, parts: int, shared: nn.Embedding | None):
        super().__init__()
        self.parts, self.shared = parts, shared
        length = 0 if shared is None else shared.embedding_dim
        self.first, self.norms = kind == "concat" or (kind != "none" and parts == 1), kind == "batch_norm"
        self.inputs = latent // parts + length * self.first
        self.length = latent // parts + length * self.norms  # of what a norm sees

    def forward(self, z: Tensor, y: Tensor | None) -> tuple[Tensor, Iterable[Tensor]]:
        label = [] if self.shared is None else [self.shared(needed(y)).to(z.dtype)]
        first, *rest = z.chunk(self.parts, 1) if self.parts > 1 else (z, z)
        seen = [torch.cat([part, *label], 1) if self.norms else part for part in rest]
        first = torch.cat([first, *label], 1) if self.first else first
        return first, seen if self.parts > 1 else itertools.repeat(seen[0])


# Of a discriminator.


class Mapped(nn.Module):
    """Images [N, C, R, R], y -> [N, C + 1, R, R]: beside them a map of their class, 8x8 learned numbers.

    Each number covers R/8 x R/8 pixels, so that a thousand classes at 1024 px are 64,000 parameters and not a
    billion. In the manner of Mirza and Osindero, "Conditional Generative Adversarial Nets", 2014.
    """

    maps = 1

    def __init__(self, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(classes, 64)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        plan = self.embedding(needed(y)).to(x.dtype).view(-1, 1, 8, 8)
        plan = nn.functional.interpolate(plan, size=x.shape[2:], mode="nearest")
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        layout = torch.channels_last if last else torch.contiguous_format
        return torch.cat([x, plan], 1).contiguous(memory_format=layout)


class Unmapped(nn.Module):
    """The images alone."""

    maps = 0

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x


def shown(kind: Judging, classes: int) -> Mapped | Unmapped:
    """What a discriminator's first layer sees."""
    return Mapped(classes) if kind == "concat" else Unmapped()
