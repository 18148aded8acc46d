"""Kill random ranks of steps of a real Slurm, under every strategy, and see what is left.

`python -m benchmarks.resilience.srun_kills --kills 100 [--jobs 2] [--seed 0] [--strategies sync,gossip] [--json F]`.
Needs root and the packages slurm-wlm and munge; the cluster is started on this machine (tests/slurm_cluster.py).

A tiny run is started by srun. Once it trains, a random one of its ranks gets SIGKILL, at a random step or as soon as a
checkpoint is being written, in turn. Measured are the seconds until all processes of the step have ended, or, under
strategies that survive, until the next line of stats. Then every checkpoint must be readable, and none half there. The
same command is started again, and killed again, until KILLS_PER_RUN ranks were killed; then it must end well, and under
lockstep strategies with the bytes of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from paragan.comm.checkpoint_files import read_files
from paragan.comm.checkpoint_metadata import CorruptCheckpoint, list_checkpoints, read_metadata

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from processes import TINY_RUN_ARGS
from slurm_cluster import SlurmCluster, missing_program, start_cluster

TIMEOUT_S = 60.0  # of the runs: no rank may wait longer for a lost one
START_TIMEOUT_S = 300.0
KILLS_PER_RUN = 3
KILL_STEPS = 60  # a rank is killed within so many lines of stats after the start
RUN_ARGS = ("--kimg=4.8", "--output.checkpoint_kimg=0.08", f"--timeout_s={TIMEOUT_S:g}")
COLUMNS = ("strategy", "rank", "moment", "line", "seconds", "outcome", "checkpoints", "same bytes")


@dataclass(frozen=True)
class Case:
    """A strategy, with what is expected of it.

    ranks     : of the step
    survives  : whether the others train on without a killed rank
    same_bytes: whether the model must be that of an undisturbed run
    """

    arguments: tuple[str, ...]
    ranks: int = 2
    survives: bool = False
    same_bytes: bool = True


CASES = {
    "sync": Case(()),
    "sync-int8": Case(("--strategy.wire=int8",)),
    "sync-period4": Case(("--strategy.sync_period=4",)),
    "quantized": Case(("--strategy=quantized",)),
    "DQGAN": Case(("--strategy=DQGAN",)),
    "CPOAdam-GQ": Case(("--strategy=CPOAdam-GQ",)),
    "async": Case(("--strategy=async",), same_bytes=False),
    "async-teams": Case(("--strategy=async", "--strategy.split=2:2", "--lanes=4"), 4, same_bytes=False),
    "gossip": Case(("--strategy=gossip", "--lanes=4"), 4, survives=True, same_bytes=False),
    "DPOSG": Case(("--strategy=DPOSG", "--lanes=4"), 4, survives=True, same_bytes=False),
    "async-gossip": Case(("--strategy=async-gossip", "--lanes=4"), 4, survives=True, same_bytes=False),
    "per-label": Case(("--strategy=per-label",), survives=True),
}


def train_arguments(case: Case, run_dir: Path) -> list[str]:
    """Return the arguments of `paragan` for a run of this case."""
    return ["train", *TINY_RUN_ARGS, *RUN_ARGS, *case.arguments, f"--run-dir={run_dir}"]


def count_lines(run_dir: Path) -> int:
    """Return the number of lines of stats, also of the runs of labels."""
    count = 0
    with contextlib.suppress(OSError):  # folders are renamed and removed meanwhile
        for path in run_dir.rglob("stats.jsonl"):
            count += path.read_bytes().count(b"\n")
    return count


def is_writing(run_dir: Path) -> bool:
    """Return whether a checkpoint is being written."""
    with contextlib.suppress(OSError):
        return any(True for _ in run_dir.rglob(".writing-*"))
    return True  # it was just renamed


def find_rank(run_dir: Path, rank: int) -> int | None:
    """Return the process of a rank of the step that trains this run; None if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            environment = (folder / "environ").read_text(errors="replace").split("\0")
            is_rank = f"SLURM_PROCID={rank}" in environment and "python" in words[0]
            if is_rank and f"--run-dir={run_dir}" in words and int(parent_of(folder)) != os.getpid():
                return int(folder.name)
    return None


def parent_of(folder: Path) -> str:
    """Return the id of the parent of the process of a folder of /proc."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[1]


def wait_for(condition: Callable[[], Any], step: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait until the condition is true. Returns False if the step ended, or the time is over, before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if step.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def broken_checkpoints(run_dir: Path) -> tuple[int, list[str]]:
    """Read all checkpoints of a run for all its ranks. Returns their number, and what is wrong with those that fail."""
    problems: list[str] = []
    paths = [path for folder in run_dir.rglob("checkpoints") for path in list_checkpoints(folder)]
    for path in paths:
        try:
            ranks = read_metadata(path)["ranks"]
            for rank in range(ranks):
                read_files(path, rank, ranks)
        except CorruptCheckpoint as error:
            problems.append(f"{path.name}: {error}")
    return len(paths), problems


def model_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the files of tensors of the model of a run, by path."""
    folder = run_dir / "model"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


class KillTrials:
    """Runs on a cluster, whose ranks are killed."""

    def __init__(self, cluster: SlurmCluster, folder: Path):
        self.cluster, self.folder = cluster, folder

    @contextlib.contextmanager
    def start_step(self, case: Case, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a step that trains a run. On exit it has ended."""
        command = ["srun", f"--ntasks={case.ranks}", "--kill-on-bad-exit=0", "paragan", *train_arguments(case, run_dir)]
        with (self.folder / f"{run_dir.name}.log").open("ab") as log:
            step = subprocess.Popen(command, env=self.cluster.env, stdout=log, stderr=log, cwd=self.folder)
        try:
            yield step
        finally:
            if step.poll() is None:
                step.send_signal(signal.SIGINT)
                step.send_signal(signal.SIGINT)  # srun ends the step at the second one
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(30)
                step.kill()
            step.wait()

    def finish(self, case: Case, run_dir: Path) -> str:
        """Start the same command until the run is complete. Returns what is wrong; empty if it completes."""
        with self.start_step(case, run_dir) as step:
            try:
                status = step.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return "does not end"
        return f"ended with status {status}" if status else ""

    def kill_one(self, case: Case, run_dir: Path, rng: random.Random, moment: str) -> dict[str, Any]:
        """Start a step, and kill one of its ranks. Returns what was killed and what happened."""
        rank = rng.randrange(case.ranks)
        before = count_lines(run_dir)
        target = before + rng.randint(1, KILL_STEPS)
        with self.start_step(case, run_dir) as step:
            is_training = wait_for(lambda: count_lines(run_dir) >= target, step, START_TIMEOUT_S)
            pid = find_rank(run_dir, rank) if is_training else None
            if pid and moment == "checkpoint":
                wait_for(lambda: is_writing(run_dir), step, TIMEOUT_S)
                time.sleep(rng.uniform(0, 0.005))
            line = count_lines(run_dir)
            row: dict[str, Any] = {"rank": rank, "moment": moment, "line": line}
            if pid is None or step.poll() is not None:
                return row | {"seconds": None, "outcome": "ended before the kill", "status": step.poll()}
            start = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if case.survives:
                at_kill = count_lines(run_dir)
                has_continued = wait_for(lambda: count_lines(run_dir) > at_kill + 1, step, 2 * TIMEOUT_S)
                row |= {"seconds": time.monotonic() - start, "outcome": "continued" if has_continued else "stopped"}
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(START_TIMEOUT_S)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(2 * TIMEOUT_S)
                outcome = "hangs" if step.poll() is None else "ended"
                row |= {"seconds": time.monotonic() - start, "outcome": outcome}
            return row | {"status": step.poll()}

    def run_case(
        self, name: str, number: int, kills: int, seed: int, reference: dict[str, bytes]
    ) -> list[dict[str, Any]]:
        """Kill so many ranks of one run, which is then completed. Returns a row for each kill."""
        case = CASES[name]
        rng = random.Random(f"{seed} {number}")
        run_dir = self.folder / f"{number:03d}-{name}"
        rows: list[dict[str, Any]] = []
        for kill in range(kills):
            row = {
                "strategy": name,
                "run": number,
                **self.kill_one(case, run_dir, rng, ("step", "checkpoint")[kill % 2]),
            }
            count, problems = broken_checkpoints(run_dir)
            rows.append(row | {"checkpoints": count, "broken": problems})
            if row["outcome"] != "ended":
                break  # a run that survives is complete
        problem = self.finish(case, run_dir)
        same_bytes = model_bytes(run_dir) == reference if case.same_bytes and not problem else None
        for row in rows:
            row |= {"run_problem": problem, "same_bytes": same_bytes}
        return rows

    def train_undisturbed(self, name: str) -> dict[str, bytes]:
        """Return the model of a run that nobody disturbs; nothing for a strategy that is not compared."""
        run_dir = self.folder / f"undisturbed-{name}"
        if CASES[name].same_bytes:
            problem = self.finish(CASES[name], run_dir)
            assert not problem, (name, problem, (self.folder / f"{run_dir.name}.log").read_text()[-2000:])
        return model_bytes(run_dir)


def plan_runs(kills: int, names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the runs, and how many ranks of each are killed."""
    runs: list[tuple[str, int]] = []
    while kills > 0:
        for name in names:
            count = min(kills, 1 if CASES[name].survives else KILLS_PER_RUN)
            if count > 0:
                runs.append((name, count))
            kills -= count
    return runs


def has_failed(row: dict[str, Any]) -> bool:
    """Return whether a kill had another consequence than it may have."""
    expected = "continued" if CASES[row["strategy"]].survives else "ended"
    is_late = row["seconds"] is not None and row["seconds"] > TIMEOUT_S
    is_wrong = row["outcome"] not in (expected, "ended before the kill")
    return bool(is_late or is_wrong or row["broken"] or row["run_problem"] or row["same_bytes"] is False)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the kills and what came of them."""
    kills = [row for row in rows if row["seconds"] is not None]
    return {
        "kills": len(kills),
        "failed": sum(map(has_failed, rows)),
        "slowest_s": max((row["seconds"] for row in kills), default=None),
        "broken_checkpoints": sum(len(row["broken"]) for row in rows),
        "checkpoints_read": sum(row["checkpoints"] for row in rows),
        "same_bytes": sum(row["same_bytes"] is True for row in kills),
        "other_bytes": sum(row["same_bytes"] is False for row in kills),
    }


def run_trials(kills: int, names: Sequence[str], jobs: int, seed: int, json_path: str | None) -> list[dict[str, Any]]:
    """Start a cluster, kill so many ranks, and return a row for each."""
    machine = describe_machine()
    print(format_machine(machine))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slurm").mkdir()
        (Path(folder) / "runs").mkdir()
        with start_cluster(Path(folder) / "slurm") as cluster, ThreadPoolExecutor(jobs) as pool:
            cluster.env["PATH"] = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
            cluster.env["MASTER_ADDR"] = "127.0.0.1"
            trials = KillTrials(cluster, Path(folder) / "runs")
            runs = plan_runs(kills, names)
            used = list(dict.fromkeys(name for name, _ in runs))
            references = dict(zip(used, pool.map(trials.train_undisturbed, used)))
            pending = [
                pool.submit(trials.run_case, name, number, count, seed, references[name])
                for number, (name, count) in enumerate(runs)
            ]
            for future in pending:
                error = future.exception()
                if error:
                    traceback.print_exception(error)
                    continue
                for row in future.result():
                    rows.append(row)
                    print(format_row(row), "FAILED" if has_failed(row) else "", flush=True)
                save_json(
                    json_path, {"machine": machine, "timeout_s": TIMEOUT_S, "summary": summarise(rows), "rows": rows}
                )
    return rows


def format_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row under COLUMNS."""
    seconds = "-" if row["seconds"] is None else f"{row['seconds']:.2f}"
    checkpoints = f"{row['checkpoints']} read, {len(row['broken'])} broken"
    facts = (row["strategy"], row["rank"], row["moment"], row["line"], seconds)
    return (*map(str, facts), row["outcome"], checkpoints, str(row["same_bytes"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", default=",".join(CASES), help="some of " + ", ".join(CASES))
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    if missing_program():
        raise SystemExit(missing_program())
    rows = run_trials(options.kills, options.strategies.split(","), options.jobs, options.seed, options.json)
    print(format_table(COLUMNS, [format_row(row) for row in rows]))
    print(summarise(rows))
    raise SystemExit(any(map(has_failed, rows)))


if __name__ == "__main__":
    main()
