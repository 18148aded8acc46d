"""Judge every line of stats and warn of what is wrong, once a kind: on the console and in health.jsonl.

Rank 0 judges, by the last lines of stats.jsonl alone, so a resumed run judges as an undisturbed one does. The other
ranks only learn whether to go back to a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paragan.config.sections import HealthOptions, RollbackOptions
from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, Row, is_number, read_jsonl
from paragan.train.console import RunConsole
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.health.rules import HISTORY_LINES, ROLLBACK_KINDS, Finding, detect
from paragan.train.health.signals import HealthSignals
from paragan.train.loggers.logger import Logger
from paragan.train.session import Session

HEALTH_FILE = "health.jsonl"
ACTION_ROLLBACK = "rollback"
ACTION_EXHAUSTED = "gave up"
ACTION_WARNED = "warned"


@dataclass
class HealthMonitor:
    """Judges lines of stats, warns, and requests rollbacks."""

    folder: Path
    console: RunConsole
    options: HealthOptions
    rollback_options: RollbackOptions
    logger: Logger = field(default_factory=Logger)
    signals: HealthSignals = field(default_factory=HealthSignals)
    _rows: list[Row] | None = None
    _reported_kinds: set[str] = field(default_factory=set[str])

    def measure_signals(self, session: Session) -> dict[str, Tensor]:
        """Return what this rank adds to the `Health/` values of a line of stats, on the device."""
        return self.signals.measure(session) if self.options.enabled else {}

    def reduce_signals(self, session: Session, local: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the `Health/` values of a line of stats. All ranks call this, with `measure_signals` on the host."""
        return self.signals.reduce(session, local) if self.options.enabled else {}

    def __call__(self, session: Session, line: Row) -> None:
        """Judge the line that was just written. All ranks call this.

        Raises:
            RollbackRequested: the run rolls back on divergence, and going back may cure what was found.
        """
        if not self.options.enabled:
            return
        findings = self._detect_findings(line) if session.world.is_main else []
        for finding in findings:
            self._warn(session, finding)
        if not self.rollback_options.is_enabled:
            return
        curable = next((finding for finding in findings if finding.kind in ROLLBACK_KINDS), None)
        kind_code = torch.tensor([0.0 if curable is None else 1.0 + ROLLBACK_KINDS.index(curable.kind)])
        session.world.all_ranks.all_reduce_sum(kind_code).wait()
        if kind_code[0]:
            kind = ROLLBACK_KINDS[int(kind_code[0]) - 1]
            finding = curable or Finding(kind, "as rank 0 says", "", math.nan, math.nan)
            raise RollbackRequested(finding, session.clock.images, session.clock.step)

    def _detect_findings(self, line: Row) -> list[Finding]:
        """Return what the newest line shows, given those before it."""
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
        """Warn of a finding, once a kind, unless a rollback is reported for it."""
        causes_rollback = self.rollback_options.is_enabled and finding.kind in ROLLBACK_KINDS
        if causes_rollback or finding.kind in self._reported_kinds:
            return
        self._reported_kinds.add(finding.kind)
        append_finding(self.folder, finding, session.clock.kimg, session.clock.step, ACTION_WARNED)
        where = f"{finding.key} in {self.folder}/stats.jsonl and report.html"
        self.console.print(f"warning, {session.clock.kimg:g} kimg: {finding.message}; {finding.advice} ({where})")
        self.logger.on_finding(f"{finding.message}; {finding.advice}", session.clock.images)


def append_finding(folder: Path, finding: Finding, kimg: float, step: int, action: str, **extra: float | bool) -> None:
    """Append a line to health.jsonl; value and limit are null where they are not finite."""
    row: dict[str, float | str | bool | None] = {
        "kimg": kimg,
        "step": step,
        "kind": finding.kind,
        "message": finding.message,
        "key": finding.key,
        "value": finding.value if math.isfinite(finding.value) else None,
        "limit": finding.limit if math.isfinite(finding.limit) else None,
        "action": action,
        "advice": finding.advice,
        **extra,
    }
    JsonlFile(folder / HEALTH_FILE).append(row)


def read_rollbacks(folder: Path) -> list[Row]:
    """Return the lines of health.jsonl by which a run went back, oldest first.

    Raises:
        UsageError: a line does not say to which step.
    """
    rows = [row for row in read_jsonl(folder / HEALTH_FILE) if row.get("action") == ACTION_ROLLBACK]
    if not all(isinstance(row.get("to_step"), int) for row in rows):
        raise UsageError(
            f"{folder / HEALTH_FILE}: a rollback whose to_step is no whole number. Correct or delete that line"
        )
    return rows


def drop_findings_after(folder: Path, step: int) -> None:
    """Drop the findings of steps that come again. Lines that say that the run went back or gave up stay."""

    def is_retained(row: Row) -> bool:
        if row.get("action") in (ACTION_ROLLBACK, ACTION_EXHAUSTED):
            return True
        finding_step = row.get("step")
        return not is_number(finding_step) or finding_step <= step

    JsonlFile(folder / HEALTH_FILE).filter(is_retained)
