"""A batch that grows: a function of the images seen, so that ranks agree, and a resume goes on exactly.

Lanes stay as many, and each gets more images: what a lane draws at a position depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from ..errors import Unusable
from ..losses.adversarial import Adversarial
from ..losses.augment import ADA
from ..optim.optimizers import RULES, Side
from ..strategies.quantized import Quantized
from ..strategies.sync import Sync

if TYPE_CHECKING:
    from .run import Run


def _pairs(value: Any) -> Any:
    """`100:128,400:256` is a list of pairs too."""
    if not isinstance(value, str):
        return value
    pairs = [part.split(":") for part in value.split(",")] if value else []
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a ramp is KIMG:BATCH,... such as 100:128,400:256")
    return pairs


Stage = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], Annotated[int, Field(ge=1)]]
Ramp = Annotated[tuple[Stage, ...], BeforeValidator(_pairs)]


def rounded_up(images: int, size: int) -> int:
    """To whole rounds of a size."""
    return -(-images // size) * size


def stages(run: Run) -> Iterator[tuple[int, int]]:
    """(first image, batch) of every stage: each begins with the first round at or after its time."""
    start, batch = 0, run.batch
    yield start, batch
    for kimg, larger in run.ramp:
        start += rounded_up(max(0, round(1000 * kimg) - start), batch * run.d_steps)
        batch = larger
        yield start, batch


def stage(run: Run, images: int) -> tuple[int, int]:
    """That in which the round is which has begun by then."""
    return [one for one in stages(run) if one[0] <= max(0, images)][-1]


def unreached(run: Run) -> str:
    """What to say of stages that begin after the end; nothing where all are reached."""
    late = [f"{start / 1000:g}:{batch}" for start, batch in stages(run) if start >= run.images]
    return f"--ramp {','.join(late)} begins after the end, --kimg {run.kimg:g}" if late else ""


def rate_of(run: Run, side: Side) -> Callable[[int], float]:
    """images seen after a step -> factor on a player's learning rate, which follows the batch by the player's rule."""
    rate = side.rate(run.images)
    if not run.ramp:
        return rate
    return lambda images: rate(images) * RULES[side.rule](stage(run, images - 1)[1] / run.batch)


def refuse_ramp(run: Run) -> None:
    """Unusable where a batch cannot grow."""
    before, told = -1.0, ",".join(f"{kimg:g}:{batch}" for kimg, batch in run.ramp)
    for kimg, batch in run.ramp:
        if kimg <= before:
            raise Unusable(f"--ramp {told}: times rise, from one stage to the next: 100:128,400:256")
        if batch % run.lanes:
            down = batch - batch % run.lanes or run.lanes
            raise Unusable(
                f"--ramp {told}: {batch} does not divide into --lanes {run.lanes}: try {down} or {down + run.lanes}"
            )
        if run.g_batch and batch * run.g_batch % (run.batch * run.lanes):
            raise Unusable(f"--ramp {told}: --g_batch {run.g_batch} does not grow with {batch} in whole lanes")
        before = kimg
    ada = isinstance(run.objective, Adversarial) and isinstance(run.objective.augment, ADA)
    reasons = {
        f"--strategy {run.strategy.name} needs rounds of one size": not isinstance(run.strategy, Sync | Quantized),
        "--device.graph=true records passes of one size": run.device.graph,
        "objective.augment=ada counts in steps of one size": ada,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unusable(f"--ramp {told}: {reason}: leave one of them out")
