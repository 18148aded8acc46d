"""A label number means one thing: an int is the index of a class, from the data to the samples and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paragan
from paragan.core.errors import UsageError
from paragan.data.dataset import load_data
from paragan.models.model import parse_label
from processes import TINY_RUN_ARGS, run_cli, usage_error

NAMES = tuple(str(number) for number in range(1, 13))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of classes called 1 to 12. The brightness of an image says its class."""
    folder = tmp_path_factory.mktemp("numbered") / "data"
    for number in range(1, 13):
        (folder / str(number)).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / str(number) / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def run(numbered: Path) -> Path:
    folder = numbered.parent / "run"
    arguments = ["train", "folder", *TINY_RUN_ARGS[1:], f"--data={numbered}", f"--run-dir={folder}", "--kimg=0.016"]
    result = run_cli(*arguments, "--evaluation.metrics=[]")
    assert result.status == 0, result
    return folder


def test_numeric_class_names_are_sorted_by_value(numbered):
    data = load_data(str(numbered), resolution=None)
    assert data.classes == NAMES
    assert data.labels is not None
    for label in range(12):
        assert data.images[np.flatnonzero(data.labels == label)[0], 0, 0, 0] == 20 * (label + 1)


def test_an_int_is_an_index(run):
    model = paragan.load(run)
    assert model.classes == NAMES
    indices = model.labels(12, labels=range(12))
    assert indices is not None
    assert indices.tolist() == list(range(12))
    drawn = model.labels(20, seed=3)
    assert drawn is not None
    assert (model.labels(20, labels=drawn) == drawn).all()
    assert (model.sample(12, labels=indices) == model.sample(12, labels=list(range(12)))).all()


@pytest.mark.parametrize(
    ("label", "index"), [("12", 11), ("0", 0), ("name:3", 2), ("index:3", 3), (3, 3), (np.int64(3), 3)]
)
def test_labels_of_one_reading(label, index):
    assert parse_label(label, NAMES) == index


def test_a_str_of_two_readings_is_refused_with_both(run):
    line = usage_error("sample", run, "--labels", "3", "--out", run / "a.png")
    assert "could be the class named 3 (index 2) or the class of index 3 (named 4). Use name:3 or index:3" in line
    for label in ("name:3", "index:3"):  # what the message says
        assert run_cli("sample", run, "--labels", label, "--out", run / "a.png", "--count=1").status == 0


@pytest.mark.parametrize("label", [12, -1, "13", "index:12", "name:13", "name:x", "cat", 10**30])
def test_missing_classes_are_refused(label):
    with pytest.raises(UsageError, match="there is no class"):
        parse_label(label, NAMES)


@pytest.mark.parametrize("out", ["samples.npz", "samples"])
def test_samples_keep_the_names_of_their_classes(out, run, tmp_path):
    labels = ",".join(f"name:{name}" for name in NAMES)
    result = run_cli("sample", run, "--labels", labels, "--count=24", "--out", tmp_path / out)
    assert result.status == 0, result
    data = load_data(str(tmp_path / out), resolution=None)
    assert data.classes == NAMES
    expected = paragan.load(run).sample(12, labels=range(12))
    for label in range(12):
        assert data.labels is not None
        assert (data.images[np.flatnonzero(data.labels == label)[0]] == expected[label]).all()


@pytest.mark.parametrize("label", [1.0, None, b"cat", np.float32(1)])
def test_other_values_than_indices_and_names_are_refused(label):
    with pytest.raises(UsageError, match=r"is not a class\. Use an index"):
        parse_label(label, ("cat", "dog"))
