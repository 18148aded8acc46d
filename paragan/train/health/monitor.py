"""Who looks at every line of stats, and says what is wrong: once a kind, on the screen and in health.jsonl."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paragan.config.sections import HealthOptions, RollbackOptions
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, Row, is_number, read_jsonl
from paragan.train.console import RunConsole
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.health.rules import HISTORY_LINES, ROLLBACK_KINDS, Finding, detect
from paragan.train.health.signals import HealthSignals
from paragan.train.session import Session

HEALTH_FILE = "health.jsonl"
ACTION_ROLLBACK, ACTION_GAVE_UP, ACTION_WARNED = "rollback", "gave up", "warned"


@dataclass
class HealthMonitor:
    """Judges lines of stats. Rank 0 does; the others hear what is to be undone."""

    folder: Path
    console: RunConsole
    options: HealthOptions
    rollback_options: RollbackOptions
    signals: HealthSignals = field(default_factory=HealthSignals)
    _rows: list[Row] | None = None
    _reported_kinds: set[str] = field(default_factory=set[str])

    def measure_signals(self, session: Session) -> dict[str, float]:
        """What a line of stats says of the game's health."""
        return self.signals(session) if self.options.enabled else {}

    def __call__(self, session: Session, line: Row) -> None:
        """Look at the line that was just written. Undo, where somebody guards the run and what was found may be cured
        by going back."""
        if not self.options.enabled:
            return
        found = self._detect_findings(line) if session.world.is_main else []
        for finding in found:
            self._warn(session, finding)
        cures = [finding for finding in found if finding.kind in ROLLBACK_KINDS]
        if self.rollback_options.is_enabled:
            chosen = cures[0] if cures else None
            told = torch.tensor([0.0 if chosen is None else 1.0 + ROLLBACK_KINDS.index(chosen.kind)])
            session.world.all_ranks.all_reduce_sum(told).wait()
            if told[0]:
                finding = chosen or Finding(ROLLBACK_KINDS[int(told[0]) - 1], "as rank 0 says", "", math.nan, math.nan)
                raise RollbackRequested(finding, session.clock.images, session.clock.step)

    def _detect_findings(self, line: Row) -> list[Finding]:
        if self._rows is None:
            self._rows = read_jsonl(self.folder / "stats.jsonl")[-HISTORY_LINES:]
            self._reported_kinds = {
                str(row.get("kind"))
                for row in read_jsonl(self.folder / HEALTH_FILE)
                if row.get("action") == ACTION_WARNED
            }
        else:
            self._rows = [*self._rows, line][-HISTORY_LINES:]
        return detect(self._rows, self.options)

    def _warn(self, session: Session, finding: Finding) -> None:
        """Once a kind; what is undone is told by who does it."""
        if finding.kind in self._reported_kinds or (
            self.rollback_options.is_enabled and finding.kind in ROLLBACK_KINDS
        ):
            return
        self._reported_kinds.add(finding.kind)
        append_finding(self.folder, finding, session.clock.kimg, session.clock.step, ACTION_WARNED)
        shown = f"{finding.key} in {self.folder}/stats.jsonl and report.html"
        self.console.print(f"warning, {session.clock.kimg:g} kimg: {finding.message}; {finding.advice} ({shown})")


def append_finding(folder: Path, finding: Finding, kimg: float, step: int, action: str, **extra: float | bool) -> None:
    """A line of health.jsonl."""
    known = {"value": finding.value, "limit": finding.limit}
    numbers = {name: x if math.isfinite(x) else None for name, x in known.items()}
    about = {"kimg": kimg, "step": step, "kind": finding.kind, "message": finding.message, "key": finding.key}
    JsonlFile(folder / HEALTH_FILE).append({**about, **numbers, "action": action, "advice": finding.advice, **extra})


def read_rollbacks(folder: Path) -> list[Row]:
    """How often, and to where, a run has gone back. Unusable where that cannot be told."""
    found = [row for row in read_jsonl(folder / HEALTH_FILE) if row.get("action") == ACTION_ROLLBACK]
    if not all(isinstance(row.get("to_step"), int) for row in found):
        raise UsageError(
            f"{folder / HEALTH_FILE}: a rollback whose to_step is no whole number; mend or delete that line"
        )
    return found


def drop_findings_after(folder: Path, step: int) -> None:
    """Drop what was said of steps that are played again. That a run went back, and that it gave up, stays."""
    JsonlFile(folder / HEALTH_FILE).filter(
        lambda row: (
            row.get("action") in (ACTION_ROLLBACK, ACTION_GAVE_UP) or not is_number(at := row.get("step")) or at <= step
        )
    )
