"""HDF5 files as BigGAN and StudioGAN write them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from advice import advises
from fake_datasets import FakeRemoteFileSystem, fingerprint, open_error, random_images, read_all_pixels
from paragan.data.formats import read_span
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
        ({"imgs": FIRST[0, 0]}, "imgs are [8, 8], expected"),
        ({"imgs": FIRST.reshape(30, 6, 4, 8)}, "with C 1 or 3"),
        ({"imgs": FIRST, "labels": LABELS[:3]}, "labels are [3], expected [30]"),
        ({"imgs": FIRST, "labels": LABELS[:, None]}, "labels are [30, 1], expected [30]"),
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
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("imgs", shape=(10**9, 3, 64, 64), dtype="u1", chunks=(1, 3, 64, 64))
    reason = "imgs claims to hold more than the file can"
    with advises(f"data: {path} is not an HDF5 file, or is damaged ({reason}). Write it again"):
        open_source(str(path))
    assert len(open_source(str(stored(path)))) == 30


def test_chunks_are_no_larger_than_an_image_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(read_span, "MAX_RECORD_BYTES", 5000)
    with advises("imgs has chunks of more than 5,000 bytes. Use smaller chunks"):
        open_source(str(stored(tmp_path / "a.h5", chunks=(30, 3, 8, 8))))
    assert len(open_source(str(stored(tmp_path / "a.h5", chunks=(16, 3, 8, 8))))) == 30


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


# Advice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "white"), [("c8", 1), ("?", 255)])
def test_images_of_another_type_are_written_as_bytes(tmp_path, kind, white):
    images = np.eye(8)[None, :, :, None].astype(kind)
    path = str(stored(tmp_path / "a.h5", data=images, labels=None))
    with advises("expected numbers. Write them as uint8 or another type of number, true as 255"):
        open_source(path)
    numbers = images.real.astype(np.uint8) * white
    result = open_source(str(stored(tmp_path / "a.h5", data=numbers, labels=None)))
    assert (result.read(0) == numbers[0]).all()


def test_the_option_reads_all_channels(tmp_path):
    path = str(stored(tmp_path / "a.h5", data=FIRST.reshape(30, 6, 4, 8)))
    with advises("with C 1 or 3. Use --data.channels=6 (`paragan data`: `--channels 6`) to read all"):
        open_source(path)
    assert open_source(path, channels=6).read(0).shape == (4, 8, 6)  # pyright: ignore[reportAttributeAccessIssue]


def test_an_array_of_no_image_gets_one(tmp_path):
    path = str(stored(tmp_path / "a.h5", data=FIRST[:0], labels=None))
    with advises(f"data: {path}: imgs are [0, 3, 8, 8], no image. Give at least one"):
        open_source(path)
    assert len(open_source(str(stored(tmp_path / "a.h5", data=FIRST[:1], labels=None)))) == 1


def test_images_are_compressed_by_common_filters(tmp_path):
    with advises("imgs is compressed by filter 6, which is not supported. Write it with gzip or lzf"):
        open_source(str(stored(tmp_path / "a.h5", shuffle=True, scaleoffset=0)))
    for compression in ("gzip", "lzf"):
        assert len(open_source(str(stored(tmp_path / "a.h5", shuffle=True, compression=compression)))) == 30


@pytest.mark.parametrize("labels", [LABELS.astype("c8"), np.array(["dog", "cat", "bee"] * 10, object)])
def test_labels_of_another_type_are_numbers_or_names(tmp_path, labels):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["imgs"] = FIRST
        file.create_dataset("labels", data=labels, chunks=(10,))
    with advises(
        "Write numbers from 0 on, names as np.array(labels, dtype='S'), or use --data.labels=false",
    ):
        open_source(str(path))
    assert open_source(str(path), labels=False).labels is None
    is_names = labels.dtype == object
    source = open_source(str(stored(path, labels=np.array(labels, dtype="S") if is_names else LABELS)))
    assert source.classes == (("bee", "cat", "dog") if is_names else ("0", "1", "2"))
