"""HDF5 files as BigGAN and StudioGAN write them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from fake_datasets import FakeRemoteFileSystem, fingerprint, open_error, random_images, read_all_pixels
from paragan.data.formats.hdf5 import open_hdf5
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError

IMAGES = random_images(30)
LABELS = np.arange(30) % 3
FIRST = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2))  # [N, C, H, W]


def stored(path: Path, labels=LABELS, key: str = "imgs", data=FIRST, **options) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset(key, data=data, **options)
        if labels is not None:
            file["labels"] = labels
    return path


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 3, 8, 8)}, {"chunks": (4, 3, 8, 8), "compression": "lzf"}])
def test_biggans_form(tmp_path, options):
    where = stored(tmp_path / "a.h5", **options)
    for result in (open_source(str(where)), open_hdf5(FakeRemoteFileSystem(tmp_path), "a.h5")):
        assert (read_all_pixels(result) == IMAGES).all()
        assert result.labels is not None
        assert result.labels.tolist() == LABELS.tolist()
        assert result.labels.dtype == np.int64
        assert result.classes == ("0", "1", "2")
        assert any("compressed in chunks of 4" in note for note in result.notes) == ("compression" in options)
    assert result.is_local is False
    assert open_source(str(where)).is_local
    assert open_source(str(where), labels=False).labels is None


def test_channels_last_grey_and_the_other_key(tmp_path):
    last = open_source(str(stored(tmp_path / "a.HDF5", key="images", data=IMAGES, compression="gzip", shuffle=True)))
    assert (read_all_pixels(last) == IMAGES).all()
    grey = open_source(str(stored(tmp_path / "b.h5", data=IMAGES[..., 0])))
    assert (grey.read(4) == IMAGES[4, :, :, 0]).all()
    one = open_source(str(stored(tmp_path / "c.h5", data=FIRST[:, :1])))
    assert (one.read(4) == IMAGES[4, :, :, :1]).all()


def test_uncompressed_remote_images_are_one_request_each(tmp_path):
    stored(tmp_path / "a.h5")
    place = FakeRemoteFileSystem(tmp_path)
    result = open_hdf5(place, "a.h5")
    assert (result.read(5) == IMAGES[5]).all()
    ((_, _, size),) = place.requests
    assert size == IMAGES[5].nbytes


def test_different_sets_have_different_fingerprints(tmp_path):
    other = FIRST.copy()
    other[0, 0, 0, 0] ^= 1
    marks = [fingerprint(open_source(str(stored(tmp_path / "a.h5", data=data)))) for data in (FIRST, FIRST, other)]
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": FIRST, "y": LABELS}, "has no imgs; found x, y; expected imgs (uint8"),
        ({}, "found nothing"),
        ({"imgs": FIRST.astype("c8")}, "imgs are complex64, expected numbers"),
        ({"imgs": FIRST[0, 0]}, "imgs are [8, 8], expected"),
        ({"imgs": FIRST.reshape(30, 6, 4, 8)}, "with C 1 or 3"),
        ({"imgs": FIRST[:0]}, "no image"),
        ({"imgs": FIRST, "labels": LABELS[:3]}, "labels are [3], expected [30]"),
        ({"imgs": FIRST, "labels": LABELS[:, None]}, "labels are [30, 1], expected [30]"),
        ({"imgs": FIRST, "labels": LABELS.astype("c8")}, "labels are complex64, expected integers or names"),
        ({"imgs": FIRST, "labels": LABELS / 2}, "labels are float64 and hold 0.5, which is no class"),
        ({"imgs": FIRST, "labels": LABELS - 1}, "10 of 30 labels are negative"),
        ({"imgs": FIRST, "labels": LABELS * 2}, "classes have no image (1, 3)"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(tmp_path, arrays, expected):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key, value in arrays.items():
            file[key] = value
    message = open_error(tmp_path / "a.h5")
    assert expected in message
    assert str(tmp_path / "a.h5") in message


@pytest.mark.parametrize("key", ["label", "y", "targets", "class", "Label"])
def test_labels_have_other_usual_keys(tmp_path, key):
    path = stored(tmp_path / "a.h5", labels=None)
    with h5py.File(path, "a") as file:
        file[key] = LABELS
    result = open_source(str(path))
    assert result.labels is not None
    assert result.labels.tolist() == LABELS.tolist()
    assert result.notes == (f"labels of key {key}",)
    path = stored(tmp_path / "b.h5", labels=None)
    with h5py.File(path, "a") as file:
        file[key] = LABELS
        file["target"] = LABELS[::-1]
    assert "several labels (" in open_error(path)
    chosen = open_source(str(path), labels="target")
    assert chosen.labels is not None
    assert chosen.labels.tolist() == LABELS[::-1].tolist()
    assert open_source(str(path), labels=False).labels is None


def test_names_of_classes_may_have_any_width(tmp_path):
    path = stored(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["classes"] = ["ant", "bumblebee", "caf\u00e9"]  # variable-length strings
    assert open_source(str(path)).classes == ("ant", "bumblebee", "caf\u00e9")


def test_labels_of_another_type_can_be_left_out(tmp_path):
    path = stored(tmp_path / "a.h5", labels=np.linspace(0, 1, 30))
    assert "or use --data.labels=false" in open_error(path)
    assert open_source(str(path), labels=False).labels is None


def test_what_lies_in_other_files_is_not_followed(tmp_path):
    stored(tmp_path / "other.h5")
    FIRST.tofile(tmp_path / "raw")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["imgs"] = h5py.ExternalLink("other.h5", "/imgs")
    assert "imgs is a link, which is not followed" in open_error(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["imgs"] = h5py.SoftLink("/elsewhere")
    assert "imgs is a link, which is not followed" in open_error(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout(FIRST.shape, "u1")
        layout[:] = h5py.VirtualSource("other.h5", "imgs", FIRST.shape)
        file.create_virtual_dataset("imgs", layout)
    assert "imgs lies in other files" in open_error(tmp_path / "a.h5")
    stored(tmp_path / "a.h5", external=[(str(tmp_path / "raw"), 0, FIRST.nbytes)])
    assert "imgs lies in other files" in open_error(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("imgs")
    assert "imgs is not an array" in open_error(tmp_path / "a.h5")


def test_claims_beyond_the_file_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("imgs", shape=(10**9, 3, 64, 64), dtype="u1", chunks=(1, 3, 64, 64))
    assert "imgs claims to hold more than the file can" in open_error(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("imgs", (10, 3, 8, 8), "u1", chunks=(2**21, 3, 8, 8), maxshape=(None, 3, 8, 8))
    assert "imgs has chunks of more than" in open_error(tmp_path / "b.h5")


def test_what_is_no_hdf5_or_cut(tmp_path):
    where = stored(tmp_path / "a.h5")
    data = where.read_bytes()
    for part in (b"", b"x" * 1000, data[:100], data[: len(data) // 2]):
        where.write_bytes(part)
        assert "is not an HDF5 file, or is damaged" in open_error(where)


def test_a_damaged_chunk_loses_only_its_images(tmp_path):
    where = stored(tmp_path / "a.h5", chunks=(1, 3, 8, 8), compression="gzip", fletcher32=True)
    with h5py.File(where) as file:
        chunk = file["imgs"].id.get_chunk_info(4)  # pyright: ignore[reportAttributeAccessIssue]
    data = bytearray(where.read_bytes())
    data[chunk.byte_offset + 50] ^= 0xFF
    where.write_bytes(data)
    result = open_source(str(where))
    with pytest.raises(DecodeError):
        result.read(4)
    assert (result.read(5) == IMAGES[5]).all()
    assert fingerprint(result)
