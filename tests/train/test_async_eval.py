"""A follower scores a run as the run itself would have, once, and reads only complete models."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest

from advice import advises
from paragan.cli.train import print_done
from paragan.core.errors import RunError
from paragan.core.jsonl import JsonlFile, read_jsonl
from paragan.eval.features import pixels
from paragan.models.model_files import try_read_consistent
from paragan.train import async_eval
from paragan.train.best_record import BEST_FOLDER, read_best
from paragan.train.callbacks import best_model
from processes import call_command, run_cli, train_args, train_interrupted, train_tiny, usage_error, wait_until

UNSCORED = ("--kimg=0.16", "--evaluation.metrics=[]")
EVAL_ARGS = ("--metrics", "fd,kid", "--count", "16")


@pytest.fixture(scope="module")
def unscored(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("unscored") / "run", *UNSCORED)


@pytest.fixture
def run(unscored, tmp_path):
    return shutil.copytree(unscored, tmp_path / "run")


def score_lines(folder):
    return [
        {name: row[name] for name in ("name", "value", "kimg", "fingerprint")}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def test_a_follower_writes_the_lines_of_the_run_itself(run, tmp_path):
    within = train_tiny(tmp_path / "within", "--kimg=0.16", "--evaluation.metrics=[fd,kid]")
    ended = run_cli("eval", run, "--follow", *EVAL_ARGS, "--device", "cpu")
    assert ended.status == 0, ended.err
    assert score_lines(run) == score_lines(within)
    assert read_best(run) == read_best(within)
    assert "is complete, 1 model scored by this command" in ended.out
    assert "fd_pixels" in (run / "report.html").read_text()  # which was written before there were scores


def test_status_reports_if_the_best_was_measured_by_another_protocol(run):
    assert run_cli("eval", run, "--follow", *EVAL_ARGS).status == 0
    assert "another protocol" not in run_cli("status", run).out
    assert run_cli("eval", run, "--metrics", "fd", "--count", "32").status == 0
    assert "at 0.16 kimg (measured by another protocol)" in run_cli("status", run).out


def test_the_last_line_names_the_kimg_of_its_scores(tmp_path):
    words = ("--kimg=0.176", "--evaluation.metrics=[fd]", "--evaluation.every_kimg=0.16")
    ended = run_cli(*train_args(tmp_path / "run", *words))
    assert "which are of" not in ended.out  # the end is scored too
    left = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kimg"] == 0.16]
    JsonlFile(tmp_path / "run" / "metrics.jsonl").filter(lambda row: row in left)
    printed = []
    print_done(tmp_path / "run", SimpleNamespace(print=printed.append))
    assert "(at 0.16 kimg)" in printed[0]


def test_only_one_process_follows_a_run(run):
    with (run / ".follow").open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert "another process follows this run" in usage_error("eval", run, "--follow", *EVAL_ARGS)
    assert run_cli("eval", run, "--follow", *EVAL_ARGS).status == 0


def test_only_missing_scores_are_measured(run):
    assert run_cli("eval", run, "--follow", "--metrics", "fd", "--count", "16").status == 0
    assert run_cli("eval", run, "--follow", *EVAL_ARGS).status == 0
    assert [row["name"] for row in read_jsonl(run / "metrics.jsonl")] == ["fd_pixels", "kid_pixels"]
    ended = run_cli("eval", run, "--follow", *EVAL_ARGS).out
    assert "0.16 kimg: scored before: fd, kid" in ended
    assert " 0 models scored" in ended


def test_a_model_undone_by_a_rollback_is_not_scored(run, monkeypatch):
    def read_model(folder):
        model = try_read_consistent(folder)
        if not read_jsonl(run / "health.jsonl"):
            JsonlFile(run / "health.jsonl").append({"action": "rollback", "to_step": 0})
        return model

    monkeypatch.setattr(async_eval, "try_read_consistent", read_model)
    ended = run_cli("eval", run, "--follow", *EVAL_ARGS, "--patience", "0")
    assert ended.status == 1, ended  # it is not complete then
    assert read_jsonl(run / "metrics.jsonl") == []


def test_a_stopped_run_ends_the_follower_with_status_1(tmp_path):
    run = train_interrupted(tmp_path / "run", 4, *UNSCORED)
    with advises(
        f"{run} is at 0.08 of 0.16 kimg and showed nothing new for 0 s (--patience). "
        "Continue the run, then repeat this command",
        RunError,
    ):
        call_command("eval", run, "--follow", *EVAL_ARGS, "--patience", "0")
    assert [row["kimg"] for row in read_jsonl(run / "metrics.jsonl")] == [0.08, 0.08]
    assert run_cli(*train_args(run, *UNSCORED)).status == 0  # goes on, and keeps what was measured of where it stood
    assert run_cli("eval", run, "--follow", *EVAL_ARGS, "--patience", "0").status == 0
    assert [row["kimg"] for row in read_jsonl(run / "metrics.jsonl")] == [0.08, 0.08, 0.16, 0.16]


def test_a_run_that_is_extended_is_followed_to_its_new_end(run, monkeypatch):
    """It was begun with 0.16 kimg, and asked for more while its model was scored."""
    longer = ("--kimg=0.32", *UNSCORED[1:])

    def read_model(folder):
        model = try_read_consistent(folder)
        if model and model.config["kimg"] == 0.16 and not rows(0.16):
            assert run_cli(*train_args(run, *longer)).status == 0
        return model

    def rows(kimg):
        return [row for row in read_jsonl(run / "metrics.jsonl") if row["kimg"] == kimg]

    monkeypatch.setattr(async_eval, "try_read_consistent", read_model)
    ended = run_cli("eval", run, "--follow", *EVAL_ARGS, "--patience", "0")
    assert ended.status == 0, ended.err
    assert len(rows(0.32)) == 2


def test_new_models_are_scored_until_ctrl_c(tmp_path, processes):
    run = train_interrupted(tmp_path / "run", 4, *UNSCORED)
    patch = "from paragan.train import async_eval\nasync_eval.POLL_S = 0.05"
    follower = processes.start_forked("eval", str(run), "--follow", *EVAL_ARGS, patch=patch)
    wait_until(lambda: len(read_jsonl(run / "metrics.jsonl")) == 2, description="the first model is scored")
    train_interrupted(run, 7, *UNSCORED)
    wait_until(lambda: len(read_jsonl(run / "metrics.jsonl")) == 4, description="the second model is scored")
    follower.send_signal(signal.SIGINT)
    assert follower.wait() == 3
    assert follower.err == "paragan: SIGINT; the same command resumes the run\n"
    restarted = processes.start_forked("eval", str(run), "--follow", *EVAL_ARGS, patch=patch)
    assert run_cli(*train_args(run, *UNSCORED)).status == 0
    assert restarted.wait() == 0
    assert [row["kimg"] for row in read_jsonl(run / "metrics.jsonl")] == [0.08, 0.08, 0.128, 0.128, 0.16, 0.16]


def test_weights_are_not_read_with_another_config(run):
    snapshot = try_read_consistent(run / "model")
    assert snapshot
    assert snapshot.config["kimg"] == 0.16
    weights = run / "model" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the next checkpoint, whose config.json is not there yet
    assert try_read_consistent(run / "model") is None
    weights.write_bytes(data)
    assert try_read_consistent(run / "model")
    (run / "model" / "config.json").unlink()
    assert try_read_consistent(run / "model") is None


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "no scores"),
        (["--metrics", "fd", "--device", "tpu"], "--device tpu"),
        (["--metrics", "fd", "--device", "cuda:99"], "--device cuda:99"),
        (["--metrics", "fd", "--patience", "-1"], "--patience"),
        (["--metrics", "fd", "--truncation", "0.5"], "--truncation"),
        (["--metrics", "fdd"], "fdd"),
    ],
)
def test_bad_arguments_raise_usage_errors(words, what, unscored):
    assert what in usage_error("eval", unscored, "--follow", *words)


def test_other_folders_raise_by_name(tmp_path):
    assert "does not exist" in usage_error("eval", tmp_path / "none", "--follow")
    (tmp_path / "other").mkdir()
    assert "no run folder" in usage_error("eval", tmp_path / "other", "--follow")


# Best -----------------------------------------------------------------------------------------------------

OFTEN = ("--kimg=0.16", "--evaluation.every_kimg=0.032", "--evaluation.metrics=[fd,prdc]")


def test_the_best_model_is_saved_as_a_model_folder(tmp_path):
    run = train_tiny(tmp_path / "run", *OFTEN)
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["name"] == "fd_pixels"]
    assert len(rows) == 5
    first = min(rows, key=lambda row: row["value"])
    assert read_best(run) == {name: first[name] for name in ("name", "value", "kimg", "fingerprint")}
    assert json.loads((run / "best" / "config.json").read_text())["kimg"] == first["kimg"]
    ended = run_cli("sample", run / "best", "--count", "4", "--out", tmp_path / "grid.png")
    assert ended.status == 0, ended.err
    output = run_cli("eval", run / "best", "--metrics", "fd")
    assert output.status == 2  # a model, no run


def test_the_best_model_does_not_depend_on_stops(tmp_path):
    straight = train_tiny(tmp_path / "straight", *OFTEN, "--output.best_metric=recall_pixels")
    run = train_interrupted(tmp_path / "run", 5, *OFTEN, "--output.best_metric=recall_pixels")
    assert run_cli(*train_args(run, *OFTEN, "--output.best_metric=recall_pixels")).status == 0
    assert read_best(run) == read_best(straight)
    weights = [(folder / "best" / "model.safetensors").read_bytes() for folder in (run, straight)]
    assert weights[0] == weights[1]


def test_an_unmeasured_best_metric_raises(tmp_path):
    assert "output.best_metric=kid_pixels" in usage_error(
        *train_args(tmp_path / "run", "--output.best_metric=kid_pixels")
    )
    assert best_model.resolve_best_metric("none", ["fd"], pixels(8, 1)) == ""
    assert best_model.resolve_best_metric("auto", [], pixels(8, 1)) == ""


def score(value, name="fd_pixels", fingerprint="a"):
    return SimpleNamespace(name=name, value=value, fingerprint=fingerprint)


def test_better_follows_the_direction_of_the_score():
    assert best_model.is_better(score(2.0), None)
    assert not best_model.is_better(score(float("nan")), None)
    best = {"name": "fd_pixels", "value": 1.0, "fingerprint": "a"}
    assert best_model.is_better(score(0.9), best)
    assert not best_model.is_better(score(1.0), best)
    assert best_model.is_better(score(2.0, fingerprint="b"), best)
    assert best_model.is_better(score(2.0, "recall_pixels"), best | {"name": "recall_pixels"})


def test_a_kill_between_two_renames_loses_no_model(tmp_path):
    (tmp_path / best_model.PREVIOUS_FOLDER).mkdir()
    (tmp_path / best_model.PREVIOUS_FOLDER / "config.json").write_text("{}")
    best_model.recover_interrupted_publish(tmp_path)
    assert (tmp_path / BEST_FOLDER / "config.json").exists()
    assert not (tmp_path / best_model.PREVIOUS_FOLDER).exists()


# Time and lines --------------------------------------------------------------------------------------------


def test_scoring_time_is_in_the_stats(tmp_path):
    ended = run_cli(*train_args(tmp_path / "run", *OFTEN))
    lines = read_jsonl(tmp_path / "run" / "stats.jsonl")
    scored = [line["Progress/step"] for line in lines if line["Timing/eval_s"] > 0]
    assert scored == [3, 5, 7, 9, 10]  # in the line after; of the last, in its own
    assert all(line["Timing/aside_s"] >= line["Timing/eval_s"] for line in lines)
    assert "scores took" in ended.out


def test_concurrent_appends_survive_truncation(tmp_path):
    records = JsonlFile(tmp_path / "m.jsonl")

    def write(writer):
        for number in range(100):
            JsonlFile(tmp_path / "m.jsonl").append({"kimg": 1, "writer": writer, "number": number, "more": "x" * 200})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for _ in range(50):
        records.append({"kimg": 2})
        records.truncate_after(1, key="kimg")
    for writer in writers:
        writer.join()
    rows = read_jsonl(tmp_path / "m.jsonl")
    assert len(rows) == 400
    for writer in range(4):
        assert [row["number"] for row in rows if row["writer"] == writer] == list(range(100))
