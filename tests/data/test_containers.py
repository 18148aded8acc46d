"""A container changes nothing: the same content as folder, zip or tar is the same data set."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paragan.data.dataset import Dataset, load_data

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)


def encode(index: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[index]).save(file, "PNG")
    return file.getvalue()


def flat() -> dict[str, bytes]:
    return {f"{i:02}.png": encode(i) for i in range(12)}


def class_folders() -> dict[str, bytes]:
    return {f"{'cat' if i < 6 else 'dog'}/{i:02}.png": encode(i) for i in range(12)}


def json_labels() -> dict[str, bytes]:
    labels = {"labels": [[f"{i:02}.png", i % 3] for i in range(12)]}
    return flat() | {"dataset.json": json.dumps(labels).encode()}


def json_over_folders() -> dict[str, bytes]:
    labels = {"labels": [[name, 1 - i // 6] for i, name in enumerate(class_folders())]}
    return class_folders() | {"dataset.json": json.dumps(labels).encode()}


CONTENTS = {function.__name__: function for function in (flat, class_folders, json_labels, json_over_folders)}
LITTER = {"__MACOSX/._00.png": b"x", "Thumbs.db": b"x", "desktop.ini": b"x", ".DS_Store": b"x"}


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path: Path, files: dict[str, bytes], separator: str = "/") -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo()
            info.filename = name.replace("/", separator)
            info.create_system = 3 if separator == "/" else 0
            archive.writestr(info, data)
    return path.with_suffix(".zip")


def write_windows_zip(path: Path, files: dict[str, bytes]) -> Path:
    return write_zip(path, files, "\\")


def write_backslash_zip(path: Path, files: dict[str, bytes]) -> Path:
    """Write backslashes, as some programs do on any system."""
    return write_zip(path, {name.replace("/", "\\"): data for name, data in files.items()})


def write_dotted_zip(path: Path, files: dict[str, bytes]) -> Path:
    """Write names as `bsdtar -acf a.zip .` does."""
    return write_zip(path, {f"./{name}": data for name, data in files.items()})


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    """Write names as `tar cf a.tar .` does."""
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path.with_suffix(".tar")


WRITERS = (write_folder, write_zip, write_windows_zip, write_backslash_zip, write_dotted_zip, write_tar)


def identity(data: Dataset) -> tuple:
    labels = None if data.labels is None else data.labels.tolist()
    return data.fingerprint, data.classes, labels


@pytest.mark.parametrize("content", CONTENTS)
def test_containers_of_the_same_content_are_the_same_data(content, tmp_path):
    files = CONTENTS[content]()
    expected = identity(load_data(str(write_folder(tmp_path / "reference", files)), resolution=None))
    assert (expected[2] is None) == (content == "flat")
    variants = itertools.product(WRITERS, ("", "photos/", "outer/photos/"), ({}, LITTER))
    for number, (write, outer, litter) in enumerate(variants):
        if write is write_tar and "dataset.json" in files:
            continue  # refused (formats/test_webdataset.py)
        path = write(tmp_path / str(number), {outer + name: data for name, data in files.items()} | litter)
        data = load_data(str(path), resolution=None)
        assert identity(data) == expected, (write.__name__, outer, bool(litter))


def test_a_tar_of_labelled_samples_is_the_same_data(tmp_path):
    expected = identity(load_data(str(write_folder(tmp_path / "reference", class_folders())), resolution=None))
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, data in class_folders().items():
            folder, base = name.split("/")
            for member, content in ((base, data), (base.replace(".png", ".cls"), folder.encode())):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    assert identity(load_data(str(tmp_path / "a.tar"), resolution=None)) == expected
