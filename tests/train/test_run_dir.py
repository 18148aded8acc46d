"""The run folder: what stands in it, how it is found again, and who may write there."""

from __future__ import annotations

import json
import shutil
import signal
from unittest import mock

import pytest

import tiny_run
from paragan.config.resolve import fill_strategy_defaults
from paragan.config.run import to_saved_dict
from paragan.core.schema import to_dict
from paragan.train.run_dir import RunDir
from paragan.train.run_dir_selection import RunDirRequest, config_changes, select_shared_run_dir
from processes import (
    LONG_RUN_ARG,
    TINY_RUN_ARGS,
    final_tensors,
    list_checkpoints,
    logged_steps,
    run_cli,
    train_args,
    train_interrupted,
    train_tiny,
    usage_error,
    wait_for_step,
)

SHORT = "--kimg=0.16"  # as `finished`


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_folder_is_complete(finished):
    names = {path.name for path in finished.iterdir()}
    files = {"run.yaml", "stats.jsonl", "metrics.jsonl", "report.html", "reals.png", "fakes000000.png"}
    assert files | {"checkpoints", "model"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (finished / "model").iterdir()} == {
        "model.safetensors",
        "discriminator.safetensors",
        "config.json",
    }
    assert [path.name for path in list_checkpoints(finished)] == ["00000010"]
    assert {name for name in names if name.startswith(".")} == {".lock"}


def test_stats_have_the_usual_keys(finished):
    for line in (finished / "stats.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row.keys() >= {
            *("Progress/kimg", "Progress/step"),
            *("Loss/G/loss", "Loss/D/loss", "Loss/scores/real", "Loss/scores/fake"),
            *("Timing/sec_per_kimg", "Timing/data_wait_s", "Timing/exchange_wait_s"),
            *("Comm/G/sent_bytes", "Comm/D/sent_bytes", "Resources/peak_mem_gb"),
        }
        assert row["Progress/kimg"] == row["Progress/step"] * 16 / 1000


def test_scores_have_a_protocol(finished):
    (row,) = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert (row["name"], row["kimg"]) == ("fd_pixels", 0.16)
    assert row["protocol"]["fakes"] == 16


def test_the_first_line_of_stats_comes_after_the_first_round_and_the_last_at_the_end(tmp_path):
    run = train_tiny(tmp_path / "run", SHORT, "--output.tick_kimg=0.064")
    assert logged_steps(run) == [1, 4, 8, 10]


def test_the_newest_checkpoints_are_retained(tmp_path):
    run = train_tiny(tmp_path / "run", SHORT, "--output.checkpoint_kimg=0.032", "--output.max_checkpoints=3")
    assert [path.name for path in list_checkpoints(run)] == ["00000006", "00000008", "00000010"]


def test_run_folders_are_numbered(tmp_path):
    for number in range(3):
        assert run_cli("train", *TINY_RUN_ARGS, "--kimg=0.016", f"--seed={number}", "--outdir=deep/runs").status == 0
    names = sorted(path.name for path in (tmp_path / "deep/runs").iterdir())
    assert names == [f"0000{number}-digits-dcgan-sync-r1-b16" for number in range(3)]


def test_the_same_command_resumes_the_newest_unfinished_run(tmp_path, finished):
    runs = tmp_path / "runs"
    train_interrupted(runs / "00007-mine", 3, SHORT)
    train_interrupted(runs / "00008-other", 3, SHORT, "--seed=1")
    command = ["train", *TINY_RUN_ARGS, SHORT]
    assert run_cli(*command).status == 0
    assert sorted(path.name for path in runs.iterdir()) == ["00007-mine", "00008-other"]
    assert final_tensors(runs / "00007-mine") == final_tensors(finished)
    ended = run_cli(*command)  # nothing is left to go on with
    assert ended.status == 0
    assert "runs/00007-mine is the same run, at 0.16 kimg; this is a new one" in ended.out
    assert sorted(path.name for path in runs.iterdir())[2:] == ["00009-digits-dcgan-sync-r1-b16"]
    ended = run_cli("train", *TINY_RUN_ARGS, "--kimg=0.176", "--resume=auto")
    assert "is the same run, at 0.16 kimg; this is a new one (--resume" in ended.out


def test_a_run_beyond_the_requested_length_is_not_resumed(tmp_path):
    run = train_interrupted(tmp_path / "runs/00000-mine", 3, SHORT)
    before = (run / "run.yaml").read_bytes(), final_tensors(run)
    ended = run_cli("train", *TINY_RUN_ARGS, "--kimg=0.032")
    assert ended.status == 0
    assert "run folder runs/00001-digits-dcgan-sync-r1-b16" in ended.out
    assert (run / "run.yaml").read_bytes() == before[0]
    assert final_tensors(run) == before[1]
    assert run_cli("train", *TINY_RUN_ARGS, "--kimg=0.096").status == 0  # that is not beyond it
    assert logged_steps(run) == [1, 2, 3, 4, 5, 6]


def test_resume_never_creates_a_folder(tmp_path, finished):
    train_interrupted(tmp_path / "runs/00000-mine", 3, SHORT)
    assert run_cli("train", *TINY_RUN_ARGS, SHORT, "--resume=never").status == 0
    assert logged_steps(tmp_path / "runs/00000-mine") == [1, 2, 3, 4]
    assert final_tensors(tmp_path / "runs/00001-digits-dcgan-sync-r1-b16") == final_tensors(finished)


def test_the_same_command_after_the_end_writes_no_files(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    before, scores = final_tensors(run), (run / "metrics.jsonl").read_bytes()
    ended = run_cli(*train_args(run, SHORT))
    assert ended.status == 0
    assert f"{run} is complete at 0.16 kimg" in ended.out
    assert final_tensors(run) == before
    assert (run / "metrics.jsonl").read_bytes() == scores
    assert logged_steps(run) == list(range(1, 11))


@pytest.mark.parametrize("lost", ["callbacks.save.save_model", "callbacks.scoring.score"])
def test_a_run_killed_after_its_last_round_is_resumed(lost, tmp_path, finished):
    with mock.patch(f"paragan.train.{lost}", side_effect=KeyboardInterrupt):
        assert run_cli("train", *TINY_RUN_ARGS, SHORT).status == 3
    (run,) = (tmp_path / "runs").iterdir()
    assert list_checkpoints(run)
    assert not (run / "report.html").exists()
    assert run_cli("train", *TINY_RUN_ARGS, SHORT).status == 0
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert final_tensors(run) == final_tensors(finished)
    assert json.loads((run / "metrics.jsonl").read_text())["kimg"] == 0.16
    assert (run / "report.html").exists()


def test_a_smaller_length_does_not_change_the_record_of_a_finished_run(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "run.yaml").read_text()
    ended = run_cli(*train_args(run, "--kimg=0.08"))
    assert ended.status == 0, ended
    assert "is complete at 0.16 kimg" in ended.out
    assert (run / "run.yaml").read_text() == before


@pytest.mark.slow
def test_one_run_at_a_time_owns_a_folder(tmp_path, processes, uninterrupted):
    run = tmp_path / "runs/00000-mine"
    owner = processes.start_forked(*train_args(run, LONG_RUN_ARG))
    wait_for_step(run)
    owner.send_signal(signal.SIGSTOP)
    assert f"is being written by process {owner.pid} on " in usage_error(*train_args(run, LONG_RUN_ARG))
    assert (
        run_cli("train", *TINY_RUN_ARGS, LONG_RUN_ARG, "--kimg=0.016").status == 0
    )  # looks for an unfinished run, but that one is taken
    assert sorted(path.name for path in run.parent.iterdir()) == ["00000-mine", "00001-digits-dcgan-sync-r1-b16"]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert run_cli(*train_args(run, LONG_RUN_ARG)).status == 0  # the lock died with its owner
    assert final_tensors(run) == final_tensors(uninterrupted)


def test_a_field_that_a_record_lacks_has_its_default():
    run = fill_strategy_defaults(tiny_run.make_run("strategy=quantized"))
    record = to_dict(run)
    del record["g"]["optimizer_wrapper"], record["strategy"]["feedback"]
    assert config_changes(record, run) == []
    assert [name for name, _, _ in config_changes(record | {"batch": 32}, run)] == ["batch"]
    assert "strategy.name" in [
        name for name, _, _ in config_changes(record, fill_strategy_defaults(tiny_run.make_run()))
    ]


def test_a_folder_created_concurrently_is_joined(tmp_path, monkeypatch):
    run = fill_strategy_defaults(tiny_run.make_run("strategy=per-label"))
    path = tmp_path / "run"
    original = RunDir.read_run_config

    def read_run_config(run_dir: RunDir):
        config = original(run_dir)
        if not path.exists():
            path.mkdir()
            run_dir.write_run_config(to_saved_dict(run))
        return config

    monkeypatch.setattr(RunDir, "read_run_config", read_run_config)
    assert select_shared_run_dir(RunDirRequest(run_dir=path), run, lambda folder: False).path == path
