"""Which of G's images D trains on where it reuses them: policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paragan.core.rng import CPU, LaneRng
from paragan.core.schema import config_class, name_shorthand

Ages = NDArray[np.int64]
Window = Annotated[int, Field(ge=1, le=1024)]


class ReplayPolicy(Protocol):
    """A rule for the ages of the images that D trains on."""

    @property
    def window(self) -> int:
        """How many rounds of images are kept."""
        ...

    def sample_ages(self, rng: LaneRng, available: int) -> Ages | None:
        """Return for every image of a micro-batch which of `available` rounds it is from (0: the newest).

        None: all are from the newest.
        """
        ...


@config_class
class Latest:
    """The newest images."""

    name: Literal["latest"] = "latest"

    @property
    def window(self) -> int:
        return 1

    def sample_ages(self, rng: LaneRng, available: int) -> Ages | None:
        return None


@config_class
class UniformReplay:
    """Each image from any of the newest `window` rounds, with equal probability.

    window : rounds whose images are used
    """

    name: Literal["uniform"] = "uniform"
    window: Window = 4

    def sample_ages(self, rng: LaneRng, available: int) -> Ages | None:
        return _uniform_ages(rng, "buffer/age", available) if available > 1 else None


@config_class
class FractionalReplay:
    """A `fraction` of the images from any of the `window` - 1 rounds before the newest (Shrivastava et al. 2017).

    fraction : of the images that come from earlier rounds
    window   : rounds whose images are used
    """

    name: Literal["replay"] = "replay"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    window: Annotated[int, Field(ge=2, le=1024)] = 16

    def sample_ages(self, rng: LaneRng, available: int) -> Ages | None:
        if available == 1:
            return None
        old = _to_cpu(rng).uniform("buffer/replay").numpy() < self.fraction
        return np.where(old, 1 + _uniform_ages(rng, "buffer/age", available - 1), 0)


def _uniform_ages(rng: LaneRng, stream: str, count: int) -> Ages:
    return _to_cpu(rng).choice(stream, np.arange(count)).numpy()


def _to_cpu(rng: LaneRng) -> LaneRng:
    return replace(rng, device=CPU)


AnyReplayPolicy = Annotated[Latest | UniformReplay | FractionalReplay, Field(discriminator="name"), name_shorthand]
LagPattern = tuple[Annotated[int, Field(ge=0, le=1024)], ...]


def get_lag(pattern: LagPattern, step: int) -> int:
    """Return the lag of one step. The pattern is repeated."""
    return pattern[step % len(pattern)]
