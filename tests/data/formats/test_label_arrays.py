"""Labels in arrays of an npz or an HDF5 file: read in every usual form, or refused in one line with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fake_datasets import open_error, random_images
from paragan.data.open_source import open_source

IMAGES = random_images(8)
LABELS = [index % 2 for index in range(8)]


def write_npz(path: Path, **arrays: Any) -> str:
    np.savez(path.with_suffix(".npz"), images=IMAGES, **arrays)
    return str(path.with_suffix(".npz"))


def write_hdf5(path: Path, **arrays: Any) -> str:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for key, values in ({"imgs": IMAGES} | arrays).items():
            file[key] = values
    return str(path.with_suffix(".h5"))


@pytest.fixture(params=[write_npz, write_hdf5])
def write(request, tmp_path):
    """Write arrays beside images as an npz or as HDF5."""
    return lambda **arrays: request.param(tmp_path / str(len(list(tmp_path.iterdir()))), **arrays)


def test_of_several_arrays_of_labels_the_user_chooses(write):
    path = write(coarse_label=[0, 1] * 4, fine_label=[0, 1, 2, 3] * 2)
    assert (
        "has several labels (coarse_label, fine_label). Choose with --data.label_key=coarse_label, or use "
        "--data.labels=false"
    ) in open_error(path)
    for key, count in (("coarse_label", 2), ("fine_label", 4)):
        assert len(open_source(path, labels=key).classes) == count
    assert open_source(path, labels=False).labels is None


@pytest.mark.parametrize("key", ["fine_label", "lables", "Lable", "Label_ids"])
def test_an_array_of_another_name_that_looks_like_labels_is_chosen_or_left_out(write, key):
    path = write(**{key: LABELS})
    assert f"has no labels, but {key}. Use --data.label_key={key} if these are the labels, or --data.labels=false" in (
        open_error(path)
    )
    source = open_source(path, labels=key)
    assert source.labels is not None
    assert source.labels.tolist() == LABELS
    assert open_source(path, labels=False).labels is None


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["dog", "cat"] * 4, [1, 0] * 4, ("cat", "dog")),
        ([b"caf\xc3\xa9", b"cat"] * 4, [0, 1] * 4, ("caf\u00e9", "cat")),
        ([b"0", b"1"] * 4, LABELS, ("0", "1")),
        (np.array(LABELS, np.float32), LABELS, ("0", "1")),
        (np.array(LABELS, np.float16), LABELS, ("0", "1")),
        (np.array(LABELS, bool), LABELS, ("0", "1")),
        (np.eye(2)[LABELS], LABELS, ("0", "1")),
        (np.eye(2, dtype=bool)[LABELS], LABELS, ("0", "1")),
    ],
)
def test_arrays_of_labels(write, labels, expected, classes):
    source = open_source(write(labels=labels))
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    assert (source.labels.tolist(), source.classes) == (expected, classes)
    assert source.notes == ()


def test_names_are_among_the_classes_of_the_file(write):
    source = open_source(write(labels=["dog", "cat"] * 4, classes=["dog", "ant", "cat"]))
    assert source.labels is not None
    assert (source.labels.tolist(), source.classes) == ([0, 2] * 4, ("dog", "ant", "cat"))
    path = write(labels=["dog", "bee"] * 4, classes=["dog", "ant", "cat"])
    assert "label bee is not in classes. Add it to them, or use --data.labels=false" in open_error(path)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array(LABELS) / 2, "labels are float64 and hold 0.5, which is no class. Write whole numbers from 0 on"),
        ([0.0, np.nan] * 4, "hold nan, which is no class"),
        ([0.0, np.inf] * 4, "hold inf, which is no class"),
        (
            np.eye(3)[LABELS],
            "labels are one-hot, but 1 of 3 columns hold no 1 (column 2). Write labels[:, labels.any(0)]",
        ),
        (np.ones((8, 2)), "labels are [8, 2] and not one-hot"),
        (np.full((8, 2), np.nan), "labels are [8, 2] and not one-hot"),
        ([["a", "b"]] * 8, "an image"),
        (np.zeros((8, 1, 1)), "Write labels.reshape(-1), or use"),
        (np.zeros((8, 2, 2)), "labels are [8, 2, 2], expected [8], one an image"),
        (1, "labels is a single value, expected [8], one an image. Write np.full(8, labels), or use"),
        ([b"a", b"\xff"] * 4, "which is no class"),
        (["a", "0"] * 4, "its label is the number 0, and others are names such as a"),
        (["a", ""] * 4, "labels hold '', which is no class"),
    ],
)
def test_arrays_that_are_no_labels_can_be_left_out(write, labels, expected):
    path = write(labels=labels)
    message = open_error(path)
    assert expected in message
    assert "--data.labels=false" in message
    assert open_source(path, labels=False).labels is None


def test_what_the_advice_says_can_be_read(write):
    labels = np.eye(3)[LABELS]
    for mended in (labels[:, labels.any(0)], np.zeros((8, 1, 1)).reshape(-1), np.full(8, 0)):
        assert open_source(write(labels=mended)).labels is not None
