"""Play that is to be undone: what was played since the last good checkpoint goes, and the run goes on from there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator

from paragan.comm.compressed_allreduce import NonFiniteMessage
from paragan.core.clock import Clock
from paragan.core.errors import Diverged
from paragan.train.health.rules import Finding


class RollbackRequested(Exception):
    """Raised by all ranks at the same step."""

    def __init__(self, finding: Finding, images: int, step: int):
        super().__init__(finding.message)
        self.finding, self.images, self.step = finding, images, step


@contextlib.contextmanager
def rollback_on_divergence(can_roll_back: bool, clock: Clock) -> Generator[None]:
    """Where somebody guards the run, numbers that are not finite undo what was played instead of ending it."""
    try:
        yield
    except (Diverged, NonFiniteMessage) as error:
        if not can_roll_back:
            raise
        finding = Finding("nonfinite", str(error), "", math.nan, math.inf, clock.step)
        raise RollbackRequested(finding, clock.images, clock.step) from error
