"""A run that falls ill goes back, and goes on as it would have, whoever kills it meanwhile."""

from __future__ import annotations

import dataclasses
import signal
import time
from unittest import mock

import pytest

import paragan
from paragan.core.jsonl import JsonlFile, read_jsonl
from paragan.train import loop
from paragan.train.health import rollback
from processes import final_tensors, list_checkpoints, logged_steps, run_cli, train_args, train_tiny, usage_error

GUARDED = (
    "--kimg=0.16",
    "--output.checkpoint_kimg=0.032",
    "--on-divergence=rollback",
)  # 10 steps, a checkpoint every other


def ill(session):
    session.game.d.flat.params[0] = float("nan")


def falling_ill(times=1, stop_at=None):
    """Runs fall ill in round 5, so often; and get a signal in a round after they went back."""
    original, sent = loop.play_round, []

    def play_round(session):
        clock = session.clock
        if clock.step == 5 and clock.rollbacks < times:
            ill(session)
        if clock.step == stop_at and clock.rollbacks and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
        original(session)

    return mock.patch.object(loop, "play_round", play_round)


@pytest.fixture(scope="module")
def cured(tmp_path_factory):
    """A run that fell ill once."""
    folder = tmp_path_factory.mktemp("cured") / "run"
    with falling_ill():
        ended = run_cli(*train_args(folder, *GUARDED))
    assert ended.status == 0, ended
    return folder, ended


def test_a_run_goes_back_and_says_so(cured):
    folder, ended = cured
    assert logged_steps(folder) == list(range(1, 11))
    (row,) = read_jsonl(folder / "health.jsonl")
    assert (row["kind"], row["action"], row["to_step"], row["rollback"]) == ("nonfinite", "rollback", 4, 1)
    assert row["lr_factor"] == 0.5
    assert "rollback 1 of 3" in ended.out
    assert "back to step 4, learning rates x 0.5, another seed" in ended.out
    assert "rollback" in run_cli("status", folder).out
    assert "lr: 0.001" in (folder / "run.yaml").read_text()  # the record is what was asked for


def test_what_was_changed_matters(cured, tmp_path):
    plain = run_cli(*train_args(tmp_path / "run", *GUARDED))
    assert plain.status == 0
    assert not (tmp_path / "run" / "health.jsonl").exists()
    assert final_tensors(tmp_path / "run") != final_tensors(cured[0])


def test_a_run_that_went_back_and_was_stopped_goes_on_exactly(cured, tmp_path):
    run = tmp_path / "run"
    with falling_ill(stop_at=7):
        assert run_cli(*train_args(run, *GUARDED)).status == 3
    assert run_cli(*train_args(run, *GUARDED)).status == 0
    assert final_tensors(run) == final_tensors(cured[0])
    assert logged_steps(run) == logged_steps(cured[0])
    assert len(read_jsonl(run / "health.jsonl")) == 1


def test_one_that_was_killed_while_it_went_back_too(cured, tmp_path):
    """Between the line that says so, and the checkpoints that are set aside: newer ones than the good one are there."""
    run, late = tmp_path / "run", ("--output.max_checkpoints=4", "--health.patience_ticks=1")

    def killed(folder, world):
        raise KeyboardInterrupt

    def later(undo):
        undo.finding = rollback.dataclasses.replace(undo.finding, last_good_step=2)
        return undo

    original = rollback._decide_rollback
    with (
        falling_ill(),
        mock.patch.object(rollback, "_decide_rollback", lambda folder, run, undo: original(folder, run, later(undo))),
        mock.patch.object(rollback, "retire_undone_checkpoints", killed),
    ):
        assert run_cli(*train_args(run, *GUARDED, *late)).status == 3
    assert [int(path.name) for path in list_checkpoints(run)] == [2, 4]
    assert read_jsonl(run / "health.jsonl")[-1]["to_step"] == 2
    ended = run_cli(*train_args(run, *GUARDED, *late))
    assert ended.status == 0
    assert "00000002 at" in ended.out
    assert (run / "checkpoints" / "undone1-00000004").exists()
    assert logged_steps(run) == list(range(1, 11))


def test_it_gives_up_after_the_stated_number_of_times(tmp_path):
    with falling_ill(times=9):
        ended = run_cli(
            *train_args(tmp_path / "run", *GUARDED, "--on_divergence.max_rollbacks=2", "--on_divergence.reseed=false")
        )
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "Loss/D/loss is" in ended.err
    assert "2 times (on_divergence.max_rollbacks)" in ended.err
    rows = read_jsonl(tmp_path / "run" / "health.jsonl")
    assert [row["action"] for row in rows] == ["rollback", "rollback", "gave up"]
    assert [row.get("lr_factor") for row in rows] == [0.5, 0.25, None]
    assert rows[0]["reseed"] is False


def test_without_a_checkpoint_it_begins_again(tmp_path):
    with falling_ill():
        ended = run_cli(*train_args(tmp_path / "run", "--kimg=0.16", "--on-divergence=rollback"))
    assert ended.status == 0
    assert read_jsonl(tmp_path / "run" / "health.jsonl")[0]["to_step"] == 0
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


def test_the_model_is_the_one_of_where_the_run_stands(tmp_path):
    """Also where it went back to the beginning, behind the first checkpoint."""
    run, there = tmp_path / "run", []
    original = loop.play_round

    def play_round(session):
        if session.clock.rollbacks:
            there.append((session.clock.step, (run / "model" / "config.json").exists()))
        original(session)

    def early(folder, run, undo):
        undo.finding = dataclasses.replace(undo.finding, last_good_step=1)
        return decided(folder, run, undo)

    decided = rollback._decide_rollback
    with (
        mock.patch.object(loop, "play_round", play_round),
        falling_ill(),
        mock.patch.object(rollback, "_decide_rollback", early),
    ):
        ended = run_cli(*train_args(run, *GUARDED))
    assert ended.status == 0
    assert [kept for step, kept in there] == [False, False, *[True] * 8]
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
from paragan.train import guard
unharmed = guard.set_aside
def set_aside(folder, world):
    if world.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    return unharmed(folder, world)
guard.set_aside = set_aside
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["sync", "quantized", "async"])
def test_ranks_go_back_together_from_numbers_that_grow(strategy, tmp_path, processes):
    more = (f"--strategy={strategy}", "--health.patience_ticks=1", "--health.divergence_factor=5")
    command = train_args(tmp_path / "run", *GUARDED, *more)
    ranks = processes.start_ranks(
        2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=DIVERGING, **env)
    )
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    (row,) = read_jsonl(tmp_path / "run" / "health.jsonl")
    assert (row["kind"], row["action"]) == ("divergence", "rollback")
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


@pytest.mark.kill
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_meanwhile_is_noticed_at_once(victim, tmp_path, processes):
    """Long before a timeout; and the same command goes on from where it went back to."""
    command = train_args(tmp_path / "run", *GUARDED, "--timeout_s=120")
    patch = PATCH + KILLED.format(victim=victim)
    ranks = processes.start_ranks(2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=patch, **env))
    assert ranks[victim].wait() == -signal.SIGKILL
    killed = time.monotonic()
    other = ranks[1 - victim]
    assert other.wait() == 1, other.err
    assert time.monotonic() - killed < 30
    assert other.err.count("\n") == 1
    assert f"rank {victim}" in other.err
    assert run_cli(*train_args(tmp_path / "run", *GUARDED)).status == 0
    assert [row["to_step"] for row in read_jsonl(tmp_path / "run" / "health.jsonl")] == [4]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_ranks_go_back_together(wire, tmp_path, processes):
    command = train_args(tmp_path / "run", *GUARDED, f"--strategy.wire={wire}")
    ranks = processes.start_ranks(2, *command, start=lambda *a, **env: processes.start_forked(*a, patch=PATCH, **env))
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert [row["to_step"] for row in read_jsonl(tmp_path / "run" / "health.jsonl")] == [4]
    assert logged_steps(tmp_path / "run") == list(range(1, 11))


@pytest.mark.parametrize("to_step", [None, "x"])
def test_a_rollback_that_says_not_where_to_is_one_line(tmp_path, to_step):
    run = train_tiny(tmp_path / "run", "--kimg=0.032")
    JsonlFile(run / "health.jsonl").extend([{"kind": 5, "step": "x"}, {"action": "rollback", "to_step": to_step}])
    assert "mend or delete that line" in usage_error(*train_args(run, "--kimg=0.064"))


def test_ranks_that_others_go_on_without_are_refused(tmp_path):
    words = [
        "train",
        "digits",
        "--strategy=gossip",
        "--on-divergence=rollback",
        "--ranks=2",
        "-n",
        f"--run-dir={tmp_path}/r",
    ]
    assert "--strategy.rank_loss_timeout_s=0" in usage_error(*words)
