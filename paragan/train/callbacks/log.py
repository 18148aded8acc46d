"""TODO: docstring of paragan/train/callbacks/log.py"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paragan.config import lag_trace
from paragan.core.errors import Diverged
from paragan.core.jsonl import Records
from paragan.data.bad_samples import Bad
from paragan.data.dataset import Images
from paragan.train.averaged_model import consensus
from paragan.train.console import Screen
from paragan.train.health.monitor import Watch
from paragan.train.session import Session, every


def refuse_nonfinite(losses: Mapping[str, float], advice: str) -> None:
    """Diverged where a loss is not finite."""
    for name, value in losses.items():
        if name.startswith("Loss/") and not math.isfinite(value):
            raise Diverged(f"{name} is {value}: the game diverged; {advice}", everywhere=True)


@dataclass
class Log:
    """A line of stats every tick, the first after the first round; stops the run where a loss is not finite."""

    folder: Path
    screen: Screen
    standing: Callable[[], str]  # for messages: which checkpoint stands
    watch: Watch
    stats: Records = field(init=False)
    _written: int = -1
    _board: Any = None

    def __post_init__(self) -> None:
        self.stats = Records(self.folder / "stats.jsonl")

    def __call__(self, session: Session) -> None:
        if session.clock.step == 1 or every(session, session.run.output.tick_kimg) or session.clock.done:
            self.write(session)

    def write(self, session: Session) -> None:
        """End the tick here (once a step)."""
        if self._written == session.clock.step:
            return
        self._written = session.clock.step
        line = session.stats.tick(session.clock.images, session.clock.step) | consensus(session)
        line |= self.watch.signs(session)
        if session.world.first:
            decisions = session.lanes.decisions()
            self.stats.append(line | ({"Data/decisions": decisions} if decisions else {}))
            if session.role.teams:
                lag_trace.record(self.folder, session.clock.step, session.stats.lags)
            self.screen.tick(line)
            for name, value in line.items():
                self.board.add_scalar(name, value, session.clock.images)
        self.watch(session, line)
        self.refuse_nonfinite(line)

    def refuse_nonfinite(self, losses: Mapping[str, float]) -> None:
        advice = f"{self.standing()}. Lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1"
        refuse_nonfinite(losses, advice)

    @property
    def board(self) -> Any:
        """TensorBoard's writer, made when first wanted: its import takes a second."""
        if self._board is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._board = SummaryWriter(str(self.folder))
        return self._board

    def close(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):  # of a full disk: stats.jsonl has it all
                self._board.close()


@dataclass
class BadFiles:
    """bad_files.txt: the images that this rank could not use, and why, as soon as a tick ends after they were met."""

    folder: Path
    images: Images
    _listed: int = 0

    def __call__(self, session: Session) -> None:
        bad = self.images.bad
        if bad is None or len(bad.reasons) == self._listed:
            return
        if session.clock.step <= 1 or every(session, session.run.output.tick_kimg) or session.clock.done:
            self.list(bad)

    def list(self, bad: Bad) -> None:
        """Add what is not there yet: another rank, or this run before it was stopped, may have met it."""
        path, lines = self.folder / "bad_files.txt", bad.lines()
        there = set(path.read_text("utf-8").splitlines()) if path.exists() else set()
        with path.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines if line not in there).encode())
        self._listed = len(lines)
