"""Who looks at every line of stats, and says what is wrong: once a kind, on the screen and in health.jsonl."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paragan.config.sections import Guard, Health
from paragan.core.errors import Unusable
from paragan.core.jsonl import Records, Row, is_number, read
from paragan.train.console import Screen
from paragan.train.health.rollback_request import Undo
from paragan.train.health.rules import CURES, HISTORY, Finding, judge
from paragan.train.health.signals import Signs
from paragan.train.session import Session

NAME = "health.jsonl"
ROLLBACK, GAVE_UP, WARNED = "rollback", "gave up", "warned"


@dataclass
class Watch:
    """Judges lines of stats. Rank 0 does; the others hear what is to be undone."""

    folder: Path
    screen: Screen
    health: Health
    guard: Guard
    measure: Signs = field(default_factory=Signs)
    _rows: list[Row] | None = None
    _known: set[str] = field(default_factory=set[str])

    def signs(self, session: Session) -> dict[str, float]:
        """What a line of stats says of the game's health."""
        return self.measure(session) if self.health.watch else {}

    def __call__(self, session: Session, line: Row) -> None:
        """Look at the line that was just written. Undo, where somebody guards the run and what was found may be cured
        by going back."""
        if not self.health.watch:
            return
        found = self._look(line) if session.world.first else []
        for finding in found:
            self._warn(session, finding)
        cures = [finding for finding in found if finding.kind in CURES]
        if self.guard.acts:
            chosen = cures[0] if cures else None
            told = torch.tensor([0.0 if chosen is None else 1.0 + CURES.index(chosen.kind)])
            session.world.everyone.sum(told).wait()
            if told[0]:
                finding = chosen or Finding(CURES[int(told[0]) - 1], "as rank 0 says", "", math.nan, math.nan)
                raise Undo(finding, session.clock.images, session.clock.step)

    def _look(self, line: Row) -> list[Finding]:
        if self._rows is None:
            self._rows = read(self.folder / "stats.jsonl")[-HISTORY:]
            self._known = {str(row.get("kind")) for row in read(self.folder / NAME) if row.get("action") == WARNED}
        else:
            self._rows = [*self._rows, line][-HISTORY:]
        return judge(self._rows, self.health)

    def _warn(self, session: Session, finding: Finding) -> None:
        """Once a kind; what is undone is told by who does it."""
        if finding.kind in self._known or (self.guard.acts and finding.kind in CURES):
            return
        self._known.add(finding.kind)
        record(self.folder, finding, session.clock.kimg, session.clock.step, WARNED)
        shown = f"{finding.key} in {self.folder}/stats.jsonl and report.html"
        self.screen.say(f"warning, {session.clock.kimg:g} kimg: {finding.message}; {finding.advice} ({shown})")


def record(folder: Path, finding: Finding, kimg: float, step: int, action: str, **more: float | bool) -> None:
    """A line of health.jsonl."""
    known = {"value": finding.value, "limit": finding.limit}
    numbers = {name: x if math.isfinite(x) else None for name, x in known.items()}
    about = {"kimg": kimg, "step": step, "kind": finding.kind, "message": finding.message, "key": finding.key}
    Records(folder / NAME).append({**about, **numbers, "action": action, "advice": finding.advice, **more})


def rollbacks(folder: Path) -> list[Row]:
    """How often, and to where, a run has gone back. Unusable where that cannot be told."""
    found = [row for row in read(folder / NAME) if row.get("action") == ROLLBACK]
    if not all(isinstance(row.get("to_step"), int) for row in found):
        raise Unusable(f"{folder / NAME}: a rollback whose to_step is no whole number; mend or delete that line")
    return found


def forget_after(folder: Path, step: int) -> None:
    """Drop what was said of steps that are played again. That a run went back, and that it gave up, stays."""
    Records(folder / NAME).keep(
        lambda row: row.get("action") in (ROLLBACK, GAVE_UP) or not is_number(at := row.get("step")) or at <= step
    )
