"""TODO: docstring of paragan/train/callbacks/log.py"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paragan.core.errors import Diverged
from paragan.core.jsonl import JsonlFile
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import Dataset
from paragan.strategies import lag_trace
from paragan.train.averaged_model import consensus_distance
from paragan.train.console import RunConsole
from paragan.train.health.monitor import HealthMonitor
from paragan.train.session import Session, has_crossed_kimg


def check_finite(losses: Mapping[str, float], advice: str) -> None:
    """Diverged where a loss is not finite."""
    for name, value in losses.items():
        if name.startswith("Loss/") and not math.isfinite(value):
            raise Diverged(f"{name} is {value}: the game diverged; {advice}", same_on_all_ranks=True)


@dataclass
class LogCallback:
    """A line of stats every tick, the first after the first round; stops the run where a loss is not finite."""

    folder: Path
    console: RunConsole
    latest_checkpoint_message: Callable[[], str]  # for messages: which checkpoint stands
    health_monitor: HealthMonitor
    stats_file: JsonlFile = field(init=False)
    _last_step: int = -1
    _tensorboard: Any = None

    def __post_init__(self) -> None:
        self.stats_file = JsonlFile(self.folder / "stats.jsonl")

    def __call__(self, session: Session) -> None:
        if session.clock.step == 1 or has_crossed_kimg(session, session.run.output.tick_kimg) or session.clock.is_done:
            self.write(session)

    def write(self, session: Session) -> None:
        """End the tick here (once a step)."""
        if self._last_step == session.clock.step:
            return
        self._last_step = session.clock.step
        line = session.stats.tick(session.clock.images, session.clock.step) | consensus_distance(session)
        line |= self.health_monitor.measure_signals(session)
        if session.world.is_main:
            decisions = session.lanes.pop_decisions()
            self.stats_file.append(line | ({"Data/decisions": decisions} if decisions else {}))
            if session.role.is_split:
                lag_trace.append_lags(self.folder, session.clock.step, session.stats.lags)
            self.console.show_stats(line)
            for name, value in line.items():
                self.tensorboard.add_scalar(name, value, session.clock.images)
        self.health_monitor(session, line)
        self.check_finite(line)

    def check_finite(self, losses: Mapping[str, float]) -> None:
        advice = (
            f"{self.latest_checkpoint_message()}. Lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1"
        )
        check_finite(losses, advice)

    @property
    def tensorboard(self) -> Any:
        """TensorBoard's writer, made when first wanted: its import takes a second."""
        if self._tensorboard is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.folder))
        return self._tensorboard

    def close(self) -> None:
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):  # of a full disk: stats.jsonl has it all
                self._tensorboard.close()


@dataclass
class BadFilesCallback:
    """bad_files.txt: the images that this rank could not use, and why, as soon as a tick ends after they were met."""

    folder: Path
    dataset: Dataset
    _num_listed: int = 0

    def __call__(self, session: Session) -> None:
        bad = self.dataset.bad_samples
        if bad is None or len(bad.reasons) == self._num_listed:
            return
        if session.clock.step <= 1 or has_crossed_kimg(session, session.run.output.tick_kimg) or session.clock.is_done:
            self.append_lines(bad)

    def append_lines(self, bad: BadSamples) -> None:
        """Add what is not there yet: another rank, or this run before it was stopped, may have met it."""
        path, lines = self.folder / "bad_files.txt", bad.to_lines()
        there = set(path.read_text("utf-8").splitlines()) if path.exists() else set()
        with path.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines if line not in there).encode())
        self._num_listed = len(lines)
