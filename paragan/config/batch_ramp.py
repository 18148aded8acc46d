"""A batch that grows: a function of the images seen, so that ranks agree, and a resume goes on exactly.

Lanes stay as many, and each gets more images: what a lane draws at a position depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _parse_pairs(value: Any) -> Any:
    """`100:128,400:256` is a list of pairs too."""
    if not isinstance(value, str):
        return value
    pairs = [part.split(":") for part in value.split(",")] if value else []
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a ramp is KIMG:BATCH,... such as 100:128,400:256")
    return pairs


RampStage = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Annotated[int, Field(ge=1)]]
Ramp = Annotated[tuple[RampStage, ...], BeforeValidator(_parse_pairs)]


def round_up(images: int, size: int) -> int:
    """To whole rounds of a size."""
    return -(-images // size) * size


def batch_stages(batch: int, d_steps: int, ramp: Ramp) -> Iterator[tuple[int, int]]:
    """Yield (first image, batch) of every stage: each begins with the first round at or after its time."""
    start = 0
    yield start, batch
    for kimg, larger in ramp:
        start += round_up(max(0, round(1000 * kimg) - start), batch * d_steps)
        batch = larger
        yield start, batch
