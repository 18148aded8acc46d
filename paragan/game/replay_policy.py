"""Which of the images that G made D gets to see: policies, as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paragan.core.rng import CPU, Draw
from paragan.core.schema import by_name, record

Ages = NDArray[np.int64]
Last = Annotated[int, Field(ge=1, le=1024)]


class Policy(Protocol):
    """last: how many rounds of images are kept."""

    @property
    def last(self) -> int: ...

    def ages(self, draw: Draw, kept: int) -> Ages | None:
        """For every image of a hand, which of the `kept` rounds it is from, 0 being the newest; None: all from that."""
        ...


@record
class Newest:
    """The newest there are."""

    name: Literal["newest"] = "newest"

    @property
    def last(self) -> int:
        return 1

    def ages(self, draw: Draw, kept: int) -> Ages | None:
        return None


@record
class Uniform:
    """Each image from any of the `last` rounds."""

    name: Literal["uniform"] = "uniform"
    last: Last = 4

    def ages(self, draw: Draw, kept: int) -> Ages | None:
        return _some(draw, "buffer/age", kept) if kept > 1 else None


@record
class Replay:
    """A `fraction` of the images from any of the `last` - 1 rounds before the newest (Shrivastava et al. 2017)."""

    name: Literal["replay"] = "replay"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    last: Annotated[int, Field(ge=2, le=1024)] = 16

    def ages(self, draw: Draw, kept: int) -> Ages | None:
        if kept == 1:
            return None
        old = _on_host(draw).uniform("buffer/replay").numpy() < self.fraction
        return np.where(old, 1 + _some(draw, "buffer/age", kept - 1), 0)


def _some(draw: Draw, stream: str, count: int) -> Ages:
    return _on_host(draw).choice(stream, np.arange(count)).numpy()


def _on_host(draw: Draw) -> Draw:
    return replace(draw, device=CPU)


Buffer = Annotated[Newest | Uniform | Replay, Field(discriminator="name"), by_name]
Pattern = tuple[Annotated[int, Field(ge=0, le=1024)], ...]


def lag(pattern: Pattern, step: int) -> int:
    """Of one step: the pattern is repeated."""
    return pattern[step % len(pattern)]
