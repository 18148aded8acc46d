"""Sets as Hugging Face's `datasets` saves them."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from advice import advises
from fake_datasets import FakeRemoteFileSystem, encode_image, fingerprint, open_error, random_images, read_all_pixels
from paragan.core.errors import UsageError
from paragan.data.formats.hf_datasets import open_hf_dataset
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError

IMAGES = random_images(30)
LABELS = [index % 3 for index in range(30)]
NAMES = ["ant", "bee", "cat"]


@pytest.fixture(autouse=True)
def _quietly(monkeypatch):
    datasets.disable_progress_bars()  # of the writers in these tests
    yield
    logging.getLogger("datasets").setLevel(logging.WARNING)


def rows() -> list[dict]:
    return [{"bytes": encode_image(image), "path": None} for image in IMAGES]


def build(columns: dict | None = None, **features) -> datasets.Dataset:
    columns = {"image": rows(), "label": LABELS} if columns is None else columns
    features = features or {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    return datasets.Dataset.from_dict(columns, datasets.Features(features))


def saved(folder: Path, data=None, **options) -> Path:
    (build() if data is None else data).save_to_disk(str(folder), **options)
    return folder


@pytest.mark.parametrize("shards", [1, 4])
def test_save_to_disk(tmp_path, shards, capfd):
    where = saved(tmp_path / "a", num_shards=shards)
    capfd.readouterr()
    result = open_source(str(where))
    assert capfd.readouterr() == ("", "")
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is not None
    assert result.labels.tolist() == LABELS
    assert result.labels.dtype == np.int64
    assert result.classes == tuple(NAMES)
    assert result.sample_name(3) == f"{where}, row 3"
    assert fingerprint(result) == fingerprint(open_source(str(where)))
    assert open_source(str(where), labels=False).labels is None


def test_images_that_were_arrays(tmp_path):
    images = [Image.fromarray(image) for image in IMAGES]
    result = open_source(str(saved(tmp_path / "a", build({"img": images}, img=datasets.Image()))))
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is None


def test_the_train_split_is_read(tmp_path):
    other = build().select(range(3))
    where = saved(tmp_path / "a", datasets.DatasetDict(train=build(), test=other))
    assert len(open_source(str(where))) == 30
    assert len(open_source(str(where / "test"))) == 3
    assert len(open_source(str(saved(tmp_path / "b", datasets.DatasetDict(one=other))))) == 3


def test_of_several_splits_the_user_chooses(tmp_path):
    other = build().select(range(3))
    where = saved(tmp_path / "a", datasets.DatasetDict(one=other, two=other))
    with advises("no split called train, but one, two. Give the folder of one"):
        open_source(str(where))
    assert len(open_source(str(where / "two"))) == 3
    for split in ("one", "two"):
        shutil.rmtree(where / split)
    assert "holds no split: save the data set again with save_to_disk" in open_error(where)


@pytest.mark.parametrize("options", [{}, {"num_shards": 1}], ids=["no file", "an empty file"])
def test_a_set_of_no_image_gets_one(tmp_path, options):
    path = str(saved(tmp_path / "a", build().select([]), **options))
    with advises(f"data: {path} has no image. Give at least one"):
        open_source(path)
    assert len(open_source(str(saved(tmp_path / "b", build().select([0]))))) == 1


def test_selected_and_sorted_sets_preserve_order(tmp_path):
    result = open_source(str(saved(tmp_path / "a", build().select([5, 2, 29]))))
    assert (read_all_pixels(result) == IMAGES[[5, 2, 29]]).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": datasets.ClassLabel(names=NAMES)}, "no column of images, only label: ClassLabel"),
        ({"a": datasets.Image(), "b": datasets.Image()}, "several columns of images (a: Image, b: Image)"),
        (
            {"image": datasets.Image(), "x": datasets.ClassLabel(3), "y": datasets.ClassLabel(3)},
            "has several labels (x, y). Choose with --data.label_key=x, or use --data.labels=false",
        ),
    ],
)
def test_columns_that_leave_a_doubt_are_listed(tmp_path, columns, message):
    values = {name: rows() if isinstance(kind, datasets.Image) else LABELS for name, kind in columns.items()}
    assert message in open_error(saved(tmp_path / "a", build(values, **columns)))


def test_names_decide_where_several_columns_could(tmp_path):
    kinds = {"img": datasets.Image(), "x": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    values = {"img": rows(), "x": rows()[::-1], "label": LABELS, "kind": [0] * 30}
    result = open_source(str(saved(tmp_path / "a", build(values, **kinds, kind=datasets.ClassLabel(1)))))
    assert result.labels is not None
    assert result.labels.tolist() == LABELS
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.notes == ("labels of column label", "ignored columns: x, kind")


@pytest.mark.parametrize("feature", [datasets.ClassLabel(4), datasets.Value("int64")])
def test_of_two_levels_of_classes_the_user_chooses(tmp_path, feature):
    kinds = {"image": datasets.Image(), "coarse_label": feature, "fine_label": feature}
    values = {"image": rows(), "coarse_label": [index % 2 for index in range(30)], "fine_label": LABELS}
    path = str(saved(tmp_path / "a", build(values, **kinds)))
    with advises("(coarse_label, fine_label). Choose with --data.label_key=coarse_label, or use --data.labels=false"):
        open_source(path)
    for key in ("coarse_label", "fine_label"):
        result = open_source(path, labels=key)
        assert result.labels is not None
        assert result.labels.tolist() == values[key]
        assert f"labels of column {key}" in result.notes
    with advises("has only coarse_label, fine_label, image. Use one of them"):
        open_source(path, labels="x")
    assert open_source(path, labels=False).labels is None


def test_plain_numbers_called_label(tmp_path):
    kinds = {"image": datasets.Image(), "label": datasets.Value("int32")}
    assert open_source(str(saved(tmp_path / "a", build(None, **kinds)))).classes == ("0", "1", "2")
    missing = {"image": rows(), "label": [None, *LABELS[1:]]}
    assert "1 of 30 images have no label" in open_error(saved(tmp_path / "b", build(missing, **kinds)))
    unknown = {"image": rows(), "label": [-1] * 30}
    assert "labels are negative (-1)" in open_error(saved(tmp_path / "c", build(unknown, **kinds)))


@pytest.mark.parametrize(
    ("column", "feature", "values", "expected", "classes"),
    [
        ("label", datasets.Value("string"), ["dog", "ant", "bee"], [2, 0, 1], ("ant", "bee", "dog")),
        ("category", datasets.Value("string"), ["10", "2", "dog"][:1] * 3, None, None),
        ("class", datasets.Value("string"), ["0", "1", "2"], [0, 1, 2], ("0", "1", "2")),
        ("y", datasets.Value("int64"), [1, 0, 2], [1, 0, 2], ("0", "1", "2")),
        ("class_id", datasets.Value("uint8"), [1, 0, 2], [1, 0, 2], ("0", "1", "2")),
        ("Label", datasets.Value("string"), ["b", "a", "b"], [1, 0, 1], ("a", "b")),
        ("fine_label", datasets.Value("int64"), [1, 0, 2], [1, 0, 2], ("0", "1", "2")),
        ("coarse_label", datasets.Value("int64"), [1, 0, 2], [1, 0, 2], ("0", "1", "2")),
        ("label", datasets.Value("bool"), [True, False, True], [1, 0, 1], ("false", "true")),
        ("label", datasets.Value("float32"), [0.0, 2.0, 1.0], [0, 2, 1], ("0", "1", "2")),
        (
            "target",
            datasets.Sequence(datasets.Value("int8")),
            [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
            [1, 0, 2],
            ("0", "1", "2"),
        ),
    ],
)
def test_columns_of_labels_in_common_forms(column, feature, values, expected, classes, tmp_path):
    data = build({"image": rows()[:3], column: values}, image=datasets.Image(), **{column: feature})
    path = str(saved(tmp_path / "a", data))
    if expected is None:
        with pytest.raises(UsageError, match="labels go up to 10"):
            open_source(path)
        return
    source = open_source(path)
    assert source.labels is not None
    assert source.labels.tolist() == expected
    assert source.classes == classes


def test_a_column_of_labels_that_cannot_be_read_can_be_left_out(tmp_path):
    data = build({"image": rows()[:2], "label": [0.5, 1.0]}, image=datasets.Image(), label=datasets.Value("float32"))
    path = str(saved(tmp_path / "a", data))
    with advises(
        "holds '0.5', which is no class. Use numbers from 0 on, names or one-hot lists, or --data.labels=false"
    ):
        open_source(path)
    assert open_source(path, labels=False).labels is None
    forms = [
        ([0, 1], datasets.Value("int64")),
        (["a", "b"], datasets.Value("string")),
        ([[1, 0], [0, 1]], datasets.Sequence(datasets.Value("int8"))),
    ]
    for number, (values, feature) in enumerate(forms):
        data = build({"image": rows()[:2], "label": values}, image=datasets.Image(), label=feature)
        assert len(open_source(str(saved(tmp_path / f"{number}", data))).classes) == 2


def test_images_that_lie_elsewhere_are_not_followed(tmp_path):
    (tmp_path / "x.png").write_bytes(encode_image(IMAGES[0]))
    where = saved(tmp_path / "a")
    (data,) = where.glob("*.arrow")
    table = pa.ipc.open_stream(pa.py_buffer(data.read_bytes())).read_all()
    column = pa.array([{"bytes": None, "path": str(tmp_path / "x.png")}] * 30, table.schema.field("image").type)
    table = table.set_column(0, table.schema.field("image"), column)
    with pa.ipc.new_stream(data, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DecodeError, match="its bytes are not in the data set, only its path"):
        open_source(str(where)).read(0)


def test_remote_folders_are_refused(tmp_path):
    place = FakeRemoteFileSystem(saved(tmp_path / "a"))
    with pytest.raises(UsageError, match="can only be read locally: copy it to this machine first"):
        open_hf_dataset(place, place.list_dir())


def test_without_the_library_the_install_command_is_named(tmp_path, monkeypatch):
    where, real = saved(tmp_path / "a"), builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: real("no_such" if name == "datasets" else name, *rest)
    )
    assert "pip install datasets" in open_error(where)


def test_damage_is_one_line(tmp_path):
    where = saved(tmp_path / "a")
    state = json.loads((where / "state.json").read_text())
    for files in ([{"filename": "../a/x.arrow"}], [{"filename": 3}]):
        (where / "state.json").write_text(json.dumps({**state, "_data_files": files}))
        assert f"{where / 'state.json'} names " in open_error(where)
    for text in ("", "[]", "{}", '{"_data_files": 3}'):
        (where / "state.json").write_text(text)
        assert f"{where / 'state.json'} is damaged" in open_error(where)
    (where / "state.json").write_text(json.dumps(state))
    (where / "dataset_info.json").write_text("{")
    assert "cannot be read by `datasets`" in open_error(where)
    data = next(where.glob("*.arrow"))
    data.write_bytes(data.read_bytes()[:1000])
    assert "cannot be read by `datasets`" in open_error(where)


def test_a_damaged_image_loses_only_itself(tmp_path):
    columns = {"image": [{"bytes": b"nothing", "path": None}, *rows()[1:]]}
    result = open_source(str(saved(tmp_path / "a", build(columns, image=datasets.Image(decode=False)))))
    assert result.read(0) == b"nothing"
    assert result.read(1) == encode_image(IMAGES[1])
