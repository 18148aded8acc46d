"""Ranks of a real mpirun (Open MPI)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from paragan.core.jsonl import read_jsonl
from processes import LONG_RUN_ARG, final_tensors, train_args

REQUIRED = os.environ.get("PARAGAN_ENGINES") == "required"
MPIRUN = ("mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
PARAGAN = (sys.executable, "-m", "paragan")

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("mpirun") and not REQUIRED, reason="there is no mpirun: apt-get install openmpi-bin"
    ),
    pytest.mark.timeout(600),
]


def test_the_ranks_of_mpirun_train_one_run_and_a_signal_stops_it(run_by_two, tmp_path):
    command = [*MPIRUN, *PARAGAN, *train_args(tmp_path / "mpi", LONG_RUN_ARG)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not any(row.get("Progress/step", 0) >= 5 for row in read_jsonl(tmp_path / "mpi" / "stats.jsonl")):
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    started.send_signal(signal.SIGUSR1)
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 3, output
    assert "\x1b" not in output  # cursor codes
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed
    assert resumed.stdout.count("done: ") == 1
    assert final_tensors(tmp_path / "mpi") == final_tensors(run_by_two)
