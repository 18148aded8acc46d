"""Formats of records: the same records as npz, files of each record, mapped arrays, zip, shards and HDF5."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import pytest

from advice import advises
from fake_datasets import encode_image, random_images
from fake_records import noise, wav_bytes, write_recordings
from paragan.core.errors import UsageError
from paragan.data.dataset import load_data
from paragan.data.records.decoder import RecordOptions

COUNT = 9
LABELS = np.arange(COUNT) % 3
ARRAYS = {
    "wave": np.random.default_rng(0).normal(size=(COUNT, 1, 32)).astype(np.float32),
    "mel": np.random.default_rng(1).normal(size=(COUNT, 4, 8)).astype(np.float16),
}


def npy_bytes(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def npz_bytes(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def record_files(kind: str) -> dict[str, bytes]:
    """Return the records as files in a folder for each class."""
    files: dict[str, bytes] = {}
    for row, label in enumerate(LABELS):
        record = {name: x[row] for name, x in ARRAYS.items()}
        if kind == "npz":
            files[f"c{label}/{row}.npz"] = npz_bytes(**record)
        else:
            files |= {f"c{label}/{row}.{name}.npy": npy_bytes(x) for name, x in record.items()}
    return files


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write(kind: str, folder: Path) -> Path:
    container, _, files = kind.partition(" ")
    if container == "one.npz":
        np.savez(folder / container, labels=LABELS, **ARRAYS)
        return folder / container
    if container == "one.h5":
        with h5py.File(folder / container, "w") as file:
            for name, x in (ARRAYS | {"labels": LABELS}).items():
                file.create_dataset(name, data=x)
        return folder / container
    if container == "mapped":
        for name, x in (ARRAYS | {"labels": LABELS}).items():
            np.save(folder / f"{name}.npy", x)
        return folder
    contents = record_files(files)
    if container == "folder":
        for name, data in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        return folder
    if container == "zip":
        with zipfile.ZipFile(folder / "a.zip", "w") as archive:
            for name, data in contents.items():
                archive.writestr(name, data)
        return folder / "a.zip"
    flat = {name.partition("/")[2]: data for name, data in contents.items()}
    flat |= {f"{row}.cls": str(label).encode() for row, label in enumerate(LABELS)}
    ordered = dict(sorted(flat.items()))
    half = [name for name in ordered if int(name[0]) < 5]
    write_tar(folder / "s-0.tar", [(name, ordered[name]) for name in half])
    write_tar(folder / "s-1.tar", [(name, data) for name, data in ordered.items() if name not in half])
    return folder


@pytest.mark.parametrize(
    "kind",
    ["one.npz", "one.h5", "mapped", "folder npz", "folder npy", "zip npz", "zip npy", "tars npz", "tars npy"],
)
@pytest.mark.parametrize("cache", ["memory", "stream"])
def test_every_format_holds_the_same_records(tmp_path, kind, cache):
    data = load_data(str(write(kind, tmp_path)), resolution=None, cache=cache)
    assert data.fields == {"wave": (1, 32), "mel": (4, 8)}
    assert data.main_field == "wave"
    assert len(data.images) == COUNT
    names = {"one.npz": "012", "one.h5": "012", "mapped": "012", "tars": "012"}.get(kind.split()[0], ("c0", "c1", "c2"))
    assert data.classes == tuple(names)
    waves = data.images[:]
    rows = [int(np.flatnonzero((ARRAYS["wave"] == wave).all((1, 2)))[0]) for wave in waves]
    assert sorted(rows) == list(range(COUNT))
    assert np.array_equal(data.labels, LABELS[rows])
    stored = data.images.read_rows(np.arange(COUNT), data.images.evaluation_keys(np.arange(COUNT)))
    assert np.array_equal(data.images.layout.view(stored, "mel"), ARRAYS["mel"][rows])


def test_labels_of_names_and_folders(tmp_path):
    flat = write_recordings(tmp_path / "flat")
    options = RecordOptions(segment=64, label_pattern=r"^(\d)_")
    data = load_data(str(flat), resolution=None, records=options)
    assert data.classes == ("0", "1", "2")
    assert np.bincount(data.labels).tolist() == [4, 4, 4]
    assert load_data(str(flat), resolution=None, records=RecordOptions(segment=64)).labels is None
    (tmp_path / "classes").mkdir()
    for name in ("cat", "dog"):
        write_recordings(tmp_path / "classes" / name, 3)
    data = load_data(str(tmp_path / "classes"), resolution=None, records=RecordOptions(segment=64))
    assert data.classes == ("cat", "dog")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_images_with_other_arrays(tmp_path):
    pixels = random_images(4)
    for row in range(4):
        (tmp_path / f"{row}.png").write_bytes(encode_image(pixels[row]))
        np.save(tmp_path / f"{row}.caption.npy", np.full(5, row, np.float16))
    assert not load_data(str(tmp_path), resolution=None).fields  # images, as ever
    data = load_data(str(tmp_path), resolution=None, records=RecordOptions(field="image"))
    assert data.fields == {"image": (3, 8, 8), "caption": (5,)}
    assert np.array_equal(data.images[:], pixels)


def test_a_large_npz_is_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("paragan.data.formats.npz_records.MIN_MMAP_BYTES", 100)
    np.savez(tmp_path / "a.npz", **ARRAYS)
    data = load_data(str(tmp_path / "a.npz"), resolution=None, cache="stream")
    assert isinstance(data.images.source.arrays["wave"], np.memmap)
    assert np.array_equal(data.images[:], ARRAYS["wave"])


def test_records_with_other_fields_or_lengths_are_bad(tmp_path):
    for row in range(6):
        np.savez(tmp_path / f"{row}.npz", wave=noise(64).reshape(1, -1), mel=np.ones((2, 4 + (row == 5)), np.float32))
    message = r"5.npz cannot be decoded: it has mel \[2, 5\] float32, and the first record has \[2, 4\] float32"
    with pytest.raises(UsageError, match=message):
        load_data(str(tmp_path), resolution=None)
    np.savez(tmp_path / "5.npz", wave=noise(64).reshape(1, -1), mel=np.ones((2, 9), np.float32))
    options = RecordOptions(segment=32, aligned=(("mel", 16),))
    with pytest.raises(UsageError, match=r"5\.npz cannot be decoded: mel has 9 frames, and wave has 64 samples"):
        load_data(str(tmp_path), resolution=None, records=options)


@pytest.mark.parametrize("second", ["s-0.tar", "s-1.tar"])
def test_a_name_is_in_tar_shards_once_as_advised(tmp_path, second):
    def write_shards(last: str) -> None:
        shards: dict[str, list[str]] = {"s-0.tar": ["0", "1"]}
        shards.setdefault(second, []).append(last)
        for shard, keys in shards.items():
            files = [(f"{key}.wave.npy", npy_bytes(ARRAYS["wave"][0])) for key in keys]
            write_tar(tmp_path / shard, [("README", b"a"), *files])

    write_shards("1")
    with advises(
        f"data: {tmp_path}/s-0.tar, 1.wave.npy is there twice, also in {tmp_path}/{second}. Give each record its own "
        "name"
    ):
        load_data(str(tmp_path), resolution=None)
    write_shards("2")
    assert len(load_data(str(tmp_path), resolution=None).images) == 3


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_is_in_a_zip_once(tmp_path):
    def write_zip(*names: str) -> None:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for number, name in enumerate(names):
                archive.writestr(name, wav_bytes(noise(64, number)))

    write_zip("README", "0.wav", "README", "0.wav")
    with pytest.raises(UsageError, match=r"a\.zip, 0\.wav is there twice"):
        load_data(str(tmp_path / "a.zip"), resolution=None)
    write_zip("README", "0.wav", "README", "1.wav")
    assert len(load_data(str(tmp_path / "a.zip"), resolution=None).images) == 2


def test_recordings_of_a_single_folder_inside_another(tmp_path):
    write_recordings(tmp_path / "wavs")
    (tmp_path / "metadata.csv").write_text("a,b\n")
    data = load_data(str(tmp_path), resolution=None, records=RecordOptions(segment=64))
    assert len(data.images) == 12
    assert "ignored files beside wavs (1): .csv" in data.describe()


def test_one_of_two_fields_is_damaged(tmp_path):
    for row in range(4):
        (tmp_path / f"{row}.wav").write_bytes(wav_bytes(noise(64, row)))
        (tmp_path / f"{row}.mel.npy").write_bytes(npy_bytes(np.ones((2, 4), np.float32))[: 200 if row else 100])
    with pytest.raises(UsageError, match=r"0\.wav cannot be decoded: mel: is no array, or is damaged"):
        load_data(str(tmp_path), resolution=None)
