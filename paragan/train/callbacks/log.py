"""Write a line of stats every tick, and the list of files that could not be read.

Losses are sums on the device that are read once a tick. Then, and before every checkpoint, a run whose losses are not
finite is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paragan.core.atomic_write import name_full_disk
from paragan.core.errors import Diverged
from paragan.core.jsonl import JsonlFile, read_jsonl
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import Dataset
from paragan.nets.codebook import codebook_usage
from paragan.strategies import lag_trace
from paragan.train.averaged_model import consensus_distance, consensus_terms
from paragan.train.console import RunConsole
from paragan.train.health.monitor import HealthMonitor, drop_findings_after
from paragan.train.loggers.logger import Logger
from paragan.train.session import Session, has_crossed_kimg


def check_finite(losses: Mapping[str, float], advice: str) -> None:
    """Raise Diverged, with advice, if a loss (`Loss/...`) is not finite."""
    for name, value in losses.items():
        if name.startswith("Loss/") and not math.isfinite(value):
            raise Diverged(f"{name} is {value}: the game diverged; {advice}", same_on_all_ranks=True)


def drop_lines_after(folder: Path, step: int, kimg: float) -> None:
    """Drop the lines of later rounds from the files of a run folder: those rounds come again."""
    JsonlFile(folder / "stats.jsonl").truncate_after(step)
    JsonlFile(folder / lag_trace.LAGS_FILE).truncate_after(step)
    JsonlFile(folder / "metrics.jsonl").truncate_after(kimg, key="kimg")
    drop_findings_after(folder, step)


@dataclass
class LogCallback:
    """Writes a line of stats every tick, the first after the first round. Stops a run whose losses are not finite.

    latest_checkpoint_message : returns the checkpoint that the run can be resumed from, for messages
    """

    folder: Path
    console: RunConsole
    latest_checkpoint_message: Callable[[], str]
    health_monitor: HealthMonitor
    logger: Logger = field(default_factory=Logger)
    stats_file: JsonlFile = field(init=False)
    _last_step: int = -1

    def __post_init__(self) -> None:
        self.stats_file = JsonlFile(self.folder / "stats.jsonl")

    def __call__(self, session: Session) -> None:
        if session.clock.step == 1 or has_crossed_kimg(session, session.run.output.tick_kimg) or session.clock.is_done:
            self.write(session)

    def write(self, session: Session) -> None:
        """End the tick, unless it ended at this step before. All ranks call this."""
        if self._last_step == session.clock.step:
            return
        self._last_step = session.clock.step
        consensus: dict[str, Tensor] = {}
        health: dict[str, Tensor] = {}
        codebooks: dict[str, Tensor] = {}

        def measure() -> dict[str, Tensor]:
            consensus.update(consensus_terms(session))
            health.update(self.health_monitor.measure_signals(session))
            if not session.role.is_split:  # else rank 0 may have no G
                codebooks.update(codebook_usage(session.game.g.net))
            return consensus | health | codebooks

        host = session.stats.read_device(measure)
        line = session.stats.tick(session.clock.images, session.clock.step)
        line |= consensus_distance(session, host)
        line |= self.health_monitor.reduce_signals(session, {name: host[name] for name in health})
        line |= {name: float(host[name]) for name in codebooks}
        if session.world.is_main:
            decisions = session.lanes.pop_decisions()
            self.stats_file.append(line | ({"Data/decisions": decisions} if decisions else {}))
            if session.role.is_split:
                lag_trace.append_lags(self.folder, session.clock.step, session.stats.lags)
            self.console.show_stats(line)
            self.logger.on_tick(line, session.clock.images)
        self.health_monitor(session, line)
        self.check_finite(line)

    def find_last_step(self, session: Session) -> bool:
        """Return whether the line of this step is written: rank 0 sees the file. All ranks call this."""
        step = session.clock.step
        rows = read_jsonl(self.stats_file.path) if session.world.is_main else []
        is_written = torch.tensor([float(bool(rows) and rows[-1].get("Progress/step") == step)])
        session.world.all_ranks.all_reduce_sum(is_written).wait()
        self._last_step = step if is_written[0] else -1
        return self._last_step == step

    def check_finite(self, losses: Mapping[str, float]) -> None:
        """Raise Diverged if a loss is not finite, and say which checkpoint the run can be resumed from."""
        advice = "Start a new run with lower --d.optimizer.lr and --g.optimizer.lr, or with --objective.r1"
        check_finite(losses, f"{self.latest_checkpoint_message()}. {advice}")


@dataclass
class BadFilesCallback:
    """Appends to bad_files.txt, at every tick, the images that this rank could not use, and why."""

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
        """Append the lines that another rank, or this run before it was stopped, has not written."""
        path = self.folder / "bad_files.txt"
        lines = bad.to_lines()
        written = set(path.read_text("utf-8").splitlines()) if path.exists() else set[str]()
        with name_full_disk(path), path.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines if line not in written).encode())
        self._num_listed = len(lines)
