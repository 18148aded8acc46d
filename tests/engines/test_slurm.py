"""Jobs of a real Slurm: the scripts of examples/slurm, requeued, killed, and beside each other."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paragan.core.jsonl import read_jsonl
from processes import LONG_RUN_ARG, TINY_RUN_ARGS, checkpoint_tensors, final_tensors, train_args, wait_until
from slurm_cluster import SlurmCluster, missing_program, start_cluster

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"
REQUIRED = os.environ.get("PARAGAN_ENGINES") == "required"

pytestmark = [
    pytest.mark.skipif(bool(missing_program()) and not REQUIRED, reason=missing_program()),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with start_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.env["PATH"] = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
        cluster.env["MASTER_ADDR"] = "127.0.0.1"
        yield cluster


def train_command(folder: Path, *more: str) -> list[str]:
    """Return the arguments of the scripts for a tiny run that is long enough to be interrupted."""
    return [*TINY_RUN_ARGS, LONG_RUN_ARG, f"--run-dir={folder}", *more]


def wait_for_step(cluster: SlurmCluster, job: str, run_dir: Path, step: int, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(row.get("Progress/step", 0) >= step for row in read_jsonl(run_dir / "stats.jsonl")):
        assert time.monotonic() < deadline, cluster.output_of(job)
        time.sleep(0.1)


def rank_pids(job: str, rank: int, program: str) -> list[int]:
    """Return the processes of a rank of a job that run a program."""
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = set((folder / "environ").read_text(errors="replace").split("\0"))
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if wanted <= environment and program in words[0] and "digits" in words:
            found.append(int(folder.name))
    return found


def test_a_stopped_job_is_requeued_and_ends_with_the_bytes_of_one_that_was_not(cluster, run_by_two, tmp_path):
    run_dir = tmp_path / "run"
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", SCRIPTS / "sync.sh", *train_command(run_dir))
    wait_for_step(cluster, job, run_dir, 5)
    cluster.run("scancel", "--signal=USR1", job)  # as Slurm does before the end of the time
    assert cluster.wait(job, "PENDING")["Restarts"] == "1"
    assert list((run_dir / "checkpoints").iterdir())
    # Not within the second of the end: slurmd takes a start of that second for one of the job that it has killed.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    fields = cluster.wait(job, "COMPLETED", "FAILED")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), cluster.output_of(job)
    assert final_tensors(run_dir) == final_tensors(run_by_two)


@pytest.mark.slow
def test_two_steps_of_a_job_have_nothing_to_do_with_each_other(cluster, processes, tmp_path):
    lines = ["#!/bin/bash"]
    for number in range(2):
        arguments = train_args(tmp_path / f"run{number}", f"--seed={number}", "--kimg=0.08")
        lines.append(f"srun --exact --ntasks=2 paragan {' '.join(arguments)} & steps+=($!)")
    script = tmp_path / "job.sh"
    script.write_text("\n".join([*lines, "wait ${steps[0]} && wait ${steps[1]}"]))
    job = cluster.submit("--nodes=1", "--ntasks=4", script)
    assert cluster.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", cluster.output_of(job)
    for number in range(2):
        arguments = train_args(tmp_path / f"other{number}", f"--seed={number}", "--kimg=0.08")
        assert [rank.wait() for rank in processes.start_ranks(2, *arguments)] == [0, 0]
        assert checkpoint_tensors(tmp_path / f"run{number}") == checkpoint_tensors(tmp_path / f"other{number}")


def test_a_host_without_an_address_is_one_line(cluster, tmp_path):
    arguments = train_args(tmp_path / "run", "--timeout_s=12")
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nunset MASTER_ADDR\nsrun paragan {' '.join(arguments)}\n")
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", script)
    cluster.wait(job, "FAILED")
    lines = [line for line in cluster.output_of(job).splitlines() if "paragan" in line]
    for rank in range(2):
        assert any(f"rank {rank} of 2 waits for node0 (MASTER_ADDR) to resolve" in line for line in lines), lines
    errors = [line for line in lines if "its name does not resolve here" in line]
    assert len(errors) == 2
    assert "Set MASTER_ADDR" in errors[0]
    assert "Traceback" not in cluster.output_of(job)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("--strategy=sync", "--strategy.peer_timeout_s=5")], ids=["gossip", "sync"])
def test_ranks_continue_under_srun_without_one_and_take_it_back(settings, cluster, tmp_path):
    run_dir = tmp_path / "run"
    arguments = train_command(run_dir, "--lanes=4", "--kimg=6.4", *settings)
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", SCRIPTS / "gossip.sh", *arguments)
    wait_for_step(cluster, job, run_dir, 5)
    (pid,) = rank_pids(job, 2, "python")
    os.kill(pid, signal.SIGKILL)
    fields = cluster.wait(job, "COMPLETED", "FAILED", timeout_s=400)
    assert fields["JobState"] == "COMPLETED", cluster.output_of(job)
    ranks = [row["members"] for row in read_jsonl(run_dir / "members.jsonl")]
    assert [0, 1, 3] in ranks, ranks
    assert ranks[-1] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_stopped_gossip_job_is_requeued_though_a_task_was_killed(cluster, tmp_path):
    run_dir = tmp_path / "run"
    arguments = train_command(run_dir, "--lanes=4", "--kimg=64")
    script = SCRIPTS / "gossip.sh"
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", f"--chdir={tmp_path}", script, *arguments)
    wait_for_step(cluster, job, run_dir, 5)
    for program in ("bash", "python"):  # with its wrapper, which would start it again
        for pid in rank_pids(job, 2, program):
            os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: [0, 1, 3] in [row["members"] for row in read_jsonl(run_dir / "members.jsonl")], 200, "they go on"
    )
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait(job, "PENDING", "FAILED")["JobState"] == "PENDING", cluster.output_of(job)
    cluster.run("scancel", job)
    assert not list(tmp_path.glob("*stopped*"))


@pytest.mark.slow
def test_workers_of_an_array_train_the_labels(cluster, tmp_path):
    arguments = [*TINY_RUN_ARGS, "--kimg=0.32", f"--run-dir={tmp_path / 'run'}"]
    output = f"--output={cluster.folder}/%A_%a.out"
    job = cluster.submit("--array=0-1", output, SCRIPTS / "per_label.sh", *arguments)
    for task in range(2):
        fields = cluster.wait(f"{job}_{task}", "COMPLETED", "FAILED", timeout_s=300)
        assert fields["JobState"] == "COMPLETED", cluster.output_of(f"{job}_{task}")
    assert len(list((tmp_path / "run" / "model").glob("*/model.safetensors"))) == 10
