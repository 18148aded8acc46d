"""Zips of images, and folders with a dataset.json."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from advice import advises
from fake_datasets import (
    FakeRemoteFileSystem,
    dataset_json,
    encode_image,
    fingerprint,
    open_error,
    random_images,
    read_all_pixels,
)
from paragan.data.formats import read_span
from paragan.data.formats.dataset_json import open_labelled_folder
from paragan.data.formats.zip_archive import open_zip
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError

IMAGES = random_images(30)
NAMES = [f"{index // 10:05d}/img{index:08d}.png" for index in range(30)]
LABELS = [index * 7 % 3 for index in range(30)]


def archive(path: Path, members: dict[str, bytes | str], **options) -> Path:
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def images(names=NAMES) -> dict[str, bytes | str]:
    return {name: encode_image(image) for name, image in zip(names, IMAGES)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stylegans_form(tmp_path, method):
    where = archive(
        tmp_path / "a.zip",
        {**images(), "dataset.json": dataset_json(NAMES, LABELS), "about.txt": "x"},
        compression=method,
    )
    result = open_source(str(where))
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is not None
    assert result.labels.tolist() == LABELS
    assert result.labels.dtype == np.int64
    assert result.classes == ("0", "1", "2")
    assert result.notes == ("ignored other files in the archive (1)",)
    assert result.sample_name(3) == f"{where}/{NAMES[3]}"
    assert result.is_local
    assert open_source(str(where), labels=False).labels is None


def test_null_labels_mean_none_despite_folders(tmp_path):
    for text in ('{"labels": null}', '{"labels": []}'):
        result = open_source(str(archive(tmp_path / "a.zip", {**images(), "dataset.json": text})))
        assert result.labels is None
        assert result.classes == ()


def test_folders_are_classes_without_dataset_json(tmp_path):
    names = ["Zebra/b.PNG", "ant/a.png", "ant/b.png", "bee/c.png"]
    hidden = {"__MACOSX/ant/._a.png": "x", ".x/a.png": "x", "bee/.a.png": "x", "../../up.png": "x"}
    for around in ("", "photos/"):
        inside = {around + name: encode_image(image) for name, image in zip(names, IMAGES)}
        result = open_source(str(archive(tmp_path / "a.zip", {**inside, **hidden})))
        assert result.classes == ("Zebra", "ant", "bee")
        assert result.labels is not None
        assert result.labels.tolist() == [0, 1, 1, 2]
        assert (read_all_pixels(result) == IMAGES[:4]).all()
    flat = open_source(str(archive(tmp_path / "flat.zip", images(["b.png", "a.png"]))))
    assert flat.labels is None
    assert (read_all_pixels(flat) == IMAGES[[1, 0]]).all()


def test_folders_that_are_no_classes_are_refused(tmp_path):
    odd = open_error(archive(tmp_path / "a.zip", images(["a.png", "cat/b.png"])))
    assert "different depths (a.png, cat/b.png)" in odd
    deep = open_error(archive(tmp_path / "a.zip", images(["train/cat/a.png", "test/cat/b.png"])))
    assert "folders within folders" in deep


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_one_remote_image_is_one_request(tmp_path, method):
    archive(tmp_path / "a.zip", images(), compression=method)
    place = FakeRemoteFileSystem(tmp_path)
    result = open_zip(place, "a.zip")
    place.requests.clear()
    assert (read_all_pixels(result) == IMAGES).all()
    assert len(place.requests) == len(IMAGES) + 1
    assert not result.is_local
    assert result.sample_name(0) == f"far://{tmp_path.name}/a.zip/{NAMES[0]}"


def test_a_long_local_header_takes_a_second_request(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        info = zipfile.ZipInfo("a.png")
        info.extra = struct.pack("<2H", 0x9999, 3000) + b"x" * 3000
        file.writestr(info, encode_image(IMAGES[0]))
    place = FakeRemoteFileSystem(tmp_path)
    result = open_zip(place, "a.zip")
    place.requests.clear()
    assert result.read(0) == encode_image(IMAGES[0])


def test_names_that_are_paths_elsewhere_are_only_names(tmp_path):
    names = ["/etc/passwd.png", "a\\..\\b.png", "C:/x.png"]
    result = open_source(
        str(archive(tmp_path / "deep.zip", {**images(names), "dataset.json": dataset_json(names, [0, 1, 0])}))
    )
    assert (read_all_pixels(result) == IMAGES[[0, 2, 1]]).all()
    assert {path.name for path in tmp_path.iterdir()} == {"deep.zip"}


def test_the_identity_is_that_of_the_content(tmp_path):
    first = archive(tmp_path / "a.zip", images())
    second = archive(tmp_path / "b.zip", images(), compression=zipfile.ZIP_DEFLATED)
    third = archive(tmp_path / "c.zip", {**images(), NAMES[3]: encode_image(IMAGES[4])})
    assert (
        fingerprint(open_source(str(first)))
        == fingerprint(open_source(str(second)))
        != fingerprint(open_source(str(third)))
    )


# dataset.json -----------------------------------------------------------------------------------------------


def test_names_that_do_not_match_are_listed(tmp_path):
    wrong = [f"x{name}" for name in NAMES]
    message = open_error(archive(tmp_path / "a.zip", {**images(), "dataset.json": dataset_json(wrong, LABELS)}))
    assert f"{tmp_path / 'a.zip'}/dataset.json gives no label to 30 of 30 images ({NAMES[0]}, {NAMES[1]}," in message
    assert f"names 30 of 30 that do not exist (x{NAMES[0]}" in message
    message = open_error(archive(tmp_path / "a.zip", {**images(), "dataset.json": dataset_json(NAMES[1:], LABELS[1:])}))
    assert f"gives no label to 1 of 30 images ({NAMES[0]}):" in message
    assert "do not exist" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"labels": 3}', "is not of the form"),
        ('{"labels": [["a.png", true]]}', "is not a pair"),
        ('{"labels": [["a.png", [0, 2]]]}', "is not a pair"),
        ('{"labels": [["a.png"]]}', "is not a pair"),
        ("{}", "is not of the form"),
        ('{"a.png": 0}', "is not of the form"),
        ('{"data": {"labels": [["a.png", 0]]}}', "is not of the form"),
        ('{"labels": [["a.png", 0], ["a.png", 1]]}', "names a.png twice, as 0 and 1"),
        ('{"labels": [["a.png", -1]]}', "1 of 1 labels are negative"),
        ('{"labels": [["a.png", 5]]}', "5 of these classes have no image (0, 1, 2, 3, 4)"),
        ('{"labels": [["a.png", 99999999999999999999]]}', "is not a pair"),
    ],
)
def test_a_bad_listing_is_refused_in_a_zip_and_in_a_folder(tmp_path, text, expected):
    message = open_error(archive(tmp_path / "a.zip", {"a.png": encode_image(IMAGES[0]), "dataset.json": text}))
    assert expected in message
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(encode_image(IMAGES[0]))
    (tmp_path / "set" / "dataset.json").write_bytes(text.encode() if isinstance(text, str) else text)
    assert expected in open_error(tmp_path / "set")
    assert open_source(str(tmp_path / "set"), labels=False).labels is None


def test_a_bad_listing_is_written_as_the_message_shows(tmp_path):
    image = images(["a.png"])
    where = str(archive(tmp_path / "a.zip", image | {"dataset.json": "[]"}))
    with advises(
        f'data: {where}/dataset.json is not of the form {{"labels": [["a.png", 0], ...]}} or {{"labels": null}}. '
        "Write it so, or use --data.labels=false"
    ):
        open_source(where)
    assert open_source(where, labels=False).labels is None
    for labels, classes in (([["a.png", 0]], ("0",)), (None, ())):
        listing = json.dumps({"labels": labels})
        assert open_source(str(archive(tmp_path / "b.zip", image | {"dataset.json": listing}))).classes == classes
    where = str(archive(tmp_path / "a.zip", image | {"dataset.json": '{"labels": [["a.png", 0.5]]}'}))
    with advises(
        f'data: {where}/dataset.json: ["a.png", 0.5] is not a pair of a name and a class, such as ["a.png", 0]. '
        "Write it so, or use --data.labels=false"
    ):
        open_source(where)
    assert open_source(where, labels=False).labels is None


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        ({"a.png": 1, "b.png": 0}, [1, 0], ("0", "1")),
        ([["a.png", "dog"], ["b.png", "cat"]], [1, 0], ("cat", "dog")),
        ([["a.png", [0, 1]], ["b.png", [1, 0]]], [1, 0], ("0", "1")),
        ([["a.png", "1"], ["b.png", 0.0]], [1, 0], ("0", "1")),
    ],
)
def test_a_listing_in_other_common_forms(tmp_path, labels, expected, classes):
    members = {"dataset.json": json.dumps({"labels": labels}), **images(["a.png", "b.png"])}
    result = open_source(str(archive(tmp_path / "a.zip", members)))
    assert result.labels is not None
    assert result.labels.tolist() == expected
    assert result.classes == classes


def test_names_in_a_listing_are_numbered_by_classes_json(tmp_path):
    listing = json.dumps({"labels": [["a.png", "dog"], ["b.png", "cat"]]})
    members = {**images(["a.png", "b.png"]), "dataset.json": listing, "classes.json": '["dog", "cow", "cat"]'}
    result = open_source(str(archive(tmp_path / "a.zip", members)))
    assert result.labels is not None
    assert result.labels.tolist() == [0, 2]
    assert result.classes == ("dog", "cow", "cat")
    where = str(archive(tmp_path / "b.zip", members | {"classes.json": '["dog"]'}))
    with advises(f"data: {where}/dataset.json: label cat is not in classes.json. Add it, or use --data.labels=false"):
        open_source(where)
    assert open_source(where, labels=False).labels is None
    with advises('classes.json is not a list of unique names. Write ["cat", "dog", ...]'):
        open_source(str(archive(tmp_path / "b.zip", members | {"classes.json": '{"cat": 0}'})))
    result = open_source(str(archive(tmp_path / "b.zip", members | {"classes.json": '["cat", "dog"]'})))
    assert result.classes == ("cat", "dog")


def test_names_in_a_listing_are_of_one_kind(tmp_path):
    members = images(["a.png", "b.png"])
    listing = json.dumps({"labels": [["a.png", "dog"], ["b.png", 0]]})
    where = str(archive(tmp_path / "a.zip", members | {"dataset.json": listing}))
    with advises("its label is the number 0, and others are names such as dog. Use one kind, or --data.labels=false"):
        open_source(where)
    assert open_source(where, labels=False).labels is None
    for labels in (["dog", "cat"], [1, 0]):
        listing = json.dumps({"labels": [*zip(members, labels)]})
        assert len(open_source(str(archive(tmp_path / "a.zip", members | {"dataset.json": listing}))).classes) == 2


def test_a_folder_with_a_listing(tmp_path):
    for name, image in zip(NAMES, IMAGES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encode_image(image))
    (tmp_path / "dataset.json").write_text(dataset_json(NAMES, LABELS))
    result = open_source(str(tmp_path))
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is not None
    assert result.labels.tolist() == LABELS
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": None}))
    assert open_source(str(tmp_path)).labels is None
    (tmp_path / "dataset.json").write_text(dataset_json([*NAMES, "../up.png"], [*LABELS, 0]))
    assert "names 1 of 31 that do not exist (../up.png)" in open_error(tmp_path)


# Damage -----------------------------------------------------------------------------------------------------


def test_what_is_no_zip(tmp_path):
    path = tmp_path / "a.zip"
    for data in (b"", b"PK", b"x" * 1000, archive(tmp_path / "b.zip", images()).read_bytes()[:-30]):
        path.write_bytes(data)
        with advises(f"data: {path} is not a zip, or is damaged (File is not a zip file). Write it again"):
            open_source(str(path))
    assert len(open_source(str(archive(path, images())))) == 30
    assert "holds no image, only .txt" in open_error(archive(tmp_path / "c.zip", {"a.txt": "x"}))
    assert "it is empty" in open_error(archive(tmp_path / "c.zip", {}))


def test_damage_is_noticed_by_the_checksum(tmp_path):
    where = archive(tmp_path / "a.zip", images())
    data = bytearray(where.read_bytes())
    data[data.index(b"IDAT") + 20] ^= 1
    where.write_bytes(data)
    result = open_source(str(where))
    with pytest.raises(DecodeError, match="does not match its checksum in the archive"):
        result.read(0)
    assert result.read(1) == encode_image(IMAGES[1])


def changed(where: Path, at: int, value: bytes) -> Path:
    """An archive with other bytes in its first entry of the central directory."""
    data = bytearray(where.read_bytes())
    start = data.index(b"PK\x01\x02") + at
    data[start : start + len(value)] = value
    where.write_bytes(data)
    return where


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (8, b"\x01\x00", "is encrypted"),
        (10, b"\x0c\x00", "compressed by method 12"),
        (24, struct.pack("<L", 5), "does not have the 5 bytes"),
        (20, struct.pack("<2L", 2**30, 2**30), "more than any image"),
        (20, struct.pack("<2L", 10**8, 10**8), "lies outside of the archive"),
        (42, struct.pack("<L", 7), "has a damaged header in the archive"),
    ],
)
def test_a_wrong_directory_entry_loses_only_its_image(tmp_path, at, value, expected):
    result = open_source(str(changed(archive(tmp_path / "a.zip", images(["a.png", "b.png"])), at, value)))
    with pytest.raises(DecodeError, match=expected):
        result.read(0)
    assert result.read(1) == encode_image(IMAGES[1])


def test_a_zip_bomb_is_unpacked_no_further_than_its_declared_size(tmp_path, monkeypatch):
    bomb = {"a.png": b"\0" * 10_000_000}
    where = archive(tmp_path / "a.zip", bomb, compression=zipfile.ZIP_DEFLATED)
    changed(where, 24, struct.pack("<L", 100))
    with pytest.raises(DecodeError, match="does not have the 100 bytes"):
        open_source(str(where)).read(0)
    monkeypatch.setattr(read_span, "MAX_RECORD_BYTES", 1000)
    where = archive(tmp_path / "b.zip", {"a.png": b"\0" * 2000})
    with pytest.raises(DecodeError, match="more than any image") as caught:
        open_source(str(where)).read(0)
    max_pixels = re.search(r"--data.max_pixels=(\d+) reads it", str(caught.value))
    assert max_pixels
    monkeypatch.setattr(read_span, "DEFAULT_MAX_PIXELS", 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(max_pixels[1]))  # as the field sets it
    assert open_source(str(where)).read(0) == b"\0" * 2000


def test_members_over_each_other_and_twice(tmp_path):
    where = archive(tmp_path / "a.zip", images(["a.png", "b.png"]))
    data = where.read_bytes()
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    both = bytearray(data)
    both[second + 42 : second + 46] = struct.pack("<L", 0)  # b.png claims the bytes of a.png
    where.write_bytes(both)
    result = open_source(str(where))
    assert result.read(0) == encode_image(IMAGES[0])
    with pytest.raises(DecodeError):
        result.read(1)
    where.write_bytes(data.replace(b"b.png", b"a.png"))
    with advises("holds a.png twice. Write it again with one of them"):
        open_source(str(where))
    assert len(open_source(str(archive(where, images(["a.png"]))))) == 1


@pytest.mark.parametrize(
    "labels",
    [
        {"dataset.json": dataset_json(["0.png"], [0])},
        {"classes.json": '["0"]', "dataset.json": dataset_json(["0.png"], [0])},
        {"0.cls": "0"},
        {"labels.csv": "file_name,label\n0.png,0"},
    ],
    ids=lambda labels: next(iter(labels)),
)
def test_an_archive_with_damaged_labels_is_written_again(tmp_path, labels):
    members = labels | images(["0.png"])
    where = str(changed(archive(tmp_path / "a.zip", members), 8, b"\x01\x00"))
    damaged = next(iter(labels))
    with advises(f"{damaged} cannot be read: it is encrypted. Write the archive again, or use --data.labels=false"):
        open_source(where)
    assert open_source(where, labels=False).labels is None
    assert open_source(str(archive(tmp_path / "a.zip", members))).classes == ("0",)


class MissingFileSystem(FakeRemoteFileSystem):
    """A server that lists a file which it cannot send."""

    missing = ""

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        if name == self.missing:
            raise DecodeError("does not exist")
        return super().read(name, start, size)


@pytest.mark.parametrize("name", ["dataset.json", "classes.json"])
def test_a_listing_that_cannot_be_read_is_written_again(tmp_path, name):
    (tmp_path / "0.png").write_bytes(encode_image(IMAGES[0]))
    (tmp_path / "dataset.json").write_text(dataset_json(["0.png"], [0]))
    (tmp_path / "classes.json").write_text('["ant"]')
    place = MissingFileSystem(tmp_path)
    place.missing = name
    with advises(f"{name} cannot be read: does not exist. Write it again, or use --data.labels=false"):
        open_labelled_folder(place, place.list_dir())
    assert open_labelled_folder(place, place.list_dir(), labels=False).labels is None
    place.missing = ""
    assert open_labelled_folder(place, place.list_dir()).classes == ("ant",)
