"""Ranks of a real mpirun (Open MPI)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paragan.core.jsonl import read_jsonl
from processes import LONG_RUN_ARG, train_args

REQUIRED = os.environ.get("PARAGAN_ENGINES") == "required"
MPIRUN = ("mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
PARAGAN = (sys.executable, "-m", "paragan")

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("mpirun") and not REQUIRED, reason="there is no mpirun: apt-get install openmpi-bin"
    ),
    pytest.mark.timeout(600),
]


def model_bytes(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_the_ranks_of_mpirun_train_one_run_and_a_signal_stops_it(tmp_path):
    command = [*MPIRUN, *PARAGAN, *train_args(tmp_path / "mpi", LONG_RUN_ARG)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not any(row.get("Progress/step", 0) >= 5 for row in read_jsonl(tmp_path / "mpi" / "stats.jsonl")):
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    started.send_signal(signal.SIGUSR1)
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 3, output
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed
    assert resumed.stdout.count("done: ") == 1
    alone = [*PARAGAN, *train_args(tmp_path / "ranks", LONG_RUN_ARG, "--ranks=2")]
    subprocess.run(alone, check=True, capture_output=True, timeout=300)
    assert model_bytes(tmp_path / "mpi") == model_bytes(tmp_path / "ranks")
