"""Kill a part of a run under each engine, and measure the seconds until it trains again.

    python -m benchmarks.resilience.engines [--only slurm,ray] [--json benchmarks/results/engines.json]

Every trial starts a tiny run of two ranks (or of three labels) under the real engine on this machine, waits until it
trains, kills a part of it, and waits for the next line of statistics of the run that goes on: at once, or after the
same command was started again where the engine does not do that. At the end, the model must have the bytes of a run
that nobody disturbed. Needs the extras ray and dask, and the packages slurm-wlm, munge and openmpi-bin.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from paragan.core.jsonl import read_jsonl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import example_runs
import servers
from processes import TINY_RUN_ARGS, free_port
from slurm_cluster import start_cluster

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("train", *TINY_RUN_ARGS, "--kimg=4.8", "--output.checkpoint_kimg=0.16", "--evaluation.metrics=[]")
PARAGAN = (sys.executable, "-m", "paragan")
KILL_STEP = 60
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    seconds    : from the kill until the run trained again
    same_bytes : whether the model is that of an undisturbed run; None where that is not to be expected
    """

    killed: str
    happened: str
    seconds: float
    same_bytes: bool | None


def last_step(run_dir: Path) -> int:
    """Return the newest step in the statistics of a run; 0 if there are none."""
    with contextlib.suppress(Exception):  # the last line may be in the making
        return int(max((row["Progress/step"] for row in read_jsonl(run_dir / "stats.jsonl")), default=0))
    return 0


def await_step(run_dir: Path, step: int) -> None:
    """Wait until a run has trained beyond a step."""
    deadline = time.monotonic() + TIMEOUT_S
    while last_step(run_dir) <= step:
        if time.monotonic() > deadline:
            raise SystemExit(f"{run_dir} does not train")
        time.sleep(0.02)


def measure_restart(run_dir: Path, kill: Callable[[], object]) -> float:
    """Kill a part of a run that is started again by its engine. Returns the seconds until the run trains again."""
    begin = time.monotonic()
    kill()
    await_step(run_dir, last_step(run_dir) + 1)
    return time.monotonic() - begin


def kill_owner(run_dir: Path) -> None:
    """Kill the process that writes a run folder."""
    os.kill(owner_of(run_dir), signal.SIGKILL)


def owner_of(run_dir: Path) -> int:
    """Return the process that writes a run folder."""
    return int(re.findall(r"process (\d+) on", (run_dir / ".lock").read_text())[0])


def processes_with(*words: str) -> list[int]:
    """Return the processes of Python whose environment or command line has all these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text(errors="replace").split("\0")
            texts = {*command, *(folder / "environ").read_text(errors="replace").split("\0")}
            if "python" in command[0] and set(words) <= texts:
                found.append(int(folder.name))
    return found


def model_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the tensors of a model, by file."""
    return {path.name: path.read_bytes() for path in (run_dir / "model").rglob("*.safetensors")}


def undisturbed(folder: Path) -> dict[str, bytes]:
    """Return the model of two ranks that nobody disturbs; trained once."""
    run_dir = folder / "undisturbed"
    if not (run_dir / "report.html").exists():
        subprocess.run([*PARAGAN, *TRAIN, "--ranks=2", f"--run-dir={run_dir}"], check=True, capture_output=True)
    return model_bytes(run_dir)


def run_again(folder: Path, command: Sequence[str], killed: Callable[[Path], str], happened: str) -> Outcome:
    """Start a command, kill a part, wait until it has ended, and start it again."""
    run_dir = folder / "run"
    command = [*command, f"--run-dir={run_dir}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        await_step(run_dir, KILL_STEP)
        begin = time.monotonic()
        what = killed(run_dir)
        first.wait(TIMEOUT_S)
    step = last_step(run_dir)
    ended_s = time.monotonic() - begin
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
        await_step(run_dir, step)
        seconds = time.monotonic() - begin
        status = second.wait(TIMEOUT_S)
    same = model_bytes(run_dir) == undisturbed(folder.parent) and status == 0
    return Outcome(what, f"{happened} after {ended_s:.1f} s; the same command resumed", seconds, same)


def kill_rank_1(run_dir: Path) -> str:
    """Kill rank 1 of a launcher."""
    ranks = processes_with("RANK=1", f"--run-dir={run_dir}") or processes_with(
        "OMPI_COMM_WORLD_RANK=1", f"--run-dir={run_dir}"
    )
    os.kill(ranks[0], signal.SIGKILL)
    return "rank 1"


# Engines --------------------------------------------------------------------------------------------------


def ranks_option(folder: Path) -> Outcome:
    return run_again(folder, [*PARAGAN, *TRAIN, "--ranks=2"], kill_rank_1, "all ranks ended")


def torchrun(folder: Path) -> Outcome:
    run_dir = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += [f"--master-port={free_port()}", "-m", "paragan", *TRAIN, f"--run-dir={run_dir}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        await_step(run_dir, KILL_STEP)
        seconds = measure_restart(run_dir, lambda: kill_rank_1(run_dir))
        status = process.wait(TIMEOUT_S)
    same = model_bytes(run_dir) == undisturbed(folder.parent) and status == 0
    return Outcome("rank 1", "--max-restarts=1: all ranks were started again and resumed", seconds, same)


def open_mpi(folder: Path) -> Outcome:
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
    return run_again(folder, [*mpirun, *PARAGAN, *TRAIN], kill_rank_1, "mpirun ended all ranks")


def slurm_requeue(folder: Path) -> Outcome:
    (folder / "slurm").mkdir()
    with start_cluster(folder / "slurm") as cluster:
        cluster.env |= {"PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}", "MASTER_ADDR": "127.0.0.1"}
        script = ROOT / "examples" / "slurm" / "sync.sh"
        arguments = [*TRAIN[1:], f"--run-dir={folder / 'run'}"]
        job = cluster.submit("--nodes=2", "--ntasks-per-node=1", script, *arguments)
        await_step(folder / "run", KILL_STEP)
        begin = time.monotonic()
        cluster.run("scancel", "--signal=USR1", job)
        cluster.wait(job, "PENDING")
        requeued_s = time.monotonic() - begin
        step = last_step(folder / "run")
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        await_step(folder / "run", step)
        seconds = time.monotonic() - begin
        restarts = cluster.wait(job, "COMPLETED", "FAILED")["Restarts"]
    same = model_bytes(folder / "run") == undisturbed(folder.parent) and restarts == "1"
    happened = f"checkpoint, status 3, requeued after {requeued_s:.1f} s (Restarts=1); started at once by scontrol"
    return Outcome("the job, by USR1", happened, seconds, same)


def ray_ranks(folder: Path, *engine: str) -> Outcome:
    run_dir = folder / "run"
    arguments = ("--ranks=2", *engine, *TRAIN[1:], f"--run-dir={run_dir}")
    with example_runs.started(folder, "examples.ray.train", *arguments) as run:
        await_step(run_dir, KILL_STEP)
        seconds = measure_restart(run_dir, lambda: kill_owner(run_dir))
        status = run.wait()
    same = model_bytes(run_dir) == undisturbed(folder.parent) and status == 0
    return Outcome("rank 0", "both were started again and resumed", seconds, same)


def labels(folder: Path, module: str, *engine: str) -> Outcome:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 8, 8), np.uint8)
    np.savez(folder / "three.npz", images=images, labels=np.arange(60) % 3)
    fields = ["--data=three.npz", "--output.checkpoint_kimg=0.16", "--evaluation.metrics=[]", *TINY_RUN_ARGS]
    queue = [*PARAGAN, "train", *fields, "--strategy=per-label", "--run-dir=queue", "--kimg=4.8"]
    queue += ["--output.tick_kimg=0.048", "--output.checkpoint_kimg=0.48"]
    subprocess.run(queue, check=True, capture_output=True, cwd=folder)
    run_dir = folder / "labels" / "1"
    with example_runs.started(
        folder, module, *engine, "--labels=3", "--dir=labels", *fields[3:], *fields[:3], "--kimg=1.6"
    ) as run:
        await_step(run_dir, 40)
        seconds = measure_restart(run_dir, lambda: kill_owner(run_dir))
        status = run.wait()
    same = model_bytes(folder / "labels") == model_bytes(folder / "queue") and status == 0
    return Outcome("the process of label 1", "the task was repeated and resumed", seconds, same)


def object_store(folder: Path) -> Outcome:
    with servers.run_s3() as server:
        import boto3

        os.environ |= server.environment
        client: Any = boto3.client("s3", endpoint_url=server.url)
        client.create_bucket(Bucket="bucket")
        command = [*PARAGAN, *TRAIN, "--ranks=2", "--run-dir=s3://bucket/run"]

        def start(machine: str) -> subprocess.Popen[bytes]:
            env = os.environ | {"XDG_CACHE_HOME": str(folder / machine)}
            return subprocess.Popen(
                command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )

        def manifests() -> list[str]:
            found = client.list_objects_v2(Bucket="bucket", Prefix="run/checkpoints/").get("Contents", [])
            return [entry["Key"] for entry in found if entry["Key"].endswith("/checkpoint.json")]

        def copy_of(machine: str) -> Path:
            return next(iter((folder / machine / "paragan" / "runs").glob("s3-*")), folder / "none")

        first = start("first")
        while not manifests():
            time.sleep(0.05)
        begin = time.monotonic()
        os.killpg(first.pid, signal.SIGKILL)
        for pid in processes_with("--run-dir=s3://bucket/run"):
            os.kill(pid, signal.SIGKILL)
        first.wait()
        step = int(manifests()[-1].split("/")[2])
        second = start("second")
        while last_step(copy_of("second")) <= step:
            time.sleep(0.05)
        seconds = time.monotonic() - begin
        status = second.wait(TIMEOUT_S)
        same = model_bytes(copy_of("second")) == undisturbed(folder.parent) and status == 0
        client.close()
    return Outcome("the machine", "another one waited for the former owner (25 s) and resumed", seconds, same)


def slurm_version() -> str:
    return subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]


def mpi_version() -> str:
    return subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.split()[3]


TRIALS: dict[str, tuple[str, Callable[[], str], Callable[[Path], Outcome]]] = {
    "ranks": ("`--ranks 2`", lambda: version("torch"), ranks_option),
    "torchrun": ("torchrun", lambda: version("torch"), torchrun),
    "mpi": ("Open MPI", mpi_version, open_mpi),
    "slurm": ("Slurm, `sync.sh`", slurm_version, slurm_requeue),
    "ray": ("Ray, TorchTrainer", lambda: version("ray"), lambda f: ray_ranks(f, f"--storage={f}/storage")),
    "ray-actors": ("Ray, an actor per rank", lambda: version("ray"), lambda f: ray_ranks(f, "--actors")),
    "ray-labels": ("Ray, a task per label", lambda: version("ray"), lambda f: labels(f, "examples.ray.labels")),
    "dask-labels": (
        "Dask, a task per label",
        lambda: version("distributed"),
        lambda f: labels(f, "examples.dask.labels", "--workers=2"),
    ),
    "object-store": ("`--run-dir s3://`", lambda: f"moto {version('moto')}", object_store),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRIALS), help="some of " + ", ".join(TRIALS))
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only.split(","):
            engine, find_version, trial = TRIALS[name]
            folder = Path(temporary) / name
            folder.mkdir()
            outcome = trial(folder)
            rows.append({"engine": engine, "version": find_version(), **vars(outcome)})
            print(rows[-1], flush=True)
            save_json(options.json, {"machine": machine, "rows": rows})
    print(format_machine(machine))
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    raise SystemExit(any(row["same_bytes"] is False for row in rows))


if __name__ == "__main__":
    main()
