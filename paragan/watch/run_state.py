"""Read the state of a run: which process trains it, its speed, and the time left."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

from paragan.core.folder_lock import lock_owner
from paragan.core.jsonl import is_number
from paragan.report.number_format import format_duration, format_number
from paragan.report.run_data import RunData
from paragan.train.per_label.lease_queue import LeaseQueue, is_process_gone

NUM_TICKS = 10  # whose median speed predicts the time left
MAX_REMAINING_S = 1e9


@dataclass(frozen=True)
class RunState:
    """The state of a run at a moment.

    word        : no ticks yet, training, stopped or finished
    owner       : the process that trains it, "process 4711 on gpu07"; "" if none does
    img_per_s   : images per second, of the last ticks; None if it is not trained
    remaining_s : seconds until its end; None if it is not trained, or has no end
    """

    word: str
    owner: str
    img_per_s: float | None
    remaining_s: float | None

    def to_line(self) -> str:
        """Describe the state: "training by process 4711 on gpu07, 812 images/s, 3 min 5 s left"."""
        parts = [f"{self.word} by {self.owner}" if self.owner else self.word]
        if self.img_per_s is not None:
            parts.append(f"{format_number(self.img_per_s)} images/s")
        if self.remaining_s is not None:
            parts.append(f"{format_duration(self.remaining_s)} left")
        return ", ".join(parts)


def read_state(run_data: RunData) -> RunState:
    """Return the state of a run whose files have been read."""
    owner = lock_owner(run_data.path) or _label_workers(run_data)
    if not owner:
        word = "stopped" if run_data.state == "unfinished" else run_data.state
        return RunState(word, "", None, None)
    seconds = [x for x in run_data.stats.column("Timing/sec_per_kimg")[1][-NUM_TICKS:] if 0 < x < math.inf]
    sec_per_kimg = statistics.median(seconds) if seconds else None
    remaining_s = None
    if sec_per_kimg is not None and run_data.total_kimg is not None:
        remaining_s = min(max(0.0, run_data.total_kimg - run_data.kimg) * sec_per_kimg, MAX_REMAINING_S)
    return RunState("training", owner, 1000 / sec_per_kimg if sec_per_kimg else None, remaining_s)


def _label_workers(run_data: RunData) -> str:
    """Return the workers that train labels of a per-label run; "" if none does."""
    lease_s = run_data.get_setting("strategy.lease_s")
    if not run_data.labels or not is_number(lease_s):
        return ""
    entries = LeaseQueue(run_data.path / "queue", float(lease_s)).entries().values()
    now = time.time()
    held = [entry for entry in entries if entry.state == "held" and now - entry.heartbeat_ns / 1e9 < lease_s]
    workers = sorted({entry.worker for entry in held if not is_process_gone(entry.metadata.get("process"))})
    return f"{len(workers)} workers" if len(workers) > 1 else "".join(workers)
