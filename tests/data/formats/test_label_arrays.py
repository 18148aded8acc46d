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
    return lambda **arrays: request.param(tmp_path / "set", **arrays)


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
