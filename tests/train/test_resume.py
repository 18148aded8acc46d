"""A run that is stopped and started again is the run that nobody stopped: bit for bit, on any rank's signal."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from processes import (
    LONG_RUN_ARG,
    final_tensors,
    list_checkpoints,
    logged_steps,
    run_cli,
    train_args,
    train_interrupted,
    train_tiny,
    wait_for_step,
)

SHORT = "--kimg=0.16"  # as `finished`


def stop_lines(err: str) -> list[str]:
    """Return the lines of a run that stopped, without the one about a round that takes long."""
    return [line for line in err.splitlines() if "this round ends first" not in line]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_stopped_run_resumes_exactly(number, tmp_path, processes, uninterrupted):
    run = tmp_path / "run"
    process = processes.start_forked(*train_args(run, LONG_RUN_ARG))
    wait_for_step(run)
    process.send_signal(number)
    assert process.wait() == 3
    (line,) = stop_lines(process.err)
    assert line.startswith(f"paragan: {number.name}: stopped at ")
    (saved,) = list_checkpoints(run)
    assert logged_steps(run)[-1] == int(saved.name)
    assert run_cli(*train_args(run, LONG_RUN_ARG)).status == 0
    assert final_tensors(run) == final_tensors(uninterrupted)
    assert logged_steps(run) == logged_steps(uninterrupted)


def test_repeated_stops_resume_exactly(tmp_path, finished):
    run = tmp_path / "run"
    for step in (1, 2, 5, 8):
        train_interrupted(run, step, SHORT)
    assert run_cli(*train_args(run, SHORT)).status == 0
    assert final_tensors(run) == final_tensors(finished)
    assert logged_steps(run) == logged_steps(finished)


def test_a_stop_between_two_ticks_adds_no_line(tmp_path):
    ticks = (SHORT, "--output.tick_kimg=0.048")
    straight = train_tiny(tmp_path / "straight", *ticks)
    run = train_interrupted(tmp_path / "run", 4, *ticks)
    assert run_cli(*train_args(run, *ticks)).status == 0
    assert logged_steps(run) == logged_steps(straight) == [1, 3, 6, 9, 10]


def test_a_stop_in_the_first_round_is_resumable(tmp_path, finished):
    run = train_interrupted(tmp_path / "run", 0, SHORT)
    assert run_cli(*train_args(run, SHORT)).status == 0
    assert final_tensors(run) == final_tensors(finished)


def test_a_longer_run_continues_a_shorter_one_exactly(tmp_path, finished):
    run = train_tiny(tmp_path / "run", "--kimg=0.08")
    assert run_cli(*train_args(run, SHORT)).status == 0
    assert final_tensors(run) == final_tensors(finished)


def test_lines_written_after_the_checkpoint_are_dropped(tmp_path, finished):
    """As after a power cut: the newest checkpoint is older than the newest line."""
    run = train_tiny(tmp_path / "run", SHORT, "--output.checkpoint_kimg=0.08")
    shutil.rmtree(list_checkpoints(run)[-1])
    with (run / "stats.jsonl").open("a") as stats:
        stats.write('{"Progress/st')
    ended = run_cli(*train_args(run, SHORT))
    assert "resumed from" in ended.out
    assert logged_steps(run) == list(range(1, 11))
    assert final_tensors(run) == final_tensors(finished)
    assert (run / "metrics.jsonl").read_text().count("\n") == 1


# Several ranks --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)])
def test_a_signal_to_one_rank_stops_all_at_one_step(number, rank, tmp_path, processes, uninterrupted_by_two):
    run = tmp_path / "run"
    ranks = processes.start_ranks(2, *train_args(run, LONG_RUN_ARG))
    wait_for_step(run)
    ranks[rank].send_signal(number)
    assert [process.wait() for process in ranks] == [3, 3]
    (line,) = stop_lines(ranks[0].err)
    assert line.startswith(f"paragan: {number.name} on rank {rank}: stopped at ")
    assert ranks[1].err == ""
    assert logged_steps(run)[-1] == int(list_checkpoints(run)[-1].name)
    assert [process.wait() for process in processes.start_ranks(2, *train_args(run, LONG_RUN_ARG))] == [0, 0]
    assert final_tensors(run) == final_tensors(uninterrupted_by_two)
    assert logged_steps(run) == logged_steps(uninterrupted_by_two)


@pytest.mark.slow
def test_another_number_of_ranks_may_resume(tmp_path, processes, uninterrupted):
    run = train_interrupted(tmp_path / "run", 50, LONG_RUN_ARG)
    assert [process.wait() for process in processes.start_ranks(2, *train_args(run, LONG_RUN_ARG))] == [0, 0]
    assert logged_steps(run) == logged_steps(uninterrupted)
    assert final_tensors(run).keys() == final_tensors(uninterrupted).keys()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_launched_ranks_stop_on_a_signal_to_one_and_on_ctrl_c(tmp_path, processes):
    """`--ranks 2` as a user types it: a signal to one rank, then Ctrl-C in the terminal; then to an end."""
    run, command = tmp_path / "run", train_args(tmp_path / "run", "--kimg=1600", "--ranks=2")
    launcher = processes.start_fresh(*command)
    wait_for_step(run)
    os.kill(children(launcher.pid)[1], signal.SIGTERM)
    assert launcher.wait() == 3
    assert launcher.err.splitlines()[-1].startswith("paragan: SIGTERM on rank 1: stopped at ")
    first = int(list_checkpoints(run)[-1].name)
    launcher = processes.start_fresh(*command)
    wait_for_step(run, first + 5)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait() == 3
    assert launcher.err.splitlines()[-1].startswith("paragan: SIGINT on rank ")
    second = int(list_checkpoints(run)[-1].name)
    assert second > first
    length = f"--kimg={(second + 10) * 16 / 1000}"  # on a busy machine the signals come late
    for folder in (run, tmp_path / "reference"):
        assert [process.wait() for process in processes.start_ranks(2, *train_args(folder, length))] == [0, 0]
    assert final_tensors(run) == final_tensors(tmp_path / "reference")
    assert logged_steps(run) == logged_steps(tmp_path / "reference")
