"""Measure the interruption when a rank is lost during training.

`python -m benchmarks.comm.rank_loss [--strategy gossip] [--cases killed-0,frozen-2] [--json F]`.

Four ranks on this machine train `digits`, each a process of its own. At half time one is

* killed (SIGKILL) and started again,
* frozen (SIGSTOP) and woken when the others have continued without it, or
* cut off: each rank is a host of a network lab (benchmarks/lib/netns_lab.py, needs root), and one link goes down.
  It has no majority, so it stops with its checkpoint; the link comes back, and it is started again.

Measured are the longest time without a step, whether the rank is a member at the end, and whether the result passes the
digits acceptance test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import netns_lab as lab
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.digits_acceptance import MIN_DIVERSITY, MIN_RECOGNISED, evaluate_run

RANKS = 4
PEER_TIMEOUT_S = 3.0
TRAIN_ARGS = (
    *("train", "digits", f"--strategy.peer_timeout_s={PEER_TIMEOUT_S}", "--evaluation.metrics=fd"),
    "--output.tick_kimg=0.128",  # a line of stats every step, to see pauses
)
STRATEGY_ARGS = {
    "sync": ["--strategy=sync"],
    "quantized": ["--strategy=quantized"],
    "local steps": ["--strategy=sync", "--strategy.sync_period=8"],
    "outer optimizer": [
        *("--strategy=sync", "--strategy.sync_period=8", "--strategy.outer=nesterov", "--strategy.outer.momentum=0.5")
    ],
    "gossip": ["--strategy=gossip"],
}
HALF_KIMG = 80.0
POLL_S = 0.05  # the resolution of pauses
TAIL_BYTES = 16_384  # of stats.jsonl, which have its last line
COLUMNS = ("case", "pause s", "members at the end", "recognised", "diversity", "accepted")


class RankProcesses:
    """The ranks of a run, which can be restarted one by one.

    run       : the run folder
    arguments : of `paragan train`, beside TRAIN_ARGS
    size      : the number of ranks
    use_hosts : whether each is on a host of a network lab
    """

    def __init__(self, run: Path, arguments: Sequence[str], size: int = RANKS, use_hosts: bool = False):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.run, self.arguments, self.size, self.use_hosts = run, arguments, size, use_hosts
        self._last_size = 0
        self._last_step_s = time.monotonic()
        self.processes = [self.start(rank) for rank in range(size)]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        launch_env = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.size}
        launch_env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        command = [sys.executable, "-m", "paragan", *TRAIN_ARGS, *self.arguments, f"--run-dir={self.run}"]
        if self.use_hosts:
            launch_env |= {"MASTER_ADDR": lab.host_address(0), "GLOO_SOCKET_IFNAME": "eth0"}
            command = ["ip", "netns", "exec", lab.host_namespace(rank), *command]
        env = os.environ | {name: str(value) for name, value in launch_env.items()}
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """Kill the ranks that have not ended."""
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def kimg(self) -> float:
        """Progress of the run in kimg."""
        try:
            with (self.run / "stats.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))  # polls of a long file would slow the ranks
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0.0
        complete = [line for line in lines[-2:] if line.endswith(b"\n")]
        return json.loads(complete[-1])["Progress/kimg"] if complete else 0.0

    def members(self) -> list[int]:
        path = self.run / "members.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows[-1]["members"] if rows else list(range(self.size))

    def longest_pause(self, seconds: float) -> float:
        """Return the longest time without a step, in seconds, among the next `seconds`.

        One that began before counts in whole, and so does one that has not ended, as far as it has lasted.
        """
        end = time.monotonic() + seconds
        longest = 0.0
        self._note_step()
        while time.monotonic() < end:
            time.sleep(POLL_S)
            longest = max(longest, time.monotonic() - self._last_step_s)
            self._note_step()
        return longest

    def _note_step(self) -> None:
        """Note when stats.jsonl has grown by the line of a step."""
        size = self._stats_bytes()
        if size != self._last_size:
            self._last_size = size
            self._last_step_s = time.monotonic()

    def _stats_bytes(self) -> int:
        """Return the size of stats.jsonl, which has a line for every step: polling it takes nothing from the ranks."""
        try:
            return (self.run / "stats.jsonl").stat().st_size
        except FileNotFoundError:
            return 0


def lose_rank(ranks: RankProcesses, kind: str, victim: int) -> float:
    """Lose a rank and get it back; return the longest time without a step, in seconds."""
    process = ranks.processes[victim]
    if kind == "frozen":
        process.send_signal(signal.SIGSTOP)
        pause_s = ranks.longest_pause(5 * PEER_TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        return pause_s
    if kind == "killed":
        process.send_signal(signal.SIGKILL)
    else:
        lab.unplug(victim)
    pause_s = ranks.longest_pause(5 * PEER_TIMEOUT_S)
    process.wait()
    if kind == "cut":
        lab.replug(victim)
    ranks.processes[victim] = ranks.start(victim)
    return pause_s


def measure_loss(strategy: str, kind: str, victim: int) -> dict[str, Any]:
    """Train one run in which a rank is lost; kind: killed, frozen or cut."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if kind == "cut":
            stack.enter_context(lab.run_network([lab.Link(0, 0)] * RANKS))
        ranks = RankProcesses(Path(folder) / "run", STRATEGY_ARGS[strategy], use_hosts=kind == "cut")
        while ranks.kimg < HALF_KIMG:
            time.sleep(0.05)
        pause_s = lose_rank(ranks, kind, victim)
        statuses = [process.wait() for process in ranks.processes]
        if any(statuses):
            raise SystemExit(f"{kind}-{victim}: the ranks ended with {statuses}")
        scores = evaluate_run(str(ranks.run))
        accepted = scores["recognised"] >= MIN_RECOGNISED and scores["diversity"] >= MIN_DIVERSITY
        return {
            "case": f"{kind}-{victim}",
            "pause_s": pause_s,
            "members": ranks.members(),
            **scores,
            "accepted": accepted,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = "killed-0,killed-2,frozen-0,frozen-3"
    parser.add_argument("--strategy", choices=STRATEGY_ARGS, default="gossip")
    parser.add_argument("--cases", default=cases, help="killed-RANK, frozen-RANK, cut-RANK")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    rows: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        kind, _, victim = case.partition("-")
        rows.append(measure_loss(options.strategy, kind, int(victim)))
        print(rows[-1], flush=True)
        settings = {"strategy": options.strategy, "ranks": RANKS, "peer_timeout_s": PEER_TIMEOUT_S}
        save_json(options.json, {"machine": machine, **settings, "rows": rows})
    print(format_table(COLUMNS, [tuple(format_cell(value) for value in row.values()) for row in rows]))


def format_cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
