"""A container changes nothing: the same content as folder, zip or tar is the same data set."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

import servers
from paragan.core.errors import UsageError
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


def cls_files() -> dict[str, bytes]:
    return flat() | {f"{i:02}.cls": b"%d\n" % (i % 3) for i in range(12)}


def label_names() -> dict[str, bytes]:
    return flat() | {f"{i:02}.label": (b"dog", b"ant", b"bee")[i % 3] for i in range(12)}


def json_files() -> dict[str, bytes]:
    return flat() | {f"{i:02}.json": json.dumps({"width": 8, "label": i % 3}).encode() for i in range(12)}


def numbers_in_txt() -> dict[str, bytes]:
    return flat() | {f"{i:02}.txt": b"%d" % (i % 3) for i in range(12)}


def names_in_txt() -> dict[str, bytes]:
    return flat() | {f"{i:02}.txt": (b"dog", b"ant", b"bee")[i % 3] for i in range(12)}


def cls_in_folders() -> dict[str, bytes]:
    """Return shards that were extracted, each into a folder."""
    return {name.replace("png", "cls"): b"%d" % (i % 3) for i, name in enumerate(class_folders())} | class_folders()


def captions_in_folders() -> dict[str, bytes]:
    captions = {name.replace("png", "txt"): f"number {i}".encode() for i, name in enumerate(class_folders())}
    return captions | class_folders()


def table_over_folders() -> dict[str, bytes]:
    rows = "".join(f"{name},{i % 3}\n" for i, name in enumerate(class_folders()))
    return class_folders() | {"labels.csv": b"file_name,label\n" + rows.encode()}


def labels_csv() -> dict[str, bytes]:
    rows = "".join(f"{i:02}.png,{('dog', 'ant', 'bee')[i % 3]}\r\n" for i in range(12))
    return flat() | {"labels.csv": b"\xef\xbb\xbffile_name,label\r\n" + rows.encode()}


def metadata_jsonl() -> dict[str, bytes]:
    rows = "".join(
        json.dumps({"file_name": f"{i:02}.png", "text": f"number {i}", "label": i % 3}) + "\n" for i in range(12)
    )
    return flat() | {"metadata.jsonl": rows.encode()}


def accents() -> dict[str, bytes]:
    classes = ("cafe", "cafz", "caf\u00e9")
    return {f"{classes[i // 4]}/\u00e9{i:02}.png": encode(i) for i in range(12)}


FUNCTIONS = (
    *(flat, class_folders, numeric_folders, folders_with_spaces, json_labels, json_over_folders, accents),
    *(cls_files, label_names, json_files, numbers_in_txt, names_in_txt, cls_in_folders, captions_in_folders),
    *(table_over_folders, labels_csv, metadata_jsonl),
)
TABLES = {"dataset.json", "labels.csv", "metadata.jsonl"}  # in a tar they are refused where folders hold no labels
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
        if write is write_tar and not TABLES.isdisjoint(files) and content != "table_over_folders":
            continue  # refused (formats/test_webdataset.py)
        others = {"README.txt": b"x", outer.split("/")[0] + "/LICENSE": b"x"} if outer and litter else {}
        path = write(tmp_path / str(number), {outer + name: data for name, data in files.items()} | litter | others)
        data = load_data(str(path), resolution=None)
        assert identity(data) == expected, (write.__name__, outer, bool(litter))


@pytest.mark.parametrize("write", [write_folder, write_zip, write_tar])
def test_labels_beside_some_images_of_class_folders_are_refused(write, tmp_path):
    names = sorted(class_folders())
    labels = {name.replace("png", "json"): b'{"class": "x%d"}' % (i % 2) for i, name in enumerate(names[:-1])}
    files = dict(sorted((class_folders() | labels).items()))
    with pytest.raises(
        UsageError, match=r"^data: 1 of 12 images have no class \(.*dog/11.*Add a \.cls .*labels=false$"
    ):
        load_data(str(write(tmp_path / "a", files)), resolution=None)
    assert load_data(str(write(tmp_path / "a", files)), resolution=None, labels=False).labels is None
    mended = dict(sorted((files | {"dog/11.cls": b"x1"}).items()))
    assert load_data(str(write(tmp_path / "b", mended)), resolution=None).classes == ("x0", "x1")


def to_macos(files: dict[str, bytes]) -> dict[str, bytes]:
    return {unicodedata.normalize("NFD", name): data for name, data in files.items()}


def write_macos_zip(path: Path, files: dict[str, bytes]) -> Path:
    """Write names as macOS does: UTF-8 without the flag that says so."""
    path = write_zip(path, files)
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        position = data.find(signature)
        while position >= 0:
            data[position + offset + 1] &= ~0x08
            position = data.find(signature, position + 4)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("write", [write_folder, write_zip, write_macos_zip, write_tar])
def test_names_with_accents_are_equal_in_both_forms_of_unicode(write, tmp_path):
    expected = identity(load_data(str(write_folder(tmp_path / "reference", accents())), resolution=None))
    assert expected[1] == ("cafe", "cafz", "caf\u00e9")
    assert to_macos(accents()).keys().isdisjoint(accents())
    files = accents() if write is not write_tar else {name: accents()[name] for name in sorted(accents())}
    mixed = {
        name if i % 2 else unicodedata.normalize("NFD", name): data for i, (name, data) in enumerate(files.items())
    }
    for number, variant in enumerate((files, to_macos(files), mixed)):
        path = write(tmp_path / str(number), variant)
        assert identity(load_data(str(path), resolution=None)) == expected, number
    streamed = {
        load_data(str(path), resolution=None, cache="stream").fingerprint
        for path in (write(tmp_path / f"s{number}", variant) for number, variant in enumerate((files, to_macos(files))))
    }
    assert len(streamed) == 1


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
