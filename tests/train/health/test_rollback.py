"""A run that diverges goes back to a checkpoint, and continues exactly, even if it is killed meanwhile."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import time
from unittest import mock

import pytest

import paragan
from advice import Case
from paragan.core.jsonl import JsonlFile, read_jsonl
from paragan.train import loop
from paragan.train.health import rollback
from processes import final_tensors, list_checkpoints, logged_steps, run_cli, train_args, train_tiny, usage_error

# 10 steps, a checkpoint every other
ROLLBACK_ARGS = ("--kimg=0.16", "--output.checkpoint_kimg=0.032", "--on-divergence=rollback")


def poison(session):
    session.game.d.flat.params[0] = float("nan")


def diverging(times=1, stop_at=None):
    """Make runs diverge in round 5, so many times; and send a signal in round `stop_at` after a rollback."""
    original, sent = loop.play_round, []

    def play_round(session):
        clock = session.clock
        if clock.step == 5 and clock.rollbacks < times:
            poison(session)
        if clock.step == stop_at and clock.rollbacks and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
        original(session)

    return mock.patch.object(loop, "play_round", play_round)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """A run that diverged once."""
    folder = tmp_path_factory.mktemp("rolled_back") / "run"
    with diverging():
        ended = run_cli(*train_args(folder, *ROLLBACK_ARGS))
    assert ended.status == 0, ended
    return folder, ended


def test_a_diverged_run_rolls_back_and_reports_it(rolled_back):
    folder, ended = rolled_back
    assert logged_steps(folder) == list(range(1, 11))
    (row,) = read_jsonl(folder / "health.jsonl")
    assert (row["kind"], row["action"], row["to_step"], row["rollback"]) == ("nonfinite", "rollback", 4, 1)
    assert row["lr_factor"] == 0.5
    assert "rollback 1 of 3" in ended.out
    assert "back to step 4, learning rates x 0.5, another seed" in ended.out
    assert "rollback" in run_cli("status", folder).out
    assert "lr: 0.001" in (folder / "run.yaml").read_text()  # the record is what was asked for


def test_the_changed_settings_have_an_effect(rolled_back, tmp_path):
    plain = run_cli(*train_args(tmp_path / "run", *ROLLBACK_ARGS))
    assert plain.status == 0
    assert not (tmp_path / "run" / "health.jsonl").exists()
    assert final_tensors(tmp_path / "run") != final_tensors(rolled_back[0])


def test_a_run_stopped_after_a_rollback_resumes_exactly(rolled_back, tmp_path):
    run = tmp_path / "run"
    with diverging(stop_at=7):
        assert run_cli(*train_args(run, *ROLLBACK_ARGS)).status == 3
    assert run_cli(*train_args(run, *ROLLBACK_ARGS)).status == 0
    assert final_tensors(run) == final_tensors(rolled_back[0])
    assert logged_steps(run) == logged_steps(rolled_back[0])
    assert len(read_jsonl(run / "health.jsonl")) == 1


def test_a_kill_during_a_rollback_is_completed_by_the_next_start(rolled_back, tmp_path):
    """Between writing the line and renaming the checkpoints that were undone."""
    run, late = tmp_path / "run", ("--output.max_checkpoints=4", "--health.patience_ticks=1")

    def killed(run_dir, world):
        raise KeyboardInterrupt

    def with_earlier_good_step(request):
        request.finding = dataclasses.replace(request.finding, last_good_step=2)
        return request

    original = rollback._decide_rollback
    with (
        diverging(),
        mock.patch.object(
            rollback,
            "_decide_rollback",
            lambda run_dir, run, request: original(run_dir, run, with_earlier_good_step(request)),
        ),
        mock.patch.object(rollback, "retire_undone_checkpoints", killed),
    ):
        assert run_cli(*train_args(run, *ROLLBACK_ARGS, *late)).status == 3
    assert [int(path.name) for path in list_checkpoints(run)] == [2, 4]
    assert read_jsonl(run / "health.jsonl")[-1]["to_step"] == 2
    ended = run_cli(*train_args(run, *ROLLBACK_ARGS, *late))
    assert ended.status == 0
    assert "00000002 at" in ended.out
    assert (run / "checkpoints" / "undone1-00000004").exists()
    assert logged_steps(run) == list(range(1, 11))


def test_a_run_fails_after_max_rollbacks(tmp_path):
    with diverging(times=9):
        ended = run_cli(
            *train_args(
                tmp_path / "run", *ROLLBACK_ARGS, "--on_divergence.max_rollbacks=2", "--on_divergence.reseed=false"
            )
        )
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "Loss/D/loss is" in ended.err
    assert "2 times (on_divergence.max_rollbacks)" in ended.err
    rows = read_jsonl(tmp_path / "run" / "health.jsonl")
    assert [row["action"] for row in rows] == ["rollback", "rollback", "gave up"]
    assert [row.get("lr_factor") for row in rows] == [0.5, 0.25, None]
    assert rows[0]["reseed"] is False


def test_rollback_without_a_checkpoint_restarts(tmp_path):
    with diverging():
        ended = run_cli(*train_args(tmp_path / "run", "--kimg=0.16", "--on-divergence=rollback"))
    assert ended.status == 0
    assert read_jsonl(tmp_path / "run" / "health.jsonl")[0]["to_step"] == 0
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


def test_the_model_is_of_the_current_step_after_a_rollback(tmp_path):
    """Also if it went back to the start, before the first checkpoint."""
    run, models = tmp_path / "run", []
    original = loop.play_round

    def play_round(session):
        if session.clock.rollbacks:
            models.append((session.clock.step, (run / "model" / "config.json").exists()))
        original(session)

    def decide(run_dir, run, request):
        request.finding = dataclasses.replace(request.finding, last_good_step=1)
        return original_decide(run_dir, run, request)

    original_decide = rollback._decide_rollback
    with (
        mock.patch.object(loop, "play_round", play_round),
        diverging(),
        mock.patch.object(rollback, "_decide_rollback", decide),
    ):
        ended = run_cli(*train_args(run, *ROLLBACK_ARGS))
    assert ended.status == 0
    assert [exists for step, exists in models] == [False, False, *[True] * 8]
    assert paragan.load(run).kimg == 0.16


PATCH = """
from paragan.train import loop
original = loop.play_round
def play_round(session):
    if session.clock.step == 5 and session.clock.rollbacks == 0 and session.world.rank == 1:
        parameter = session.game.g.flat.parameters[0].requires_grad_(True)
        parameter.register_hook(lambda grad: grad * float("nan"))
        parameter.requires_grad_(False)
    original(session)
loop.play_round = play_round
"""


DIVERGING = """
from paragan.train import loop
original = loop.play_round
def play_round(session):
    if session.clock.step >= 4 and session.clock.rollbacks == 0:
        session.game.d.flat.params.mul_(30.0)
    original(session)
loop.play_round = play_round
"""
KILLED = """
import os, signal
from paragan.train.health import rollback
original_retire = rollback.retire_undone_checkpoints
def retire_undone_checkpoints(run_dir, world):
    if world.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original_retire(run_dir, world)
rollback.retire_undone_checkpoints = retire_undone_checkpoints
"""


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["sync", "quantized", "async"])
def test_all_ranks_roll_back_after_divergence(strategy, tmp_path, processes):
    more = (f"--strategy={strategy}", "--health.patience_ticks=1", "--health.divergence_factor=5")
    command = train_args(tmp_path / "run", *ROLLBACK_ARGS, *more)
    ranks = processes.start_ranks(
        2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=DIVERGING, **env)
    )
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    (row,) = read_jsonl(tmp_path / "run" / "health.jsonl")
    assert (row["kind"], row["action"]) == ("divergence", "rollback")
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


@pytest.mark.slow(after=1)
@pytest.mark.kill
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_during_a_rollback_is_noticed_at_once(victim, tmp_path, processes):
    """Long before a timeout; and the same command goes on from where it went back to."""
    command = train_args(tmp_path / "run", *ROLLBACK_ARGS, "--timeout_s=120")
    patch = PATCH + KILLED.format(victim=victim)
    ranks = processes.start_ranks(2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=patch, **env))
    assert ranks[victim].wait() == -signal.SIGKILL
    killed = time.monotonic()
    other = ranks[1 - victim]
    assert other.wait() == 1, other.err
    assert time.monotonic() - killed < 30
    assert other.err.count("\n") == 1
    assert f"rank {victim}" in other.err
    assert run_cli(*train_args(tmp_path / "run", *ROLLBACK_ARGS)).status == 0
    assert [row["to_step"] for row in read_jsonl(tmp_path / "run" / "health.jsonl")] == [4]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_all_ranks_roll_back(wire, tmp_path, processes):
    command = train_args(tmp_path / "run", *ROLLBACK_ARGS, f"--strategy.wire={wire}")
    ranks = processes.start_ranks(2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=PATCH, **env))
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert [row["to_step"] for row in read_jsonl(tmp_path / "run" / "health.jsonl")] == [4]
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


@pytest.mark.parametrize("to_step", [None, "x"])
def test_a_rollback_line_without_to_step_is_corrected_or_deleted_as_advised(tmp_path, to_step, check_advice):
    run = train_tiny(tmp_path / "run", "--kimg=0.032")
    findings = JsonlFile(run / "health.jsonl")
    findings.extend([{"kind": 5, "step": "x"}, {"action": "rollback", "to_step": to_step}])
    command = " ".join(train_args(run, "--kimg=0.064"))
    check_advice(
        Case(
            command,
            f"{run / 'health.jsonl'}: a rollback whose to_step is no whole number. Correct or delete that line",
            (),
        )
    )
    shutil.copytree(run, tmp_path / "corrected")
    findings.filter(lambda row: row.get("action") != "rollback")
    corrected = (tmp_path / "corrected" / "health.jsonl").read_text().replace(json.dumps(to_step), "2")
    (tmp_path / "corrected" / "health.jsonl").write_text(corrected)
    for folder in (run, tmp_path / "corrected"):
        assert "resumed from" in run_cli(*train_args(folder, "--kimg=0.064")).out


def test_rollback_needs_ranks_that_are_not_lost(tmp_path):
    words = [
        "train",
        "digits",
        "--strategy=gossip",
        "--on-divergence=rollback",
        "--ranks=2",
        "-n",
        f"--run-dir={tmp_path}/r",
    ]
    assert "--strategy.peer_timeout_s=0" in usage_error(*words)
