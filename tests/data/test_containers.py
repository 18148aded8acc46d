"""A container changes nothing: the same content as folder, zip or tar is the same data set."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import servers
from paragan.data.dataset import Dataset, load_data
from paragan.data.storage.filesystem import RemoteOptions

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)


def encode(index: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[index]).save(file, "PNG")
    return file.getvalue()


def flat() -> dict[str, bytes]:
    return {f"{i:02}.png": encode(i) for i in range(12)}


def class_folders() -> dict[str, bytes]:
    return {f"{'cat' if i < 6 else 'dog'}/{i:02}.png": encode(i) for i in range(12)}


def numeric_folders() -> dict[str, bytes]:
    return {f"{2 if i < 6 else 10}/{i:02}.png": encode(i) for i in range(12)}


def folders_with_spaces() -> dict[str, bytes]:
    """Return names that a sort of whole paths would put in another order than their folders."""
    return {f"{('a', 'a b', 'a-b')[i // 4]}/{i:02}.png": encode(i) for i in range(12)}


def json_labels() -> dict[str, bytes]:
    labels = {"labels": [[f"{i:02}.png", i % 3] for i in range(12)]}
    return flat() | {"dataset.json": json.dumps(labels).encode()}


def json_over_folders() -> dict[str, bytes]:
    labels = {"labels": [[name, 1 - i // 6] for i, name in enumerate(class_folders())]}
    return class_folders() | {"dataset.json": json.dumps(labels).encode()}


FUNCTIONS = (flat, class_folders, numeric_folders, folders_with_spaces, json_labels, json_over_folders)
CONTENTS = {function.__name__: function for function in FUNCTIONS}
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
        others = {"README.txt": b"x", outer.split("/")[0] + "/LICENSE": b"x"} if outer and litter else {}
        path = write(tmp_path / str(number), {outer + name: data for name, data in files.items()} | litter | others)
        data = load_data(str(path), resolution=None)
        assert identity(data) == expected, (write.__name__, outer, bool(litter))


def write_outer_folder(path: Path) -> tuple[Path, tuple]:
    """Write labelled images in two folders around them; return the folder and the identity of the data."""
    files = {"outer/photos #1/" + name: data for name, data in json_over_folders().items()} | {"README.txt": b"x"}
    folder = write_folder(path, files)
    return folder, identity(load_data(str(folder), resolution=None, cache="stream"))


def check_remote_identity(location: str, expected: tuple) -> None:
    data = load_data(location, resolution=None, remote=RemoteOptions(cache_dir=""))
    assert identity(data) == expected
    assert {"labels of dataset.json", "ignored files beside outer (1): .txt"} <= {*data.notes}


def test_folders_around_the_data_of_a_server_are_no_classes(tmp_path):
    folder, expected = write_outer_folder(tmp_path / "a")
    with servers.run_nginx(folder, tmp_path / "nginx") as server:
        for location in (f"{server.url}/", server.url, f"{server.url}?signature=1"):
            check_remote_identity(location, expected)


def test_folders_around_the_data_of_other_protocols_are_no_classes(tmp_path):
    folder, expected = write_outer_folder(tmp_path / "a")
    address = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(f"{folder}/", f"{address}/", recursive=True)
    check_remote_identity(address, expected)


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
