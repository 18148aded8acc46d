"""Labels in files beside images, in a folder and in a zip: read, or refused in one line with what to do."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fake_datasets import FakeRemoteFileSystem, encode_image, open_error, random_images, read_all_pixels
from paragan.data.formats import label_files
from paragan.data.formats.image_folder import open_image_folder
from paragan.data.open_source import open_source
from paragan.data.source import Source

IMAGES = random_images(8)
LABELS = [index % 2 for index in range(8)]
NAMES = (b"dog", b"cat")
Files = dict[str, bytes]


def images(folder: str = "") -> Files:
    return {f"{folder}{index}.png": encode_image(image) for index, image in enumerate(IMAGES)}


def beside(suffix: str, texts: list[str]) -> Files:
    return images() | {f"{index}.{suffix}": text.encode() for index, text in enumerate(texts)}


def csv_of(labels: list, header: str = "file_name,label", folder: str = "") -> bytes:
    lines = [header, *(f"{folder}{index}.png,{label}" for index, label in enumerate(labels))]
    return "\n".join(lines).encode()


def write_folder(path: Path, files: Files) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path.with_suffix(".zip")


@pytest.fixture(params=[write_folder, write_zip])
def write(request, tmp_path):
    """Write files as a folder or as a zip."""
    return lambda files, name="set": request.param(tmp_path / name, files)


def labels_of(source: Source) -> list[int]:
    assert source.labels is not None
    assert source.labels.dtype == np.int64
    return source.labels.tolist()


@pytest.mark.parametrize(
    ("suffix", "texts", "expected", "classes"),
    [
        ("cls", [str(label) for label in LABELS], LABELS, ("0", "1")),
        ("CLS", ["1.0\r\n", "0"] * 4, [1, 0] * 4, ("0", "1")),
        ("cls", ["dog", "cat"] * 4, [1, 0] * 4, ("cat", "dog")),
        ("class", ["cafe\u0301", "caf\u00e9"] * 4, [0] * 8, ("caf\u00e9",)),
        ("txt", ["0", "1"] * 4, LABELS, ("0", "1")),
        ("txt", ["dog", "cat"] * 4, [1, 0] * 4, ("cat", "dog")),
        ("json", ['{"class": "b"}', '{"class": "a", "width": 3}'] * 4, [1, 0] * 4, ("a", "b")),
    ],
)
def test_files_of_single_images(write, suffix, texts, expected, classes):
    path = write(beside(suffix, texts))
    source = open_source(str(path))
    assert labels_of(source) == expected
    assert source.classes == classes
    assert source.notes == (f"labels of 8 files beside the images (.{suffix.lower()})",)
    assert (read_all_pixels(source) == IMAGES).all()
    without = open_source(str(path), labels=False)
    assert without.labels is None
    assert "ignored" in without.notes[0]
    assert "(8)" in without.notes[0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (beside("cls", ["1.5"] * 8), "holds '1.5', which is no class"),
        (beside("cls", ["0"] * 5), "3 of 8 images have no class"),
        (beside("cls", ["-1"] * 8), "labels are negative"),
        (beside("cls", ["0", "a"] * 4), "its label is the number 0, and others are names such as a"),
        (images() | {"x.cls": b"0"}, "1 labels belong to no image (x.cls)"),
        (beside("cls.txt", ["0"] * 8), "cls.txt: looks like a label"),
        (beside("txt", [f"a caption, {index}" for index in range(8)]), "captions are no classes"),
        (beside("txt", ["0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.1 0.1"] * 8), "captions are no classes"),
        (beside("txt", ["0 0.5 0.5 0.2 0.2"] * 8), "captions are no classes"),
        (beside("txt", ["1, 2.5"] * 8), "captions are no classes"),
        (beside("txt", ["cat"] * 5), "the .txt beside 5 of 8 images"),
        (images() | {"labels.npy": b"x"}, "labels.npy looks like labels, and is not read. Write labels.csv"),
        (images() | {"annotations.json": b"{}"}, "annotations.json looks like labels"),
        (images() | {"metadata.parquet": b"x"}, "metadata.parquet looks like labels"),
        (images() | {"labels.csv": b"0.png,1"}, "labels.csv has no column of labels, only 0.png, 1"),
        (images() | {"labels.csv": b""}, "labels.csv has no rows. Write one for each image, with columns file_name,"),
        (images() | {"labels.csv": b"file_name,label\n"}, "labels.csv has no rows"),
        (images() | {"metadata.jsonl": b"\n"}, "metadata.jsonl has no rows"),
        (images() | {"labels.csv": csv_of(["0,1"] * 8, "file_name,label,label")}, "has the column label twice"),
        (images() | {"labels.csv": b"label\n0"}, "labels.csv has no column of file names, only label"),
        (images() | {"labels.csv": csv_of(LABELS[:5])}, "has no label of 3 of 8 images (5.png, 6.png, 7.png)"),
        (images() | {"labels.csv": csv_of([0.5] * 8)}, "column label holds '0.5', which is no class"),
        (images() | {"labels.csv": csv_of([""] * 8)}, "column label holds '', which is no class"),
        (images() | {"labels.csv": csv_of(LABELS) + b"\n0.png,1"}, "names 0.png twice, as 0 and 1"),
        (images() | {"labels.csv": b'file_name,label\n"0.png'}, "labels.csv cannot be read"),
        (images() | {"labels.csv": b"\xff\xfe"}, "labels.csv cannot be read"),
        (images() | {"metadata.jsonl": b"{"}, "metadata.jsonl cannot be read"),
        (images() | {"metadata.jsonl": b"[]"}, "metadata.jsonl cannot be read (a line is no object)"),
        (images() | {"metadata.jsonl": b"[" * 100_000}, "metadata.jsonl cannot be read"),
        (
            images() | {"metadata.csv": csv_of(["a b"] * 8, "file_name,text")},
            "no column of labels, only file_name, text",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_look_like_labels_and_cannot_be_read_can_be_left_out(write, files, expected):
    path = write(files)
    message = open_error(path)
    assert expected in message
    assert "--data.labels=false" in message or "negative" in message
    assert open_source(str(path), labels=False).labels is None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("labels.csv", csv_of(["dog", "cat"] * 4)),
        ("labels.csv", csv_of(["dog", "cat"] * 4).replace(b",", b";").replace(b"\n", b"\r\n")),
        ("metadata.csv", csv_of(["a cat,dog", "a dog,cat"] * 4, "Filename,text,Label")),
        ("labels.csv", csv_of(["dog", "cat"] * 4, "id,class").replace(b".png", b"")),
        ("labels.csv", csv_of(["dog", "cat"] * 4, folder="./")),
        ("labels.csv", csv_of([" dog ", ' "cat"'] * 4, " file_name , label ").replace(b".png", b".png ")),
        ("labels.csv", csv_of(["dog", "cat"] * 4, "file_name;label;a, b, c, d").replace(b".png,", b".png;")),
        (
            "labels.csv",
            b"label, file_name\n" + b"".join(b"%s, %d.png\n" % (NAMES[i % 2], i) for i in range(8)),
        ),
        (
            "metadata.jsonl",
            b"\n".join(b'{"file_name": "%d.png", "label": "%s"}' % (i, (b"dog", b"cat")[i % 2]) for i in range(8)),
        ),
    ],
)
def test_tables_of_labels(write, name, data):
    source = open_source(str(write(images() | {name: data})))
    assert labels_of(source) == [1, 0] * 4
    assert source.classes == ("cat", "dog")
    assert len(source.notes) == 1
    assert source.notes[0].startswith(f"labels of {name}, column ")


def test_tables_that_contradict_each_other_are_refused(write):
    other = csv_of(LABELS[::-1])
    path = write(images() | {"labels.csv": csv_of(LABELS), "metadata.csv": other})
    assert "metadata.csv names 0.png as 1, but it is 0 in labels.csv. Leave one out, or use --data.labels=f" in (
        open_error(path)
    )
    assert "metadata.csv names 0.png as 1, but it is 0 in labels.csv" in open_error(path, labels="label")
    assert open_source(str(path), labels=False).labels is None
    stems = csv_of([*LABELS, 1]).replace(b"8.png", b"0")
    assert "names 0.png as 0, and 0 as 1. Leave one out" in open_error(write(images() | {"labels.csv": stems}, "stems"))


def test_tables_that_agree_are_read_together(write):
    tables = {"labels.csv": csv_of(LABELS[:5]), "metadata.csv": csv_of([*LABELS, 0])}
    source = open_source(str(write(images() | tables)))
    assert labels_of(source) == LABELS
    assert source.notes == ("labels of labels.csv, metadata.csv, column label; 1 of the rows name other files",)


@pytest.mark.parametrize("folder", ["", "photos/"])
def test_a_table_may_lie_beside_the_only_folder_of_images(write, folder):
    files = images("photos/") | {"labels.csv": csv_of(LABELS, folder=folder), "about.md": b"x"}
    source = open_source(str(write(files)))
    assert labels_of(source) == LABELS
    assert "labels of labels.csv, column label" in source.notes
    assert any("(1)" in note for note in source.notes if note.startswith("ignored"))


def test_rows_of_other_files_are_counted(write):
    source = open_source(str(write(images() | {"labels.csv": csv_of([*LABELS, 0, 1])})))
    assert labels_of(source) == LABELS
    assert source.notes == ("labels of labels.csv, column label; 2 of the rows name other files",)


def test_the_column_of_a_table_can_be_chosen(write):
    files = images() | {"metadata.csv": csv_of(["1,red", "0,blue"] * 4, "file_name,wings,colour")}
    path = write(files)
    assert "metadata.csv has no column of labels, only file_name, wings, colour. Choose one with --data.label_key=" in (
        open_error(path)
    )
    assert labels_of(open_source(str(path), labels="wings")) == [1, 0] * 4
    assert open_source(str(path), labels="colour").classes == ("blue", "red")
    assert "metadata.csv has only colour, file_name, wings. Use one of them" in key_error(path, "x")
    assert "has no labels.csv, labels.jsonl, metadata.csv" in key_error(write(images(), "other"), "wings")


def key_error(path: Path, key: str) -> str:
    with pytest.raises(Exception, match=f"data.label_key={key}: ") as error:
        open_source(str(path), labels=key)
    return str(error.value)


def test_class_folders_come_before_tables_and_captions(write):
    files = images("a/") | images("b/")
    expected = [0] * 8 + [1] * 8
    passed_over = {"metadata.csv": b"file_name,label\na/0.png,7", "labels.npy": b"x", "a/0.txt": b"a caption"}
    source = open_source(str(write(files | passed_over)))
    assert labels_of(source) == expected
    assert source.classes == ("a", "b")
    assert "(3)" in source.notes[0]
    rows = csv_of([*LABELS, *LABELS][:8], "file_name,kind", "a/") + csv_of(LABELS, "", "b/")
    chosen = open_source(str(write(files | {"labels.csv": rows}, "chosen")), labels="kind")
    assert labels_of(chosen) == LABELS * 2


def test_parts_of_a_data_set_are_no_classes(write, tmp_path):
    tables = {f"{part}/metadata.csv": csv_of(LABELS) for part in ("train", "test")}
    path = write({f"set/{name}": data for name, data in (images("train/") | images("test/") | tables).items()})
    message = open_error(path)
    assert "each of its folders (set/test, set/train) has a table (" in message
    assert len(open_source(str(path), labels=False)) == 16
    if path.is_dir():
        assert f"Use --data={path / 'set' / 'test'}, move the tables away" in message
        assert labels_of(open_source(str(path / "set" / "test"))) == LABELS
    else:
        assert "Write set/test into an archive of its own, move" in message
        assert labels_of(open_source(str(write_zip(tmp_path / "part", images() | {"metadata.csv": csv_of(LABELS)}))))


def test_of_many_captions_in_class_folders_a_sample_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(label_files, "_MAX_SAMPLED", 4)
    files = images("a/") | images("b/")
    captions = {name.replace("png", "txt"): b"a caption" for name in files}
    place = FakeRemoteFileSystem(write_folder(tmp_path / "a", files | captions))
    assert labels_of(open_image_folder(place, place.list_dir())) == [0] * 8 + [1] * 8
    assert len(place.requests) == 4
    numbers = {name: b"%d" % (index % 2) for index, name in enumerate(captions)}
    assert labels_of(open_source(str(write_folder(tmp_path / "b", files | numbers)))) == LABELS * 2


def test_labels_of_single_images_come_before_class_folders(write):
    files = images("a/") | images("b/")
    labels = {name.replace("png", "cls"): b"%d" % (index % 3) for index, name in enumerate(sorted(files))}
    assert labels_of(open_source(str(write(files | labels)))) == [index % 3 for index in range(16)]


def test_a_dataset_json_in_a_class_folder_is_refused(write):
    listing = json.dumps({"labels": [["0.png", 0]]}).encode()
    message = open_error(write(images("a/") | images("b/") | {"a/dataset.json": listing}))
    assert "a/dataset.json is not beside all images or above them, and is not read. Move it there" in message


def test_samples_with_dots_in_their_names(write):
    names = [f"frame{index}.5s.{side}" for index in range(4) for side in ("left", "right")]
    files = {f"{name}.png": encode_image(image) for name, image in zip(names, IMAGES)}
    files |= {f"{name}.cls": b"%d" % label for name, label in zip(names, LABELS)}
    assert labels_of(open_source(str(write(files)))) == LABELS


def test_labels_of_a_remote_folder_are_read(tmp_path):
    place = FakeRemoteFileSystem(write_folder(tmp_path / "a", beside("cls", ["1", "0"] * 4)))
    assert labels_of(open_image_folder(place, place.list_dir())) == [1, 0] * 4
    assert len(place.requests) == 8
    place.requests.clear()
    assert open_image_folder(place, place.list_dir(), labels=False).labels is None
    assert not place.requests
