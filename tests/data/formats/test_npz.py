"""Large .npz files, which are mapped rather than read, and those far away."""

from __future__ import annotations

import mmap
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advice import advises
from fake_datasets import FakeRemoteFileSystem, fingerprint, random_images, read_all_pixels
from paragan.core.errors import RunError, UsageError
from paragan.data import decode
from paragan.data.dataset import load_data
from paragan.data.formats import npz
from paragan.data.open_source import open_source
from paragan.data.source import Source

IMAGES = random_images(30)
LABELS = np.arange(30) % 3


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(npz, "MIN_MMAP_BYTES", 1000)


def mapped(source) -> bool:
    array = source.array
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_large_images_are_mapped(tmp_path):
    np.savez(tmp_path / "a.npz", labels=LABELS, images=IMAGES, more=[1])
    result = open_source(str(tmp_path / "a.npz"))
    assert mapped(result)
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is not None
    assert result.labels.tolist() == LABELS.tolist()
    assert result.notes == ("ignored keys: more",)
    assert (load_data(str(tmp_path / "a.npz"), resolution=8).images == IMAGES).all()
    assert (load_data(str(tmp_path / "a.npz"), resolution=8, cache="stream").images[:] == IMAGES).all()


def test_their_identity_is_the_archives_checksum(tmp_path):
    other = IMAGES.copy()
    other[0, 0, 0, 0] ^= 1
    marks = []
    for images in (IMAGES, IMAGES, other):
        np.savez(tmp_path / "a.npz", images=images)
        marks.append(fingerprint(open_source(str(tmp_path / "a.npz"))))
    assert marks[0] == marks[1] != marks[2]
    assert len(marks[0]) < 100


def test_what_cannot_be_mapped_is_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=IMAGES)
    np.savez(tmp_path / "b.npz", images=np.asfortranarray(IMAGES))
    for name in ("a.npz", "b.npz"):
        result = open_source(str(tmp_path / name))
        assert not mapped(result)
        assert (read_all_pixels(result) == IMAGES).all()


def test_a_remote_npz_is_downloaded_completely(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    place = FakeRemoteFileSystem(tmp_path)
    result = npz.read_npz(place, "a.npz")
    assert (read_all_pixels(result) == IMAGES).all()
    assert place.requests == [("a.npz", 0, None)]
    monkeypatch.setattr(decode, "ram_bytes", lambda: 1000)
    with pytest.raises(UsageError, match=r"needs .* more than half of this machine's .*: copy it"):
        npz.read_npz(place, "a.npz")


def test_one_that_lies_about_its_size_is_not_mapped(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"shape": (1000, 8, 8, 3), "fortran_order": False, "descr": "|u1"})
        file.write(bytes(5000))
    with pytest.raises(UsageError, match="is not an npz, or is damaged"):
        open_source(str(tmp_path / "a.npz"))


def test_a_file_truncated_while_mapped_is_an_error(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    result = open_source(str(tmp_path / "a.npz"))
    os.truncate(tmp_path / "a.npz", 2000)  # a map of it would end the process
    with pytest.raises(RunError, match="was changed while it was used"):
        result.read(len(IMAGES) - 1)


@pytest.mark.parametrize("count", [30, 2])  # mapped, and read
def test_positional_arrays_are_images_and_labels(tmp_path, count):
    images, labels = IMAGES[:count], LABELS[:count]
    np.savez(tmp_path / "adm.npz", images, labels)
    np.savez(tmp_path / "named.npz", images=images, labels=labels)
    adm, named = (load_data(str(tmp_path / f"{name}.npz"), resolution=8) for name in ("adm", "named"))
    assert adm.fingerprint == named.fingerprint
    assert adm.classes == named.classes
    np.savez(tmp_path / "reference.npz", images, mu=np.zeros(3), sigma=np.eye(3))
    source = open_source(str(tmp_path / "reference.npz"))
    assert (read_all_pixels(source) == images).all()
    assert source.notes == ("ignored keys: mu, sigma",)


def test_positional_arrays_of_other_kinds_are_no_images(tmp_path):
    for number, arrays in enumerate(([np.zeros((3, 4))], [np.zeros(5, np.uint8)])):
        np.savez(tmp_path / f"{number}.npz", *arrays)
        with pytest.raises(UsageError, match="has no images; found arr_0"):
            open_source(str(tmp_path / f"{number}.npz"))


# Advice -----------------------------------------------------------------------------------------------------


def saved(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    x = np.array([[0.0], [np.nan], [1.0]])
    with advises("1 numbers of x are not finite as float32. Leave those records out"):
        open_source(saved(tmp_path / "a.npz", x=x))
    assert len(open_source(saved(tmp_path / "b.npz", x=x[np.isfinite(x).all(1)]))) == 2


def test_an_array_of_no_image_gets_one(tmp_path):
    path = saved(tmp_path / "a.npz", images=IMAGES[:0])
    with advises(f"data: {path}: images are [0, 8, 8, 3], no image. Give at least one"):
        open_source(path)
    assert len(open_source(saved(tmp_path / "b.npz", images=IMAGES[:1]))) == 1


def test_the_option_reads_all_channels(tmp_path):
    images = np.zeros((2, 8, 8, 6), np.uint8)
    path = saved(tmp_path / "a.npz", images=images)
    with advises("or [N, H, W]. Use --data.channels=6 (`paragan data`: `--channels 6`) to read all"):
        open_source(path)
    assert (read_all_values(open_source(path, channels=6)) == images).all()


def read_all_values(source: Source) -> np.ndarray:
    return np.stack([source.read(index) for index in range(len(source))])  # pyright: ignore[reportCallIssue]


def test_moments_are_no_images(tmp_path):
    moments = {"mu": np.zeros(3), "sigma": np.eye(3)}
    with advises("holds moments of images (mu, sigma; see `paragan data stats`). Give the images"):
        open_source(saved(tmp_path / "a.npz", **moments))
    assert len(open_source(saved(tmp_path / "b.npz", images=IMAGES, **moments))) == 30


def test_pickled_labels_are_written_as_names_or_numbers(tmp_path):
    names = np.array(["dog", "cat"] * 15, object)
    path = saved(tmp_path / "a.npz", images=IMAGES, labels=names)
    with advises(
        "Write names as np.array(labels, dtype=str), numbers as np.array(labels, dtype=int), or use --data.labels=false"
    ):
        open_source(path)
    assert open_source(path, labels=False).labels is None
    named = open_source(saved(tmp_path / "b.npz", images=IMAGES, labels=np.array(names, dtype=str)))
    assert named.classes == ("cat", "dog")
    numbers = np.array(LABELS.tolist(), object)
    with advises("labels are objects, pickled"):
        open_source(saved(tmp_path / "c.npz", images=IMAGES, labels=numbers))
    numbered = open_source(saved(tmp_path / "d.npz", images=IMAGES, labels=np.array(numbers, dtype=int)))
    assert numbered.labels is not None
    assert numbered.labels.tolist() == LABELS.tolist()


def test_a_damaged_file_is_written_again(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"x" * 1000)
    with advises("Write it again with np.savez(path, images=images, labels=labels)"):
        open_source(str(tmp_path / "a.npz"))
    assert len(open_source(saved(tmp_path / "a.npz", images=IMAGES, labels=LABELS))) == 30


def test_a_file_of_one_array_has_no_key_of_labels(tmp_path):
    np.save(tmp_path / "a.npy", IMAGES)
    path = str(tmp_path / "a.npy")
    with advises(f"data.label_key=y: {path} has no keys or columns to choose from. Leave it out"):
        open_source(path, labels="y")
    assert len(open_source(path)) == 30
