"""The run folder: what stands in it, how it is found again, and who may write there."""

from __future__ import annotations

import json
import shutil
import signal
from unittest import mock

import pytest

import tiny_run
from paragan.config.resolve import settled
from paragan.core.schema import plain
from paragan.train.run_dir import RunFolder, Wanted, changed, join
from processes import LONG, TINY, call, checkpoints, interrupted, outcome, playing, refused, steps, train, trained

SHORT = "--kimg=0.16"  # as `finished`


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_everything_of_the_contract_is_there(finished):
    there = {path.name for path in finished.iterdir()}
    files = {"run.yaml", "stats.jsonl", "metrics.jsonl", "report.html", "reals.png", "fakes000000.png"}
    assert files | {"checkpoints", "model"} <= there
    assert any(name.startswith("events.out.tfevents") for name in there)
    assert {path.name for path in (finished / "model").iterdir()} == {
        "model.safetensors",
        "discriminator.safetensors",
        "config.json",
    }
    assert [path.name for path in checkpoints(finished)] == ["00000010"]
    assert {name for name in there if name.startswith(".")} == {".lock"}


def test_the_keys_of_stats_follow_the_field(finished):
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
    run = trained(tmp_path / "run", SHORT, "--output.tick_kimg=0.064")
    assert steps(run) == [1, 4, 8, 10]


def test_the_newest_checkpoints_stay(tmp_path):
    run = trained(tmp_path / "run", SHORT, "--output.checkpoint_kimg=0.032", "--output.keep=3")
    assert [path.name for path in checkpoints(run)] == ["00000006", "00000008", "00000010"]


def test_run_folders_are_numbered(tmp_path):
    for number in range(3):
        assert call("train", *TINY, "--kimg=0.016", f"--seed={number}", "--outdir=deep/runs").status == 0
    names = sorted(path.name for path in (tmp_path / "deep/runs").iterdir())
    assert names == [f"0000{number}-digits-dcgan-sync-r1-b16" for number in range(3)]


def test_the_same_command_goes_on_with_the_newest_unfinished_run_of_its_kind(tmp_path, finished):
    runs = tmp_path / "runs"
    interrupted(runs / "00007-mine", 3, SHORT)
    interrupted(runs / "00008-other", 3, SHORT, "--seed=1")
    command = ["train", *TINY, SHORT]
    assert call(*command).status == 0
    assert sorted(path.name for path in runs.iterdir()) == ["00007-mine", "00008-other"]
    assert outcome(runs / "00007-mine") == outcome(finished)
    told = call(*command)  # nothing is left to go on with
    assert told.status == 0
    assert "runs/00007-mine is the same run, at 0.16 kimg; this is a new one" in told.out
    assert sorted(path.name for path in runs.iterdir())[2:] == ["00009-digits-dcgan-sync-r1-b16"]
    told = call("train", *TINY, "--kimg=0.176", "--resume=auto")
    assert "is the same run, at 0.16 kimg; this is a new one (--resume" in told.out


def test_a_run_that_is_beyond_what_is_asked_for_is_left_alone(tmp_path):
    run = interrupted(tmp_path / "runs/00000-mine", 3, SHORT)
    before = (run / "run.yaml").read_bytes(), outcome(run)
    told = call("train", *TINY, "--kimg=0.032")
    assert told.status == 0
    assert "run folder runs/00001-digits-dcgan-sync-r1-b16" in told.out
    assert (run / "run.yaml").read_bytes() == before[0]
    assert outcome(run) == before[1]
    assert call("train", *TINY, "--kimg=0.096").status == 0  # that is not beyond it
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_resume_never_makes_a_new_folder(tmp_path, finished):
    interrupted(tmp_path / "runs/00000-mine", 3, SHORT)
    assert call("train", *TINY, SHORT, "--resume=never").status == 0
    assert steps(tmp_path / "runs/00000-mine") == [1, 2, 3, 4]
    assert outcome(tmp_path / "runs/00001-digits-dcgan-sync-r1-b16") == outcome(finished)


def test_the_same_command_after_the_end_changes_nothing(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    before, scores = outcome(run), (run / "metrics.jsonl").read_bytes()
    ended = call(*train(run, SHORT))
    assert ended.status == 0
    assert f"{run} is complete at 0.16 kimg" in ended.out
    assert outcome(run) == before
    assert (run / "metrics.jsonl").read_bytes() == scores
    assert steps(run) == list(range(1, 11))


@pytest.mark.parametrize("lost", ["callbacks.save.save_model", "callbacks.scoring.score"])
def test_a_run_that_was_killed_after_its_last_round_is_not_finished(lost, tmp_path, finished):
    with mock.patch(f"paragan.train.{lost}", side_effect=KeyboardInterrupt):
        assert call("train", *TINY, SHORT).status == 3
    (run,) = (tmp_path / "runs").iterdir()
    assert checkpoints(run)
    assert not (run / "report.html").exists()
    assert call("train", *TINY, SHORT).status == 0
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert outcome(run) == outcome(finished)
    assert json.loads((run / "metrics.jsonl").read_text())["kimg"] == 0.16
    assert (run / "report.html").exists()


def test_one_run_at_a_time_writes_in_a_folder(tmp_path, processes, undisturbed):
    run = tmp_path / "runs/00000-mine"
    owner = processes.warm(*train(run, LONG))
    playing(run)
    owner.send(signal.SIGSTOP)
    assert f"is being written by process {owner.pid} on " in refused(*train(run, LONG))
    assert call("train", *TINY, LONG, "--kimg=0.016").status == 0  # looks for an unfinished run, but that one is taken
    assert sorted(path.name for path in run.parent.iterdir()) == ["00000-mine", "00001-digits-dcgan-sync-r1-b16"]
    owner.send(signal.SIGKILL)
    owner.wait()
    assert call(*train(run, LONG)).status == 0  # the lock died with its owner
    assert outcome(run) == outcome(undisturbed)


def test_a_record_from_before_a_field_was_has_its_default():
    run = settled(tiny_run.run("strategy=quantized"))
    former = plain(run)
    del former["g"]["optimism"], former["strategy"]["feedback"]
    assert changed(former, run) == []
    assert [name for name, _, _ in changed(former | {"batch": 32}, run)] == ["batch"]
    assert "strategy.name" in [name for name, _, _ in changed(former, settled(tiny_run.run()))]


def test_a_folder_that_another_worker_begins_while_we_look_is_joined(tmp_path, monkeypatch):
    run, path = settled(tiny_run.run("strategy=per-label")), tmp_path / "run"
    looked = RunFolder.record

    def record(folder: RunFolder):
        found = looked(folder)
        if not path.exists():
            path.mkdir()
            folder.write_record(run)
        return found

    monkeypatch.setattr(RunFolder, "record", record)
    assert join(Wanted(run_dir=path), run, lambda folder: False).path == path
