"""A rank of a gossip run is lost in the middle.

`python -m benchmarks.comm.rank_loss [--cases killed-0,frozen-2] [--json F]`.

Four ranks on this machine train `digits`, each a process of its own. At half time one is killed (SIGKILL), frozen
(SIGSTOP, and woken when the others have done without it), or cut off: each rank is a host of a laboratory (lab.py,
needs root), and the link of one goes down. It has no majority, so it stops with its checkpoint; the link comes back,
and it is started again. Asked: for how long nobody plays a step, whether the rank is back at the end, and whether the
result passes the digits acceptance.
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
from pathlib import Path
from typing import Any

from benchmarks.lib import netns_lab as lab
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.digits_acceptance import DIVERSITY, RECOGNISED, judge

RANKS, PEER_TIMEOUT_S = 4, 3.0
TRAIN_ARGS = (
    *("train", "digits", "--strategy=gossip", f"--strategy.peer_timeout_s={PEER_TIMEOUT_S}", "--evaluation.metrics=fd"),
    "--output.tick_kimg=0.128",  # a line of stats every step: pauses are seen there
)
HALF_KIMG = 80.0
COLUMNS = ("case", "pause s", "members at the end", "recognised", "diversity", "accepted")


class RunTeam:
    """The ranks of a run, which can be started again one by one."""

    def __init__(self, run: Path, hosts: bool):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.run, self.hosts = run, hosts
        self.ranks = [self.start(rank) for rank in range(RANKS)]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        if self.hosts:
            place |= {"MASTER_ADDR": lab.host_address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        where = ["ip", "netns", "exec", lab.host_namespace(rank)] if self.hosts else []
        env = os.environ | {name: str(value) for name, value in place.items()}
        command = [*where, sys.executable, "-m", "paragan", *TRAIN_ARGS, f"--run-dir={self.run}"]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)

    @property
    def kimg(self) -> float:
        """How far the run is."""
        path = self.run / "stats.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines[-2:] if line.endswith(b"\n")]
        return json.loads(whole[-1])["Progress/kimg"] if whole else 0.0

    def members(self) -> list[int]:
        path = self.run / "members.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows[-1]["members"] if rows else list(range(RANKS))

    def longest_pause(self, seconds: float) -> float:
        """The longest time without a step, while this looks."""
        end, last, seen, longest = time.monotonic() + seconds, time.monotonic(), self.kimg, 0.0
        while time.monotonic() < end:
            now = self.kimg
            if now != seen:
                longest, last, seen = max(longest, time.monotonic() - last), time.monotonic(), now
            time.sleep(0.01)
        return longest


def lose_rank(team: RunTeam, kind: str, victim: int) -> float:
    """Lose a rank, and get it back; the longest time without a step."""
    process = team.ranks[victim]
    if kind == "frozen":
        process.send_signal(signal.SIGSTOP)
        pause = team.longest_pause(5 * PEER_TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        return pause
    if kind == "killed":
        process.send_signal(signal.SIGKILL)
    else:
        lab.unplug(victim)
    pause = team.longest_pause(5 * PEER_TIMEOUT_S)
    process.wait()
    if kind == "cut":
        lab.replug(victim)
    team.ranks[victim] = team.start(victim)
    return pause


def measure_loss(kind: str, victim: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if kind == "cut":
            stack.enter_context(lab.run_network([lab.Link(0, 0)] * RANKS))
        team = RunTeam(Path(folder) / "run", hosts=kind == "cut")
        while team.kimg < HALF_KIMG:
            time.sleep(0.05)
        pause = lose_rank(team, kind, victim)
        status = [rank.wait() for rank in team.ranks]
        if any(status):
            raise SystemExit(f"{kind}-{victim}: the ranks ended with {status}")
        found = judge(str(team.run))
        accepted = found["recognised"] >= RECOGNISED and found["diversity"] >= DIVERSITY
        return {"case": f"{kind}-{victim}", "pause_s": pause, "members": team.members(), **found, "accepted": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = "killed-0,killed-2,frozen-0,frozen-3"
    parser.add_argument("--cases", default=cases, help="killed-RANK, frozen-RANK, cut-RANK")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about = describe_machine()
    print(format_machine(about))
    rows: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        kind, _, victim = case.partition("-")
        rows.append(measure_loss(kind, int(victim)))
        print(rows[-1], flush=True)
        save_json(options.json, {"machine": about, "ranks": RANKS, "lost_after_s": PEER_TIMEOUT_S, "rows": rows})
    print(format_table(COLUMNS, [tuple(format_cell(value) for value in row.values()) for row in rows]))


def format_cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
