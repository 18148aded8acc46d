"""Labels in files beside images, in a folder and in a zip: read, or refused in one line with what to do."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from advice import advises
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


WITH_CLS = beside("cls", [str(label) for label in LABELS])
WITH_TABLE = images() | {"labels.csv": csv_of(LABELS)}


@pytest.mark.parametrize(
    ("files", "refusal", "mended"),
    [
        (
            beside("cls", ["1.5"] * 8),
            advises("which is no class. Write a number from 0 on or a name into a .cls, or use --data.labels=false"),
            WITH_CLS,
        ),
        (beside("cls.txt", ["0"] * 8), advises("cls.txt: looks like a label"), WITH_CLS),
        (
            WITH_CLS | {"8.png": images()["0.png"]},
            advises("Add a .cls with one to each, remove those of the others, or use --data.labels=false"),
            WITH_CLS | {"8.png": images()["0.png"], "8.cls": b"0"},
        ),
        (beside("cls", ["0"] * 5), advises("3 of 8 images have no class"), images()),
        (beside("cls", ["0", "a"] * 4), advises("Use one kind, or --data.labels=false"), beside("cls", ["b", "a"] * 4)),
        (
            images() | {"x.cls": b"0"},
            advises("1 labels belong to no image (x.cls). Give both the same name, or use --data.labels=false"),
            {"x.png": images()["0.png"], "x.cls": b"0"},
        ),
        (
            beside("txt", [f"a caption, {index}" for index in range(8)]),
            advises("Write the class into .cls, or use --data.labels=false"),
            beside("txt", ["a caption"]) | WITH_CLS,
        ),
        (beside("txt", ["0 0.5 0.5 0.1 0.1\n1 0.5 0.5 0.1 0.1"] * 8), advises("captions are no classes"), WITH_CLS),
        (beside("txt", ["0 0.5 0.5 0.2 0.2"] * 8), advises("captions are no classes"), WITH_CLS),
        (beside("txt", ["1, 2.5"] * 8), advises("captions are no classes"), WITH_CLS),
        (beside("txt", ["cat"] * 5), advises("the .txt beside 5 of 8 images"), WITH_CLS),
        (
            images() | {"labels.npy": b"x"},
            advises("Write labels.csv with columns file_name,label, or use --data.labels=false"),
            WITH_TABLE | {"labels.npy": b"x"},
        ),
        (images() | {"annotations.json": b"{}"}, advises("annotations.json looks like labels"), WITH_TABLE),
        (images() | {"metadata.parquet": b"x"}, advises("metadata.parquet looks like labels"), WITH_TABLE),
        (
            images() | {"labels.csv": b"0.png,1"},
            advises("Choose one with --data.label_key=COLUMN, call it label, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (
            images() | {"metadata.csv": csv_of(["a b"] * 8, "file_name,text")},
            advises("no column of labels, only file_name, text"),
            images() | {"metadata.csv": csv_of(LABELS, "file_name,label")},
        ),
        (
            images() | {"labels.csv": b""},
            advises("Write one for each image, with columns file_name,label, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (images() | {"labels.csv": b"file_name,label\n"}, advises("labels.csv has no rows"), WITH_TABLE),
        (images() | {"metadata.jsonl": b"\n"}, advises("metadata.jsonl has no rows"), WITH_TABLE),
        (
            images() | {"labels.csv": csv_of(["0,1"] * 8, "file_name,label,label")},
            advises("has the column label twice. Give each a name of its own, or use --data.labels=false"),
            images() | {"labels.csv": csv_of(["0,1"] * 8, "file_name,label,second")},
        ),
        (
            images() | {"labels.csv": b"label\n0"},
            advises("only label. Write columns file_name,label, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (
            images() | {"labels.csv": csv_of(LABELS[:5])},
            advises("no label of 3 of 8 images (5.png, 6.png, 7.png). Add them, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (
            images() | {"labels.csv": csv_of([0.5] * 8)},
            advises("holds '0.5', which is no class. Write a number from 0 on or a name, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (images() | {"labels.csv": csv_of([""] * 8)}, advises("holds '', which is no class"), WITH_TABLE),
        (
            images() | {"labels.csv": b'file_name,label\n"0.png'},
            advises("Write it with columns file_name,label, or use --data.labels=false"),
            WITH_TABLE,
        ),
        (images() | {"labels.csv": b"\xff\xfe"}, advises("labels.csv cannot be read"), WITH_TABLE),
        (images() | {"metadata.jsonl": b"{"}, advises("metadata.jsonl cannot be read"), WITH_TABLE),
        (images() | {"metadata.jsonl": b"[]"}, advises("cannot be read (a line is no object)"), WITH_TABLE),
        (images() | {"metadata.jsonl": b"[" * 100_000}, advises("metadata.jsonl cannot be read"), WITH_TABLE),
    ],
)
def test_files_that_look_like_labels_and_cannot_be_read_are_mended_or_left_out(write, files, refusal, mended):
    path = str(write(files))
    with refusal as error:
        open_source(path)
    assert "or use --data.labels=false" in str(error.value) or "or --data.labels=false" in str(error.value)
    assert open_source(path, labels=False).labels is None
    source = open_source(str(write(mended, "mended")))
    assert (source.labels is None) == (mended == images())


def test_negative_labels_are_refused(write):
    assert "labels are negative" in open_error(write(beside("cls", ["-1"] * 8)))


def test_an_image_in_two_rows_of_a_table_is_refused(write):
    files = images() | {"labels.csv": csv_of(LABELS) + b"\n0.png,1"}
    path = write(files)
    with advises(f"data: {path}/labels.csv names 0.png twice, as 0 and 1. Leave one out, or use --data.labels=false"):
        open_source(str(path))
    assert open_source(str(path), labels=False).labels is None
    assert labels_of(open_source(str(write(WITH_TABLE, "mended")))) == LABELS


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
    path = write(WITH_TABLE | {"metadata.csv": other})
    for labels in (True, "label"):
        with advises(f"data: {path}/metadata.csv names 0.png as 1, but it is 0 in labels.csv. Leave one out, or use"):
            open_source(str(path), labels=labels)
    assert open_source(str(path), labels=False).labels is None
    assert labels_of(open_source(str(write(images() | {"metadata.csv": other}, "one")))) == LABELS[::-1]
    stems = csv_of([*LABELS, 1]).replace(b"8.png", b"0")
    path = write(images() | {"labels.csv": stems}, "stems")
    with advises(f"data: {path}/labels.csv names 0.png as 0, and 0 as 1. Leave one out, or use --data.labels=false"):
        open_source(str(path))
    assert open_source(str(path), labels=False).labels is None
    assert labels_of(open_source(str(write(WITH_TABLE, "mended")))) == LABELS


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
    path = str(write(files))
    with advises("only file_name, wings, colour. Choose one with --data.label_key=COLUMN, call it label, or use"):
        open_source(path)
    with advises(f"data.label_key=x: {path}/metadata.csv has only colour, file_name, wings. Use one of them"):
        open_source(path, labels="x")
    assert labels_of(open_source(path, labels="wings")) == [1, 0] * 4
    assert open_source(path, labels="colour").classes == ("blue", "red")
    assert open_source(path, labels=False).labels is None
    called = files["metadata.csv"].replace(b"wings", b"label")
    assert labels_of(open_source(str(write(images() | {"metadata.csv": called}, "called")))) == [1, 0] * 4


def test_without_tables_there_is_no_column_to_choose(write):
    path = str(write(images()))
    tables = "labels.csv, labels.jsonl, metadata.csv, metadata.jsonl"
    with advises(f"data.label_key=wings: {path} has no {tables}, whose columns could be chosen. Leave it out"):
        open_source(path, labels="wings")
    assert open_source(path).labels is None


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
    files = {f"set/{name}": data for name, data in (images("train/") | images("test/")).items()}
    path = write(files | {f"set/{name}": data for name, data in tables.items()})
    assert "each of its folders (set/test, set/train) has a table (" in open_error(path)
    assert len(open_source(str(path), labels=False)) == 16
    if path.is_dir():
        with advises(f"Use --data={path / 'set' / 'test'}, move the tables away, or use --data.labels=false"):
            open_source(str(path))
        assert labels_of(open_source(str(path / "set" / "test"))) == LABELS
    else:
        with advises("Write set/test into an archive of its own, move the tables away, or use --data.labels=false"):
            open_source(str(path))
        part = write_zip(tmp_path / "part", images() | {"metadata.csv": csv_of(LABELS)})
        assert labels_of(open_source(str(part))) == LABELS
    assert len(open_source(str(write(files, "without tables"))).classes) == 2


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
    files = images("a/") | images("b/")
    listing = json.dumps({"labels": [["0.png", 0]]}).encode()
    with advises("is not read. Move it there, with paths from there in it, or away"):
        open_source(str(write(files | {"a/dataset.json": listing})))
    moved = json.dumps({"labels": [[name, 0] for name in files]}).encode()
    assert labels_of(open_source(str(write(files | {"dataset.json": moved}, "moved")))) == [0] * 16
    assert len(open_source(str(write(files, "away"))).classes) == 2


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
