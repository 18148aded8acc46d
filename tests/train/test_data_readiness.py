"""Several ranks on data far away: they stop, fail, die and go on as on data that are here."""

from __future__ import annotations

import functools
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from processes import (
    LONG_RUN_ARG,
    TINY_RUN_ARGS,
    CliProcesses,
    final_tensors,
    list_checkpoints,
    logged_steps,
    run_cli,
    wait_for_step,
    wait_until,
)
from servers import FaultyServer, respond_status, run_faulty, stall

pytestmark = [pytest.mark.kill]

REMOTE_ARGS = (
    "--data.cache=stream",
    "--data.remote.cache_dir=",
    "--data.prefetch.batches=2",
    "--data.remote.timeout_s=60",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """An epoch ends inside a batch of 16."""
    folder, rng = tmp_path_factory.mktemp("far"), np.random.default_rng(0)
    np.savez(folder / "set.npz", images=rng.integers(0, 256, (70, 8, 8, 1), np.uint8), labels=np.arange(70) % 2)
    assert run_cli("data", "convert", folder / "set.npz", folder / "set.zip").status == 0
    return folder / "set.zip"


@pytest.fixture
def server(images) -> Iterator[FaultyServer]:
    with run_faulty() as server:
        server.files["/set.zip"] = images.read_bytes()
        yield server


def command(folder: Path, data: Path | str, *more: str) -> list[str]:
    return [
        "train",
        "folder",
        *TINY_RUN_ARGS[1:],
        LONG_RUN_ARG,
        f"--run-dir={folder}",
        f"--data={data}",
        *REMOTE_ARGS,
        *more,
    ]


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory) -> Iterator[Path]:
    """A run of two ranks on local images."""
    processes = CliProcesses(tmp_path_factory.mktemp("uninterrupted"))
    folder = processes.folder / "run"
    assert [rank.wait() for rank in processes.start_ranks(2, *command(folder, images))] == [0, 0]
    yield folder
    processes.close()


def assert_resumes_exactly(server: FaultyServer, processes: CliProcesses, folder: Path, uninterrupted: Path) -> None:
    """The same command resumes, and ends where the uninterrupted run ended."""
    server.responses = []
    resumed = processes.start_ranks(2, *command(folder, f"{server.url}/set.zip"))
    assert [rank.wait() for rank in resumed] == [0, 0], resumed[0].err
    assert final_tensors(folder) == final_tensors(uninterrupted)
    assert logged_steps(folder) == logged_steps(uninterrupted)


def last_saved_step(folder: Path) -> int:
    return int(list_checkpoints(folder)[-1].name)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [0, 1])
def test_a_stop_does_not_wait_for_stalled_data(merge, server, uninterrupted, processes, tmp_path):
    folder = tmp_path / "run"
    ranks = processes.start_ranks(2, *command(folder, f"{server.url}/set.zip", f"--device.lanes_per_pass={merge}"))
    wait_for_step(folder, 5)
    server.responses = [stall]
    time.sleep(1)
    ranks[1].send_signal(signal.SIGTERM)
    assert [rank.wait(25) for rank in ranks] == [3, 3], ranks[0].err
    assert "SIGTERM on rank 1: stopped at" in ranks[0].err
    assert last_saved_step(folder) == logged_steps(folder)[-1] >= 5
    if not merge:  # lane by lane is rounded otherwise
        assert_resumes_exactly(server, processes, folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--d_steps=3", "--strategy=gossip"])
def test_within_a_round_a_stop_ends_at_the_last_checkpoint(more, server, processes, tmp_path):
    folder, patch = tmp_path / "run", "import paragan.train.loop\nparagan.train.loop.STOP_DATA_TIMEOUT_S = 0.5"
    start = functools.partial(processes.start_forked, patch=patch)
    ranks = processes.start_ranks(2, *command(folder, f"{server.url}/set.zip", more, "--kimg=6.4"), start=start)
    wait_for_step(folder, 5)
    server.responses = [stall]
    time.sleep(1)
    ranks[0].send_signal(signal.SIGTERM)
    assert [rank.wait(25) for rank in ranks] == [3, 3], [rank.err for rank in ranks]
    output = ranks[0].err + ranks[1].err  # rank 0 may print before it knows of the others
    assert re.search(r"SIGTERM( on rank 0)?: (stopped|rank 1 has ended)", output)


@pytest.mark.slow
def test_unreachable_data_leave_a_checkpoint(server, uninterrupted, processes, tmp_path):
    folder = tmp_path / "run"
    ranks = processes.start_ranks(2, *command(folder, f"{server.url}/set.zip", "--data.remote.retry_for_s=6"))
    wait_for_step(folder, 5)
    server.responses = [respond_status(503)]
    assert [rank.wait(60) for rank in ranks] == [1, 1]
    assert re.search(r"rank 0, step \d+: data: \S+/set.zip\S* cannot be reached: it answers 503", ranks[0].err)
    assert ranks[0].err.count("\n") == 1
    assert ranks[1].err == ""
    assert last_saved_step(folder) == logged_steps(folder)[-1] >= 5
    assert_resumes_exactly(server, processes, folder, uninterrupted)


@pytest.mark.parametrize("code", [503, 403])
def test_unreachable_data_of_one_rank_leave_a_checkpoint(code, server, tmp_path):
    """403: as of a signature that has expired."""
    folder = tmp_path / "run"
    arguments = command(folder, f"{server.url}/set.zip", "--data.remote.retry_for_s=6")

    def break_down() -> None:
        wait_for_step(folder, 3)
        server.responses = [respond_status(code)]

    thread = threading.Thread(target=break_down)
    thread.start()
    ended = run_cli(*arguments)
    thread.join()
    assert ended.status == 1, ended
    assert f"it answers {code}" in ended.err
    assert ended.err.count("\n") == 1
    assert last_saved_step(folder) == logged_steps(folder)[-1] >= 3


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_the_command_resumes(server, uninterrupted, processes, tmp_path):
    folder = tmp_path / "run"
    ranks = processes.start_ranks(2, *command(folder, f"{server.url}/set.zip", "--output.checkpoint_kimg=0.32"))
    wait_until(lambda: list_checkpoints(folder), description="a checkpoint")
    wait_for_step(folder, 25)
    ranks[1].send_signal(signal.SIGKILL)
    assert ranks[0].wait(30) == 1
    assert re.search(r"rank 1 was lost at step \d+ \(killed", ranks[0].err)
    assert 0 < last_saved_step(folder) < 100
    assert_resumes_exactly(server, processes, folder, uninterrupted)
