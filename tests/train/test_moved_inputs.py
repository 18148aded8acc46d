"""A run is recognised by what it reads, not by where that lies: data, initial weights and teachers may be moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from advice import Case
from paragan.core.schema import read_yaml
from paragan.models.weights_fingerprint import weights_fingerprint
from processes import TINY_RUN_ARGS, final_tensors, logged_steps, run_cli, train_interrupted, train_tiny, usage_error

SHORT = "--kimg=0.16"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save_data(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    images = np.random.default_rng(seed).integers(0, 256, (64, 8, 8, 1), np.uint8)
    np.savez(path, images=images, labels=np.arange(64) % 2)
    return path


def train(data: str, *more: str):
    return run_cli("train", *TINY_RUN_ARGS, SHORT, f"--data={data}", *more)


def test_a_moved_project_resumes(tmp_path, monkeypatch):
    save_data(tmp_path / "before/a.npz")
    monkeypatch.chdir(tmp_path / "before")
    assert train("a.npz").status == 0
    undisturbed = final_tensors(tmp_path / "before/runs/00000-digits-dcgan-sync-r1-b16")
    shutil.rmtree(tmp_path / "before/runs")
    train_interrupted(Path("runs/00000-mine"), 3, SHORT, "--data=a.npz")
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path / "after")
    assert train("a.npz").status == 0
    (run,) = Path("runs").iterdir()
    assert logged_steps(run) == list(range(1, 11))
    assert final_tensors(run) == undisturbed
    assert read_yaml(run / "run.yaml")["data"]["path"] == str(tmp_path / "after/a.npz")
    assert train("a.npz", "--kimg=0.176", f"--resume={run}").status == 0


@pytest.mark.parametrize("images", ["streamed images", "images in memory"])
def test_moved_data_resume_by_name(tmp_path, images):
    more = ("--data.cache=stream",) if images == "streamed images" else ()
    data = save_data(tmp_path / "a.npz")
    train_interrupted(tmp_path / "run", 3, SHORT, f"--data={data}", *more)
    moved = shutil.move(data, tmp_path / "b.npz")
    assert train(moved, *more, f"--run-dir={tmp_path / 'run'}").status == 0


def test_other_data_at_another_path_are_another_run(tmp_path):
    train_interrupted(tmp_path / "runs/00000-mine", 3, SHORT, f"--data={save_data(tmp_path / 'a.npz')}")
    other = save_data(tmp_path / "b.npz", seed=1)
    assert "data.path was" in usage_error("train", *TINY_RUN_ARGS, f"--data={other}", "--resume=runs/00000-mine")
    assert train(str(other)).status == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_other_data_at_the_same_path_are_replaced_or_trained_elsewhere_as_advised(tmp_path, check_advice):
    data = save_data(tmp_path / "a.npz")
    run = train_interrupted(tmp_path / "runs/00000-mine", 3, SHORT, f"--data={data}")
    save_data(data, seed=1)
    check_advice(
        Case(
            " ".join(["train", *TINY_RUN_ARGS, SHORT, f"--data={data}"]),
            f"--data {data}: not the images that {run.relative_to(tmp_path)} was trained on. Use those, "
            "or another --run-dir",
            ("--run-dir=NEW/new",),
        )
    )
    save_data(data)
    assert train(str(data)).status == 0
    assert logged_steps(run) == list(range(1, 11))


def test_moved_initial_weights_resume(tmp_path, finished):
    first = shutil.copytree(finished / "model", tmp_path / "first")
    train_interrupted(tmp_path / "runs/00000-mine", 3, SHORT, f"--init-from={first}")
    second = first.rename(tmp_path / "second")
    train_interrupted(tmp_path / "runs/00000-mine", 5, SHORT, f"--init-from={second}")
    shutil.rmtree(second)  # a resume does not read them
    assert run_cli("train", *TINY_RUN_ARGS, SHORT, f"--init-from={second}").status == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["00000-mine"]


def test_changed_initial_weights_are_named(tmp_path, finished):
    model = shutil.copytree(finished / "model", tmp_path / "model")
    run = train_interrupted(tmp_path / "run", 3, SHORT, f"--init-from={model}")
    shutil.rmtree(model)
    shutil.copytree(train_tiny(tmp_path / "other", "--kimg=0.016", "--seed=1") / "model", model)
    ended = run_cli("train", *TINY_RUN_ARGS, SHORT, f"--init-from={model}", f"--run-dir={run}")
    assert ended.status == 0
    assert "has other weights now; this run started from the former ones" in ended.out


def test_other_initial_weights_at_another_path_are_another_run(tmp_path, finished):
    run = train_interrupted(tmp_path / "run", 3, SHORT, f"--init-from={finished}")
    other = train_tiny(tmp_path / "other", "--kimg=0.016", "--seed=1")
    message = usage_error("train", *TINY_RUN_ARGS, SHORT, f"--init-from={other}", f"--run-dir={run}")
    assert "init_from was" in message


def test_labels_of_moved_data_resume(tmp_path):
    per_label = ("--strategy=per-label", "--evaluation.metrics=[]")
    data = save_data(tmp_path / "a.npz")
    run = tmp_path / "runs/00000-mine"
    assert train(str(data), *per_label, f"--run-dir={run}").status == 0
    moved = shutil.move(data, tmp_path / "b.npz")
    assert train(moved, *per_label, "--kimg=0.32", f"--run-dir={run}").status == 0
    assert read_yaml(run / "run.yaml")["data"]["path"] == str(moved)
    assert logged_steps(run / "labels/0001") == list(range(1, 11))
    shutil.move(moved, data)
    assert train(str(data), *per_label, "--kimg=0.32", f"--run-dir={run}").status == 0
    assert read_yaml(run / "run.yaml")["data"]["path"] == str(data)  # also where only the path differs


def test_a_fingerprint_of_weights_is_of_files_and_names(tmp_path):
    folder = tmp_path / "model"
    assert weights_fingerprint(folder) == ""
    for name in ("0000", "0001"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(name.encode())
    before = weights_fingerprint(folder)
    assert weights_fingerprint(folder.rename(tmp_path / "moved")) == before
    (tmp_path / "moved/0001").rename(tmp_path / "moved/0002")
    assert weights_fingerprint(tmp_path / "moved") != before


def test_a_run_with_moved_data_is_followed_and_scored(tmp_path):
    data = save_data(tmp_path / "a.npz")
    run = tmp_path / "run"
    assert train(str(data), "--evaluation.metrics=[]", f"--run-dir={run}").status == 0
    moved = shutil.move(data, tmp_path / "b.npz")
    scores = ("--metrics=fd", "--count=16")
    assert "a.npz does not exist" in usage_error("eval", run, *scores, "--follow")
    ended = run_cli("eval", run, *scores, "--follow", f"--data={moved}")
    assert ended.status == 0, ended.err
    assert "1 model scored" in ended.out
    other = save_data(tmp_path / "other.npz", seed=1)
    message = usage_error("eval", run, "--metrics=kid", "--count=16", "--follow", f"--data={other}")
    assert "not the images that" in message
    assert run_cli("eval", run, "--metrics=kid", "--count=16", f"--data={other}").status == 0  # as it says
