"""Labels in arrays of an npz or an HDF5 file: read in every usual form, or refused in one line with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from advice import advises
from fake_datasets import random_images
from paragan.data.open_source import open_source

IMAGES = random_images(8)
LABELS = [index % 2 for index in range(8)]
ONE_HOT = np.eye(3)[LABELS]


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
    with advises("(coarse_label, fine_label). Choose with --data.label_key=coarse_label, or use --data.labels=false"):
        open_source(path)
    for key, count in (("coarse_label", 2), ("fine_label", 4)):
        assert len(open_source(path, labels=key).classes) == count
    assert open_source(path, labels=False).labels is None


@pytest.mark.parametrize("key", ["fine_label", "lables", "Lable", "Label_ids"])
def test_an_array_of_another_name_that_looks_like_labels_is_chosen_or_left_out(write, key):
    path = write(**{key: LABELS})
    with advises(
        f"has no labels, but {key}. Use --data.label_key={key} if these are the labels, or --data.labels=false"
    ):
        open_source(path)
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
    with advises("label bee is not in classes. Add it, or use --data.labels=false"):
        open_source(path)
    assert open_source(path, labels=False).labels is None
    assert open_source(write(labels=["dog", "bee"] * 4, classes=["dog", "ant", "bee"])).classes == ("dog", "ant", "bee")


@pytest.mark.parametrize(
    ("labels", "refusal", "mended"),
    [
        (
            np.array(LABELS) / 2,
            advises("labels are float64 and hold 0.5, which is no class. Write whole numbers from 0 on, or use"),
            LABELS,
        ),
        ([0.0, np.nan] * 4, advises("hold nan, which is no class"), LABELS),
        ([0.0, np.inf] * 4, advises("hold inf, which is no class"), LABELS),
        (
            ONE_HOT,
            advises("1 of 3 columns hold no 1 (column 2). Write labels[:, labels.any(0)], or use --data.labels=false"),
            ONE_HOT[:, ONE_HOT.any(0)],
        ),
        (np.ones((8, 2)), advises("labels are [8, 2] and not one-hot: rows hold other numbers than 0"), LABELS),
        (np.full((8, 2), np.nan), advises("labels are [8, 2] and not one-hot"), LABELS),
        ([["a", "b"]] * 8, advises("an image"), ["a"] * 8),
        (np.zeros((8, 1, 1)), advises("Write labels.reshape(-1), or use --data.labels=false"), np.zeros(8)),
        (np.zeros((8, 2, 2)), advises("expected [8], one an image. Write them so, or use --data."), np.zeros(8)),
        (1, advises("expected [8], one an image. Write np.full(8, labels), or use --data.labels=false"), np.full(8, 0)),
        (LABELS[:3], advises("3 labels for 8 images. Give one label an image, or use --data.labels=false"), LABELS),
        ([b"a", b"\xff"] * 4, advises("which is no class"), [b"a", b"b"] * 4),
        (["a", "0"] * 4, advises("its label is the number 0, and others are names such as a"), ["a", "b"] * 4),
        (
            ["a", ""] * 4,
            advises("labels hold '', which is no class. Write numbers from 0 on or names, or use --data.labels=false"),
            ["a", "b"] * 4,
        ),
    ],
    ids=str,
)
def test_arrays_that_are_no_labels_are_mended_or_left_out(write, labels, refusal, mended):
    path = write(labels=labels)
    with refusal as error:
        open_source(path)
    assert "or use --data.labels=false" in str(error.value) or "or --data.labels=false" in str(error.value)
    assert open_source(path, labels=False).labels is None
    assert open_source(write(labels=mended)).labels is not None


def test_numbers_that_are_no_classes_are_written_as_whole_numbers(tmp_path):
    path = write_npz(tmp_path / "complex", labels=np.array(LABELS, "c8"))
    with advises(f"data: {path}: labels are complex64, expected integers or names. Write whole numbers from 0 on, or"):
        open_source(path)
    assert open_source(path, labels=False).labels is None
    path = write_npz(tmp_path / "halves", labels=np.array(LABELS) / 2)
    with advises(
        f"data: {path}: labels are float64 and hold 0.5, which is no class. Write whole numbers from 0 on, or"
    ):
        open_source(path)
    assert open_source(write_npz(tmp_path / "whole", labels=LABELS)).labels is not None


def test_rows_that_are_not_one_hot_are_written_as_one_class_an_image(tmp_path):
    path = write_npz(tmp_path / "names", labels=[["a", "b"]] * 8)
    with advises(f"data: {path}: labels are <U1 [8, 2]. Write one class an image, [8], or use --data.labels=false"):
        open_source(path)
    assert open_source(write_npz(tmp_path / "b", labels=["a", "b"] * 4)).classes == ("a", "b")
    path = write_npz(tmp_path / "ones", labels=np.ones((8, 2)))
    with advises(
        f"data: {path}: labels are [8, 2] and not one-hot: rows hold other numbers than 0 and a single 1. "
        "Write one class an image, [8], or use --data.labels=false"
    ):
        open_source(path)
    assert open_source(write_npz(tmp_path / "d", labels=LABELS)).labels is not None
