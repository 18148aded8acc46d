"""Loggers get what happens in a run, and never stop it: those of the user, failing ones, slow ones, unknown ones."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import paragan as pg
import recorder
import tiny_estimator
from advice import advises
from paragan.core.errors import UsageError
from paragan.train.loggers import logger_thread
from paragan.train.loggers.create_logger import check_loggers
from paragan.train.loggers.logger_set import LoggerSet
from paragan.train.run_dir import RunDir
from processes import final_tensors, run_cli, train_args, train_interrupted, train_tiny, usage_error

SHORT = "--kimg=0.16"  # as `finished`


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which loggers write their files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls_of(path: Path, method: str) -> list[list[Any]]:
    """Return [value, images] of the calls of a method, in their order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [[value, images] for name, value, images in rows if name == method]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A class of the user ----------------------------------------------------------------------------------


def test_a_class_of_the_user_gets_everything(here, finished):
    run = train_tiny(here / "run", SHORT, "--output.loggers=[tensorboard, {name: recorder:Recorder, path: a.jsonl}]")
    calls = here / "a.jsonl"
    assert calls_of(calls, "start") == [[["run", str(run), "", 0.16], None]]
    ticks = [stats for stats, _ in calls_of(calls, "tick")]
    rows = [{k: v for k, v in row.items() if k != "Data/decisions"} for row in lines_of(run / "stats.jsonl")]
    assert [tick["Progress/step"] for tick in ticks] == [*range(1, 11)]
    assert ticks[:-1] == rows[:-1]  # the time that scoring took is added to the last line
    assert [images for _, images in calls_of(calls, "images")] == [16, 160]
    (score,) = lines_of(run / "metrics.jsonl")
    assert calls_of(calls, "scores") == [[{"fd_pixels": score["value"]}, 160]]
    assert calls_of(calls, "checkpoint") == [["00000010", 160]]
    assert calls_of(calls, "model") == [["model", 160], ["best", 160]]
    assert calls_of(calls, "close") == [["", None]]
    assert json.loads((run / "loggers.json").read_text()) == {"recorder:Recorder": "run 1"}
    assert final_tensors(run) == final_tensors(finished)


def test_an_interrupted_run_is_continued(here):
    run = train_interrupted(here / "run", 4, SHORT, "--output.loggers=recorder:Recorder")
    train_tiny(run, SHORT, "--output.loggers=recorder:Recorder")
    calls = here / "calls.jsonl"
    assert [value[2] for value, _ in calls_of(calls, "start")] == ["", "run 1"]
    interrupted, complete = (error for error, _ in calls_of(calls, "close"))
    assert interrupted.startswith("SIGTERM")
    assert complete == ""
    assert [images for _, images in calls_of(calls, "tick")] == [*range(16, 161, 16)]


def test_findings_are_logged(here):
    settings = ("--health.patience_ticks=1", "--health.max_update=1e-9", "--output.loggers=recorder:Recorder")
    run = train_tiny(here / "run", SHORT, *settings)
    findings = [text for text, _ in calls_of(here / "calls.jsonl", "finding")]
    rows = lines_of(run / "health.jsonl")
    assert rows
    assert findings == [f"{row['message']}; {row['advice']}" for row in rows]


def test_a_rollback_is_logged_and_continues_the_run(here):
    settings = ("--health.patience_ticks=1", "--health.max_update=1e-9", "--on_divergence=rollback")
    result = run_cli(*train_args(here / "run", SHORT, *settings, "--output.loggers=recorder:Recorder"))
    assert result.status == 1
    calls = here / "calls.jsonl"
    assert [value[2] for value, _ in calls_of(calls, "start")] == ["", *["run 1"] * 3]
    assert all("the run goes back to a checkpoint" in text for text, _ in calls_of(calls, "finding"))
    assert len(calls_of(calls, "close")) == 4


def test_a_label_is_a_run_of_its_own():
    assert RunDir(Path("runs/00000-digits")).run_name == "00000-digits"
    assert RunDir(Path("runs/00000-digits/labels/0003.2")).run_name == "00000-digits-label-0003"


def test_a_scaling_manager_logs(here, capsys):
    config = tiny_estimator.config()
    with pg.ScalingManager(config, 64, 8, loggers=[recorder.Recorder("b.jsonl")]) as manager:
        gan = pg.Estimator(tiny_estimator.Generator(), tiny_estimator.Discriminator())
        line = manager.train(gan)
        score = manager.eval("fd")
    calls = here / "b.jsonl"
    assert calls_of(calls, "start") == [[["estimator", "None", "", manager.run.kimg], None]]
    assert calls_of(calls, "tick") == [[line, 64]]
    assert calls_of(calls, "scores") == [[{score.name: score.value}, 64]]
    assert calls_of(calls, "close") == [["", None]]
    with pytest.raises(UsageError, match=r"^loggers: there is no wanbd; did you mean wandb"):
        pg.ScalingManager(config, 64, 8, loggers=["wanbd"])


# Loggers that fail, or are slow -----------------------------------------------------------------------


def test_a_failing_logger_does_not_stop_the_run(here, finished):
    result = run_cli(*train_args(here / "run", SHORT, "--output.loggers=recorder:Failing,recorder:Recorder"))
    assert result.status == 0
    message = "logger recorder:Failing: OSError: the server is gone. It logs nothing more; training goes on"
    assert result.out.count("recorder:Failing") == 1
    assert message in result.out.splitlines()
    assert len(calls_of(here / "calls.jsonl", "tick")) == 10
    assert final_tensors(here / "run") == final_tensors(finished)


def test_a_slow_logger_does_not_delay_the_run(here, finished):
    start = time.monotonic()
    settings = ("--output.loggers=recorder:Slow,recorder:Recorder", "--output.upload_s=0.5")
    result = run_cli(*train_args(here / "run", SHORT, *settings))
    assert result.status == 0
    assert time.monotonic() - start < 50
    (line,) = [line for line in result.out.splitlines() if "recorder:Slow" in line]
    assert line.startswith("logger recorder:Slow: did not end in time; missing: 10 ticks, 2 grids")
    assert re.search(r"; in on_tick for \d+ s$", line)
    assert len(calls_of(here / "calls.jsonl", "tick")) == 10
    assert final_tensors(here / "run") == final_tensors(finished)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Raising(pg.Logger):
    """Raises an error in its first tick, and another one when it is closed."""

    def __init__(self, error: BaseException):
        self.error = error

    def on_tick(self, stats: Any, images: int) -> None:
        raise self.error

    def close(self, error: str = "") -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt("x"), "KeyboardInterrupt: x"),
        (BaseException("y"), "BaseException: y"),
        (Unprintable(), "Unprintable"),
    ],
)
def test_whatever_a_logger_raises_is_one_line(error, text):
    lines: list[str] = []
    loggers = LoggerSet([Raising(error)], pg.RunInfo("run", None, {}), lines.append, upload_s=60)
    loggers.on_tick({}, 1)
    loggers.close()
    assert lines == [f"logger Raising: {text}. It logs nothing more; training goes on"]


def test_the_id_of_a_run_is_text():
    lines: list[str] = []
    logger = pg.Logger()
    with mock.patch.object(logger, "on_start", return_value=42):
        loggers = LoggerSet([logger], pg.RunInfo("run", None, {}), lines.append, upload_s=60)
        loggers.on_tick({}, 1)
        loggers.close()
    assert "TypeError: the id of the run is int, not str" in lines[0]


class Chosen(pg.Logger):
    """Chooses the id of its run, and does not start."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def new_run_id(self, info: pg.RunInfo) -> str:
        return f"chosen {len(self.started)}"

    def on_start(self, info: pg.RunInfo) -> None:
        self.started.append(info.run_id)
        raise OSError("the server is gone")


def test_a_chosen_id_is_kept_though_the_logger_does_not_start(tmp_path):
    logger = Chosen()
    for _ in range(2):
        loggers = LoggerSet([logger], pg.RunInfo("run", tmp_path, {}), lambda line: None, upload_s=60)
        loggers.on_tick({}, 1)
        loggers.close()
    assert logger.started == ["chosen 0", "chosen 0"]
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"Chosen": "chosen 0"}


class Gate(pg.Logger):
    """Waits in its first tick until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.ticks: list[int] = []
        self.grids = 0

    def on_tick(self, stats: Any, images: int) -> None:
        self.ticks.append(images)
        assert self.opened.wait(60)

    def on_images(self, path: Path, pictures: Any, images: int) -> None:
        self.grids += 1


def test_what_a_slow_logger_misses_is_counted():
    gate = Gate()
    lines: list[str] = []
    loggers = LoggerSet([gate], pg.RunInfo("run", None, {}), lines.append, upload_s=60)
    with mock.patch.dict(logger_thread.EVENTS, {"on_tick": ("tick", 5), "on_images": ("grid", 2)}):
        for images in range(9):
            loggers.on_tick({}, images)
        for images in range(3):
            loggers.on_images(Path("a.png"), np.zeros((1, 8, 8, 3), np.uint8), images)
    gate.opened.set()
    loggers.close()
    assert gate.ticks == [*range(5)]
    assert gate.grids == 2
    assert lines == ["logger Gate: slower than the run; dropped 4 ticks, 1 grid"]


def test_a_logger_starts_again_after_another_rank_has_logged():
    class Names(pg.Logger):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_start(self, info: pg.RunInfo) -> None:
            self.events.append("start")

        def on_tick(self, stats: Any, images: int) -> None:
            self.events.append(f"tick {images}")

        def close(self, error: str = "") -> None:
            self.events.append(f"close {error}".strip())

    names = Names()
    loggers = LoggerSet([names], pg.RunInfo("run", None, {}), print, upload_s=60)
    loggers.release()
    assert names.events == []
    loggers.on_tick({}, 1)
    loggers.release()
    loggers.close()
    assert names.events == ["start", "tick 1", "close another rank logs now"]
    loggers.on_tick({}, 2)
    loggers.close()
    assert names.events[3:] == ["start", "tick 2", "close"]


# Names that cannot be used ----------------------------------------------------------------------------


def test_unknown_loggers_are_refused(here):
    command = train_args(here / "run", SHORT, "-n")
    assert "--output.loggers: there is no wanbd; did you mean wandb?" in usage_error(*command, "--output.loggers=wanbd")
    with advises("--output.loggers=tensorboard: is listed more than once. Use it once"):
        check_loggers(["tensorboard", "tensorboard"])
    check_loggers(["tensorboard"])
    with advises("takes no settings here. Use the environment variables of tensorboard"):
        check_loggers([{"name": "tensorboard", "folder": "a"}])
    check_loggers([{"name": "tensorboard"}])
    assert run_cli(*command, "--output.loggers=").status == 0


def test_a_missing_package_is_named(monkeypatch):
    with monkeypatch.context() as without, advises("needs the package mlflow. Use pip install mlflow-skinny"):
        without.setattr(importlib.util, "find_spec", lambda name: None)
        check_loggers(["mlflow"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "it is installed")
    check_loggers(["mlflow"])


def test_classes_that_do_not_work_are_refused(here):
    with advises("makes a NoLogger. Use a class derived from paragan.Logger"):
        check_loggers(["recorder:NoLogger"])
    check_loggers(["recorder:Recorder"])
    with advises("Use the module:Class of a module that is installed or in the current folder"):
        check_loggers(["nowhere:Recorder"])
    with advises("settings: got an unexpected keyword argument 'colour'. Use those of (path='calls.jsonl')"):
        check_loggers([{"name": "recorder:Recorder", "colour": "red"}])
    check_loggers([{"name": "recorder:Recorder", "path": "red"}])


# TensorBoard ------------------------------------------------------------------------------------------


def test_tensorboard_has_the_lines_of_stats_and_the_grids(finished):
    events = EventAccumulator(str(finished))
    events.Reload()
    rows = lines_of(finished / "stats.jsonl")
    names = {name for row in rows for name in row} - {"Data/decisions"}
    assert set(events.Tags()["scalars"]) == names
    for name in names - {"Timing/aside_s", "Timing/eval_s"}:  # the last line was completed after scoring
        expected = [(1000 * row["Progress/kimg"], np.float32(row[name])) for row in rows if name in row]
        assert [(event.step, np.float32(event.value)) for event in events.Scalars(name)] == expected
    assert events.Tags()["images"] == ["fakes"]
    grids = events.Images("fakes")
    assert [(event.step, event.width, event.height) for event in grids] == [(16, 64, 64), (160, 64, 64)]


def test_a_run_without_loggers(here, finished):
    run = train_tiny(here / "run", SHORT, "--output.loggers=")
    assert not list(run.glob("events.out*"))
    assert not (run / "loggers.json").exists()
    assert final_tensors(run) == final_tensors(finished)
