"""Large .npz files, which are mapped rather than read, and those far away."""

from __future__ import annotations

import mmap
import os
import zipfile

import numpy as np
import pytest

from fake_datasets import FakeRemoteFileSystem, fingerprint, random_images, read_all_pixels
from paragan.core.errors import RunError, UsageError
from paragan.data import decode
from paragan.data.dataset import load_data
from paragan.data.formats import npz
from paragan.data.open_source import open_source

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
