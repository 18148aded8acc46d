"""What the messages of runs per label advise works: of their folders, budgets, labels and workers."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny_run
from advice import Case, advises
from paragan.comm.world import World
from paragan.config.run import to_saved_dict
from paragan.core.schema import read_yaml
from paragan.train import trainer
from paragan.train.console import RunConsole
from paragan.train.per_label import finalize, launch_workers
from paragan.train.per_label.label_dirs import SEEDS_FILE, label_seed
from paragan.train.per_label.lease_queue import LeaseQueue
from paragan.train.per_label.worker import TimeBudget, TimeBudgetTooShort
from paragan.train.run_dir import RunDir
from processes import TINY_RUN_ARGS, run_cli

IMAGES = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)
LABELS = np.arange(40) % 2


@dataclass(frozen=True)
class PerLabelRun:
    """A finished run of two labels."""

    data: Path
    folder: Path

    def command(self, *more: str) -> list[str]:
        options = ("--strategy=per-label", "--evaluation.metrics=[]", "--kimg=0.032", f"--data={self.data}")
        return ["train", *TINY_RUN_ARGS, *options, f"--run-dir={self.folder}", *more]


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip report pages and figures, which are slow."""
    for module in (trainer, finalize):
        for page in ("write_report", "make_final_figures"):
            monkeypatch.setattr(module, page, lambda *_: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PerLabelRun:
    folder = tmp_path_factory.mktemp("two labels")
    run = PerLabelRun(folder / "two.npz", folder / "run")
    np.savez(run.data, images=IMAGES, labels=LABELS)
    assert run_cli(*run.command()).status == 0
    return run


@pytest.fixture
def copy(trained: PerLabelRun, tmp_path: Path) -> PerLabelRun:
    """A copy that may be changed."""
    data = shutil.copy(trained.data, tmp_path / "two.npz")
    return PerLabelRun(data, shutil.copytree(trained.folder, tmp_path / "run"))


def test_a_budget_is_that_of_the_others_or_they_are_stopped_as_advised(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    run = tiny_run.make_run("strategy=per-label", "kimg=1")
    folder.write_run_config(to_saved_dict(run))
    lease = LeaseQueue(folder.path / "queue", 60.0).acquire("0000", 0, {})
    assert lease
    with advises("with kimg=1.0. Use that, or stop the others first") as refusal:
        launch_workers._update_budget(folder, replace(run, kimg=2.0))
    assert str(refusal.value).startswith(f"kimg=2.0: {folder.path} is being trained by ")
    launch_workers._update_budget(folder, run)
    lease.release("free")
    launch_workers._update_budget(folder, replace(run, kimg=2.0))
    assert read_yaml(folder.path / "run.yaml")["kimg"] == 2.0


def test_other_images_are_replaced_or_trained_elsewhere_as_advised(copy, check_advice):
    assert run_cli(*copy.command()).status == 0  # notes where the copy of the data is
    model = (copy.folder / "model" / "config.json").read_bytes()
    np.savez(copy.data, images=IMAGES, labels=1 - LABELS)
    check_advice(
        Case(
            shlex.join(copy.command()),
            f"--data {copy.data}: not the images that {copy.folder} is trained on. Use those, or another --run-dir",
            ("~run-dir --run-dir=NEW/new",),
        )
    )
    assert (copy.folder / "model" / "config.json").read_bytes() == model
    np.savez(copy.data, images=IMAGES, labels=LABELS)
    assert run_cli(*copy.command("--kimg=0.064")).status == 0


@pytest.mark.parametrize(("path", "error"), [("two.npz/run", errno.ENOTDIR), ("full", errno.ENOSPC)])
def test_a_folder_that_cannot_be_written_is_replaced_as_advised(path, error, copy, tmp_path, monkeypatch, check_advice):
    """One whose parent is a file, and one in which the disk is full once run.yaml is there."""
    check_writable = launch_workers._check_writable

    def raise_if_full(folder: Path) -> None:
        if folder.name == "full":
            raise OSError(error, os.strerror(error))
        check_writable(folder)

    monkeypatch.setattr(launch_workers, "_check_writable", raise_if_full)
    refused = replace(copy, folder=tmp_path / path)
    check_advice(
        Case(
            shlex.join(refused.command()),
            f"{refused.folder}: cannot be written ({os.strerror(error)}). Use another --run-dir or --outdir",
            ("~run-dir --run-dir=NEW/new", "~run-dir --outdir=NEW/runs"),
        )
    )


def test_seeds_that_cannot_be_read_are_removed_as_advised(tmp_path):
    path = tmp_path / SEEDS_FILE
    path.parent.mkdir()
    path.write_text("x")
    with advises("Remove it to use the seeds of the run") as refusal:
        label_seed(tmp_path, 1, default=5)
    assert str(refusal.value).startswith(f"{path}: cannot be read (")
    path.unlink()
    assert label_seed(tmp_path, 1, default=5) == 5


def test_one_label_of_several_is_replaced_as_advised(copy, check_advice):
    model = copy.folder / "labels" / "0000"
    check_advice(
        Case(
            f"label {copy.folder} 0,1 --replace-with={model}",
            f"--replace-with {model}: is for one label, and 0,1 are several. Name one",
            ("~0,1 0", "~0,1 1"),
        )
    )


def test_a_label_in_training_is_retrained_once_it_is_stopped_as_advised(copy, check_advice):
    queue = LeaseQueue(copy.folder / "queue", 60.0)
    entry = queue.entry("0001")
    assert entry
    lease = queue.acquire("0001", entry.lease_number, {})
    assert lease
    retrain = ["label", str(copy.folder), "1", "--retrain"]
    check_advice(Case(shlex.join(retrain), "Wait, or stop it first", ()))
    lease.release("free")
    assert run_cli(*retrain).status == 0


def test_a_time_budget_holds_a_step_once_it_is_as_long_as_advised():
    clock = SimpleNamespace(seconds=0.25, step=1, is_done=False, finish_now=lambda: None)
    session: Any = SimpleNamespace(clock=clock, world=World.solo())
    with advises(
        "--strategy.minutes: leaves 0.03 s for this label, and its first step took 0.25 s. Use 17 times as much, "
        "or more",
        TimeBudgetTooShort,
    ) as refusal:
        TimeBudget(0.03, RunConsole(False))(session)
    (factor,) = re.findall(r"Use (\d+) times", str(refusal.value))
    for times in (1, 2):
        TimeBudget(0.03 * times * int(factor), RunConsole(False))(session)
