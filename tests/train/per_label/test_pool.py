"""Test `paragan pool`, which makes one model of the runs of single labels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import paragan
from advice import Case, advises
from example_runs import model_files
from paragan.core.jsonl import read_jsonl
from paragan.train.per_label.pool import pool
from processes import TINY_RUN_ARGS, run_cli, train_interrupted, usage_error

IMAGES = np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8)
LABELS = np.repeat([0, 1, 2], [30, 20, 10])


def train(folder: Path, label: int | None, *more: str) -> None:
    fields = ["--kimg=0.032", "--evaluation.metrics=[]", f"--data={folder.parent}/three.npz", f"--run-dir={folder}"]
    if label is not None:
        fields += [f"--data.only={label}", f"--seed={label}"]
    result = run_cli("train", *TINY_RUN_ARGS, *fields, *more)
    assert result.status == 0, result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a run of each of its three labels. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs")
    np.savez(folder / "three.npz", images=IMAGES, labels=LABELS)
    for label in range(3):
        train(folder / f"of {label}", label)
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be changed; its data are those of `trained`."""
    return shutil.copytree(trained, tmp_path / "runs")


def test_the_model_is_that_of_a_per_label_run(trained, tmp_path):
    fields = ("--strategy=per-label", "--kimg=0.096", "--output.tick_kimg=0.048", "--evaluation.metrics=[]")
    whole = tmp_path / "whole"
    result = run_cli("train", *TINY_RUN_ARGS, *fields, f"--data={trained}/three.npz", f"--run-dir={whole}")
    assert result.status == 0, result
    pooled = run_cli("pool", trained, "--out", tmp_path / "pooled")
    assert (pooled.status, pooled.out.count("3 generators")) == (0, 1), pooled
    assert model_files(tmp_path / "pooled") == model_files(whole)
    assert run_cli("pool", whole / "labels", "--out", tmp_path / "labels").status == 0
    assert model_files(tmp_path / "labels") == model_files(whole)


def test_it_is_sampled_scored_and_exported_as_any_model(runs, tmp_path):
    assert pool(runs, runs) == 3
    model = paragan.load(runs)
    assert model.sampler.prior.probabilities == (30 / 60, 20 / 60, 10 / 60)
    assert model.sample(5, labels=[2, 0]).shape == (5, 8, 8, 1)
    assert run_cli("sample", runs, "--labels", "0,2", "--out", tmp_path / "grid.png").status == 0
    assert run_cli("export", runs, "--out", tmp_path / "exported").status == 0
    scored = run_cli("eval", runs, "--data", runs / "three.npz", "--metrics", "fd", "--count", "20")
    assert scored.status == 0, scored
    assert read_jsonl(runs / "metrics.jsonl")
    advice = "is a model without its run. Use --data PATH to say what it is scored against"
    assert advice in usage_error("eval", runs)


def test_pooled_again_it_has_the_new_generator(runs):
    pool(runs, runs)
    before = model_files(runs)
    shutil.rmtree(runs / "of 1")
    train(runs / "again", 1, "--seed=7")
    pool(runs, runs)
    changed = {name for name, data in model_files(runs).items() if data != before[name]}
    assert changed == {"0001/model.safetensors", "0001/config.json"}
    assert not list(runs.glob(".pool-*"))


def test_missing_labels_are_trained_or_allowed_as_advised(runs, check_advice):
    shutil.move(runs / "of 1", runs.parent / "of 1")
    shutil.rmtree(runs / "of 2")
    check_advice(
        Case(
            f"pool {runs}",
            f"{runs}: has no run of label 1 (1), 2 (2). Train them, or use --allow-missing",
            ("--allow-missing",),
        )
    )
    model = paragan.load(runs)
    assert model.sampler.prior.probabilities == (1.0, 0.0, 0.0)
    assert set(model.labels(20)) == {0}
    with advises("no generator for label 2 (2): it had no run in the pool. Train one, and `paragan pool` adds it"):
        model.sample(1, labels=[2])
    shutil.move(runs.parent / "of 1", runs / "of 1")
    train(runs / "of 2", 2)
    assert pool(runs, runs) == 3
    assert paragan.load(runs).sample(1, labels=[2]).shape == (1, 8, 8, 1)


def test_runs_of_single_labels_are_pooled_before_they_are_sampled_as_advised(runs):
    with advises(f"{runs}: holds runs of single labels. Run `paragan pool {runs}`, which makes one model of them"):
        paragan.load(runs)
    assert run_cli("pool", runs).status == 0
    assert paragan.load(runs).sample(3).shape == (3, 8, 8, 1)


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_runs_gets_one_as_advised(name, trained, tmp_path):
    folder = tmp_path / name
    if name == "empty":
        folder.mkdir()
    with advises(f"Train label K with `paragan train RECIPE --data.only=K --run-dir {folder}/K`") as refusal:
        pool(folder, folder)
    problem = {"empty": "has no run folders in it", "missing": "does not exist"}[name]
    assert str(refusal.value).startswith(f"{folder}: {problem}. ")
    folder.mkdir(exist_ok=True)
    shutil.copy(trained / "three.npz", folder)
    train(folder / "0", 0)
    assert pool(folder, folder, allow_missing=True) == 1
    assert run_cli("export", folder, "--out", tmp_path / "exported").status == 0
    assert len(list((tmp_path / "exported").glob("*/model.safetensors"))) == 1


def test_the_folder_of_all_runs_is_given_as_advised(runs):
    with advises(f"{runs}/of 1: is a run itself. Give the folder that holds the runs of all labels"):
        pool(runs / "of 1", runs)
    assert pool(runs, runs) == 3


def test_a_second_run_of_a_label_is_moved_as_advised(runs):
    shutil.copytree(runs / "of 1", runs / "other")
    with advises(f"label 1: {runs}/of 1 and {runs}/other are both runs of it. Move one of them elsewhere"):
        pool(runs, runs)
    (runs / "other").rename(runs.parent / "elsewhere")
    assert pool(runs, runs) == 3


def test_a_run_of_all_labels_is_moved_or_trained_on_one_as_advised(runs):
    shutil.rmtree(runs / "of 1")
    train(runs / "other", None)
    with advises("(data.only is not set). Move it elsewhere, or train it with --data.only=K") as refusal:
        pool(runs, runs)
    assert str(refusal.value).startswith(f"{runs}/other: is not the run of one label ")
    (runs / "other").rename(runs.parent / "elsewhere")
    train(runs / "other", 1)
    assert pool(runs, runs) == 3


@pytest.mark.parametrize("has_model", [False, True])
def test_a_run_that_was_stopped_is_resumed_as_advised(has_model, runs):
    shutil.rmtree(runs / "of 1")
    fields = ("--kimg=0.032", "--evaluation.metrics=[]", f"--data={runs}/three.npz", "--data.only=1", "--seed=1")
    train_interrupted(runs / "of 1", 0, *fields)
    if not has_model:
        shutil.rmtree(runs / "of 1" / "model")
    with advises("of 0.032 kimg. Resume it first") as refusal:
        pool(runs, runs)
    assert str(refusal.value).startswith(f"{runs}/of 1: is not finished, at {0.016 if has_model else 0:g} of 0.032 ")
    train(runs / "of 1", 1)
    assert pool(runs, runs) == 3


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("nets.latent", "9", "networks have latent=9"),
        ("nets.width", "6", "networks have width=6"),
        ("data.resolution", "16", "images have resolution=16"),
    ],
)
def test_a_run_of_other_networks_is_trained_again_as_advised(field, value, problem, runs):
    shutil.rmtree(runs / "of 1")
    train(runs / "of 1", 1, f"--{field}={value}")
    with advises("Train one of them again, as the other") as refusal:
        pool(runs, runs)
    assert str(refusal.value).startswith(f"{runs}/of 1: its {problem}, and those of {runs}/of 0 ")
    shutil.rmtree(runs / "of 1")
    train(runs / "of 1", 1)
    assert pool(runs, runs) == 3


@pytest.mark.parametrize("images", [IMAGES, 255 - IMAGES[:40]], ids=["relabelled", "other"])
def test_runs_of_other_data_are_refused_and_data_that_moved_are_named_as_advised(images, runs):
    data = runs / "elsewhere.npz"
    np.savez(data, images=images, labels=LABELS[: len(images)][::-1])
    advice = f"was not trained on label 0 of {data}. Use runs of the same data, and --data PATH if it has moved"
    with advises("Use runs of the same data, and --data PATH if it has moved") as refusal:
        pool(runs, runs, data=str(data))
    assert str(refusal.value) == f"{runs}/of 0: {advice}"
    np.savez(data, images=IMAGES, labels=LABELS)
    assert pool(runs, runs, data=str(data)) == 3


def test_damaged_weights_are_not_pooled(runs):
    weights = runs / "of 2" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    long_ago = weights.stat().st_mtime - 3600  # so that no process is writing there
    os.utime(weights.parent, (long_ago, long_ago))
    assert "the weights do not match config.json" in usage_error("pool", runs)
    assert not (runs / "model").exists()


def test_other_models_are_not_overwritten_but_a_new_folder_is_used_as_advised(runs, check_advice):
    shutil.copytree(runs / "of 0" / "model", runs.parent / "copied" / "model")
    for out in (runs / "of 0", runs.parent / "copied"):
        check_advice(
            Case(
                f"pool '{runs}' --out='{out}'",
                f"--out {out}: holds a run or another model. Choose another folder",
                ("~out --out=NEW/new",),
            )
        )
