"""Files of this machine that are written over, cut or replaced while they are used: never a crash or a wrong label."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fake_datasets import random_images
from paragan.core.errors import RunError
from paragan.data.dataset import load_data
from paragan.data.decode import decode_image
from paragan.data.formats import npz
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError
from paragan.data.tools.image_info import detect_format
from processes import run_cli

FORMS = ["npz", "h5", "zip", "tars", "chunked"]
OLD, NEW = random_images(60), random_images(60, seed=1)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(npz, "MIN_MMAP_BYTES", 1000)


def stored(folder: Path, form: str, images: np.ndarray) -> Path:
    """The images in a file of a form."""
    folder.mkdir()
    np.savez(folder / "made.npz", images=images, labels=np.arange(len(images)) % 3)
    if form == "npz":
        return folder / "made.npz"
    if form == "chunked":
        import h5py

        with h5py.File(folder / "made.h5", "w") as file:
            file.create_dataset("imgs", data=images, chunks=(7, 8, 8, 3), compression="gzip")
            file["labels"] = np.arange(len(images)) % 3
        return folder / "made.h5"
    out = folder / ("tars" if form == "tars" else f"made.{form}")
    assert run_cli("data", "convert", folder / "made.npz", out, "--to", form).status == 0
    return out / "shard-000000.tar" if form == "tars" else out


def written_over(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


def replaced(file: Path, other: Path) -> None:
    shutil.copyfile(other, file.with_name("new"))
    file.with_name("new").replace(file)


def cut(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def noise(file: Path, other: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(np.random.default_rng(0).bytes(size))


@pytest.mark.parametrize("change", [written_over, replaced, cut, emptied, noise])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("started", [True, False], ids=["started", "fresh"])
def test_a_changed_file_is_read_as_it_was_or_refused(tmp_path, form, change, started):
    file, other = stored(tmp_path / "old", form, OLD), stored(tmp_path / "new", form, NEW)
    result = open_source(str(file))
    if started:
        result.read(0)
    change(file, other)
    for index in range(len(OLD)):
        try:
            image = np.asarray(decode_image(result.read(index)))
        except (DecodeError, RunError) as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert (image == OLD[index]).all()


@pytest.mark.parametrize("form", ["npz", "h5", "chunked"])
def test_without_checksums_a_change_ends_the_run_by_name(tmp_path, form):
    file = stored(tmp_path / "old", form, OLD)
    result = open_source(str(file))
    os.utime(file, (1, 1))
    with pytest.raises(RunError, match=rf"^data: {file} was changed while it was used: restore it"):
        result.read(3)
    assert detect_format(open_source(str(file)).read(3)) == "pixels"
    file.unlink()


@pytest.mark.parametrize("form", FORMS)
def test_one_that_is_removed_goes_on(tmp_path, form):
    file = stored(tmp_path / "old", form, OLD)
    result = open_source(str(file))
    result.read(0)
    file.unlink()
    assert (np.asarray(decode_image(result.read(3))) == OLD[3]).all()


def test_what_is_held_in_memory_is_no_map(tmp_path):
    file = stored(tmp_path / "old", "npz", OLD)
    held = load_data(str(file), resolution=8, cache="memory")
    emptied(file, file)  # touching a map of it would end the process
    assert (held.images[:] == OLD).all()


def test_an_archive_that_grows_goes_on(tmp_path):
    file = stored(tmp_path / "old", "zip", OLD)
    result = open_source(str(file))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("more.txt", "more")
    assert (np.asarray(decode_image(result.read(3))) == OLD[3]).all()
