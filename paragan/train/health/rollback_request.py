"""The exception by which all ranks leave the loop at the same step, to go back to the last good checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator

from paragan.comm.compressed_allreduce import NonFiniteMessage
from paragan.core.clock import Clock
from paragan.core.errors import Diverged
from paragan.train.health.rules import Finding


class RollbackRequested(Exception):
    """Raised by all ranks at the same step. `finding` says why; `images` and `step` are the clock's."""

    def __init__(self, finding: Finding, images: int, step: int):
        super().__init__(finding.message)
        self.finding = finding
        self.images = images
        self.step = step


@contextlib.contextmanager
def rollback_on_divergence(can_roll_back: bool, clock: Clock) -> Generator[None]:
    """Turn the error of numbers that are not finite into a RollbackRequested, if the run can roll back."""
    try:
        yield
    except (Diverged, NonFiniteMessage) as error:
        if not can_roll_back:
            raise
        finding = Finding("nonfinite", str(error), "", math.nan, math.inf, clock.step)
        raise RollbackRequested(finding, clock.images, clock.step) from error
