"""Examples that train under the scheduler of another library: started, killed in part, compared."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import paragan
from processes import TINY_RUN_ARGS, wait_for_step, wait_until

ROOT = Path(__file__).resolve().parent.parent
NUM_LABELS = 3
LABEL_FIELDS = ("--kimg=0.64", "--output.checkpoint_kimg=0.08", "--evaluation.metrics=[]")  # 40 steps, saved every 5


class ExampleRun:
    """An example that was started; its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self._process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Return the exit status."""
        return self._process.wait(280)

    def kill_owner(self, run_dir: Path, step: int = 20) -> int:
        """Kill the process that writes into a run folder, once the run is at this step. Returns its id."""
        wait_until(lambda: (run_dir / "stats.jsonl").exists() or self._process.poll() is not None, 200, "it trains")
        assert self._process.poll() is None, self.output
        wait_for_step(run_dir, step)
        (process_id,) = re.findall(r"process (\d+) on", (run_dir / ".lock").read_text())
        os.kill(int(process_id), signal.SIGKILL)
        return int(process_id)


@contextlib.contextmanager
def started(folder: Path, module: str, *arguments: str) -> Iterator[ExampleRun]:
    """Start an example in a folder, with a cluster of its own on this machine; kill it on exit if it still runs."""
    scratch = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # Ray puts sockets into it, whose paths must be short
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": "local",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's 15, workers starve beside other tests
        "DASK_TEMPORARY_DIRECTORY": scratch,
    }
    log = folder / "output.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=env
        )
    run = ExampleRun(process, log)
    try:
        yield run
    finally:
        process.kill()  # workers end with it
        process.wait()
        sys.stdout.write(run.output[-5000:])
        shutil.rmtree(scratch, ignore_errors=True)


def run_paragan(folder: Path, *arguments: str) -> None:
    """Run a command line to its end in a process of its own, as a user does."""
    subprocess.run([sys.executable, "-m", "paragan", *arguments], check=True, timeout=280, cwd=folder)


def model_files(folder: Path) -> dict[str, bytes]:
    """Return the files of the model in a folder, by their paths."""
    model = folder / "model"
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


def label_args(folder: Path) -> list[str]:
    """Write images of three labels into a folder. Returns the arguments of a short run of one of them."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 8, 8), np.uint8)
    np.savez(folder / "three.npz", images=images, labels=np.arange(60) % NUM_LABELS)
    return [*TINY_RUN_ARGS, "--data=three.npz", *LABEL_FIELDS]


def assert_killed_label_is_repeated(folder: Path, expected: dict[str, bytes], module: str, *engine: str) -> None:
    """Train labels by an example, kill the process of one of them, and compare the pooled model."""
    with started(folder, module, *engine, f"--labels={NUM_LABELS}", "--dir=labels", *label_args(folder)) as run:
        run.kill_owner(folder / "labels" / "1")
        assert run.wait() == 0
        assert "resumed from labels/1/checkpoints/" in run.output
    assert model_files(folder / "labels") == expected
    assert paragan.load(folder / "labels").sample(6).shape == (6, 8, 8, 1)
