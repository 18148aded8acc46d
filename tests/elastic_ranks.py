"""The ranks of a run that goes on without those that it loses, each a process that tests kill, freeze and restart."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from processes import LAUNCH_VARIABLES, free_port, list_checkpoints, logged_steps, train_args, wait_until

PACED_ROUNDS = "import elastic_ranks; elastic_ranks.pace_rounds(0.1);"  # a patch of RankProcesses


def pace_rounds(pause_s: float) -> None:
    """Pause before every round of this process: ranks that wait for others need not take their processors meanwhile."""
    from paragan.train import loop

    original = loop.play_round

    def play_round(session: Any) -> None:
        time.sleep(pause_s)
        original(session)

    loop.play_round = play_round


class RankProcesses:
    """Starts ranks one by one, as on several hosts, and can restart them."""

    def __init__(self, run: Path, processes: Any, *more: str, size: int = 4, patch: str = ""):
        self.run, self.processes, self.size, self.patch = run, processes, size, patch
        self.command = train_args(run, *more)
        self.port = str(free_port())
        self.started = [self.start(rank) for rank in range(size)]

    def start(self, rank: int, *more: str) -> Any:
        values = str(rank), str(self.size), str(rank), str(self.size), "127.0.0.1", self.port
        env = dict(zip(LAUNCH_VARIABLES, values, strict=True))
        return self.processes.start_forked(*self.command, *more, patch=self.patch, **env)

    def restart(self, rank: int) -> None:
        self.started[rank] = self.start(rank)

    def send_signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self.started[rank].send_signal(number)

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of members.jsonl."""
        path = self.run / "members.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def members(self) -> list[int]:
        events = self.events()
        return events[-1]["members"] if events else list(range(self.size))

    def num_returns(self, rank: int) -> int:
        """Count how often a rank came back."""
        return sum(rank in row["joined"] for row in self.events())

    def wait_for_event(self, condition: Any, timeout_s: float = 60) -> dict[str, Any]:
        """Wait for the first event for which the condition holds, and return it."""
        return wait_until(
            lambda: next(filter(condition, self.events()), None), timeout_s, f"the event is logged ({self.events()})"
        )

    def stop(self, *ranks: int) -> int:
        """Stop these ranks, all that are members, by a signal to the first. Returns the step of their checkpoint."""
        self.send_signal(signal.SIGTERM, ranks[0])
        statuses = [self.started[rank].wait(120) for rank in ranks]
        assert statuses == [3] * len(ranks), [self.started[rank].err for rank in ranks]
        return int(list_checkpoints(self.run)[-1].name)

    def assert_finished(self, *ranks: int, last_step: int) -> None:
        """Wait for these ranks to end, and check that the run is complete."""
        statuses = [self.started[rank].wait(120) for rank in ranks]
        assert statuses == [0] * len(ranks), [self.started[rank].err for rank in ranks]
        assert logged_steps(self.run)[-1] == last_step
        assert list_checkpoints(self.run)[-1].name == f"{last_step:08d}"
        assert (self.run / "metrics.jsonl").read_text().count("\n") == 1
        assert (self.run / "report.html").exists()


def longest_pause(run: Path, timeout_s: float, last_step: int) -> float:
    """Return the longest time without a new step, in seconds, among the next `timeout_s` or until `last_step`."""
    last_change = time.monotonic()
    end = last_change + timeout_s
    former_step = logged_steps(run)[-1]
    longest = 0.0
    while time.monotonic() < end:
        step = logged_steps(run)[-1]
        if step != former_step:
            longest = max(longest, time.monotonic() - last_change)
            last_change = time.monotonic()
            former_step = step
        time.sleep(0.01)
    return max(longest, time.monotonic() - last_change) if former_step < last_step else longest
