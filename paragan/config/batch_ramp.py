"""A batch size that grows during a run.

The batch is a function of the images seen so far, so that all ranks agree on it and a resumed run continues exactly.
The number of lanes stays; each lane gets more images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _parse_pairs(value: Any) -> Any:
    """Accept `100:128,400:256` as a list of pairs."""
    if not isinstance(value, str):
        return value
    pairs = [part.split(":") for part in value.split(",")] if value else []
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a ramp is KIMG:BATCH,..., such as 100:128,400:256")
    return pairs


RampStage = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Annotated[int, Field(ge=1)]]
Ramp = Annotated[tuple[RampStage, ...], BeforeValidator(_parse_pairs)]


def round_up(images: int, size: int) -> int:
    """Round a number of images up to whole rounds of a size."""
    return -(-images // size) * size


def batch_stages(batch: int, d_steps: int, ramp: Ramp) -> Iterator[tuple[int, int]]:
    """Yield (first image, batch) of every stage: each begins with the first round at or after its time."""
    start = 0
    yield start, batch
    for kimg, larger in ramp:
        start += round_up(max(0, round(1000 * kimg) - start), batch * d_steps)
        batch = larger
        yield start, batch
