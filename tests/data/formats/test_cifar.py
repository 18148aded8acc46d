"""CIFAR's pickles, as they are handed out and as newer Pythons write them."""

from __future__ import annotations

import collections
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest

from fake_datasets import FakeRemoteFileSystem, open_error, pickle_python2, random_images, read_all_pixels
from paragan.data.formats.cifar import open_cifar
from paragan.data.formats.safe_pickle import UnsafePickleError, safe_unpickle, to_array
from paragan.data.open_source import open_source

IMAGES = random_images(25, 32)
ROWS = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2)).reshape(25, -1)  # [N, 3072]
LABELS = [index % 4 for index in range(25)]
WRITERS = {"python2": pickle_python2, **{str(p): (lambda value, p=p: pickle.dumps(value, p)) for p in range(2, 6)}}


def ten(folder: Path, write=pickle_python2) -> Path:
    for number in range(5):
        rows = slice(number * 5, number * 5 + 5)
        batch = {"batch_label": "a batch", "labels": LABELS[rows], "data": ROWS[rows], "filenames": ["a.png"] * 5}
        (folder / f"data_batch_{number + 1}").write_bytes(write(batch))
    (folder / "test_batch").write_bytes(write({"labels": [9], "data": ROWS[:1]}))
    (folder / "batches.meta").write_bytes(write({"label_names": ["ant", "bee", "cat", "dog"], "num_vis": 3072}))
    (folder / "readme.html").write_text("")
    return folder


def hundred(folder: Path, write=pickle_python2) -> Path:
    batch = {"data": ROWS, "fine_labels": LABELS, "coarse_labels": [0] * 25}
    (folder / "train").write_bytes(write(batch))
    (folder / "test").write_bytes(write({"data": ROWS[:1], "fine_labels": [0], "coarse_labels": [0]}))
    (folder / "meta").write_bytes(write({"fine_label_names": ["a", "b", "c", "d"], "coarse_label_names": ["x"]}))
    return folder


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("form", [ten, hundred])
def test_the_training_images(tmp_path, form, writer):
    where = form(tmp_path, WRITERS[writer])
    for result in (
        open_source(str(where)),
        open_cifar(FakeRemoteFileSystem(where), FakeRemoteFileSystem(where).list_dir()),
    ):
        assert (read_all_pixels(result) == IMAGES).all()
        assert result.labels is not None
        assert result.labels.tolist() == LABELS
        assert result.labels.dtype == np.int64
        assert result.classes == (("ant", "bee", "cat", "dog") if form is ten else ("a", "b", "c", "d"))
    assert result.notes[0].startswith("CIFAR's data_batch_1, data_batch_2" if form is ten else "CIFAR's train")
    assert open_source(str(where), labels=False).labels is None


def test_without_names_classes_are_numbers(tmp_path):
    (ten(tmp_path) / "batches.meta").unlink()
    assert open_source(str(tmp_path)).classes == ("0", "1", "2", "3")


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<u2"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("writer", WRITERS)
def test_array_batches_keep_order(dtype, order, writer):
    if writer == "python2" and order == "F":
        return
    target = np.asarray(np.arange(24).reshape(2, 3, 4).astype(dtype), order=order)  # pyright: ignore
    result = to_array(safe_unpickle(WRITERS[writer](target)))
    assert (result == target).all()
    assert result.dtype == target.dtype


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, options, *arguments):
        self.how, self.arguments = options, arguments

    def __reduce__(self):
        return self.how, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_a_trap_is_not_sprung(tmp_path, protocol):
    ten(tmp_path)
    for trap in (Trap(Path.touch, tmp_path / "sprung"), Trap(eval, f"open({str(tmp_path / 'sprung')!r}, 'w')")):
        batch = {"data": ROWS[:5], "labels": LABELS[:5], "more": trap}
        (tmp_path / "data_batch_2").write_bytes(pickle.dumps(batch, protocol))
        message = open_error(tmp_path)
        assert f"{tmp_path / 'data_batch_2'} is not a file of CIFAR: it " in message
        if protocol > 1:
            assert "which is not run" in message
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02cos\nsystem\nU\x04true\x85R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x02c__builtin__\ngetattr\n.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02Pid\n.",
        b"\x80\x02]r\xff\xff\xff\xff.",  # remembered at a place that would take 64 GB
        b"\x80\x02" + b")" + b"\x85" * 100_000 + b"K\x01s.",  # tuples within tuples, to be hashed
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02]b.",
        b"\x80\x02R.",
        b"",
        b".",
        b"\x80\x63.",
    ],
)
def test_pickles_that_run_code_are_refused(program):
    with pytest.raises(UnsafePickleError):
        to_array(safe_unpickle(program))


def test_attributes_that_are_set_stay_nowhere():
    array = safe_unpickle(b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.")
    assert not hasattr(array, "a")
    assert not hasattr(np.ndarray, "a")


def test_other_objects_are_named(tmp_path):
    hundred(tmp_path, lambda value: pickle.dumps(collections.OrderedDict(value), 2))
    assert "collections.OrderedDict, which is not run" in open_error(tmp_path)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": LABELS}, "data cannot be read: it is not an array"),
        ({"data": ROWS.astype("i8"), "labels": LABELS}, "data is int64 [25, 3072], expected uint8"),
        ({"data": ROWS.astype("f4"), "labels": LABELS}, "an array of 'f4', expected integers"),
        ({"data": ROWS[:, :100], "labels": LABELS}, "data is uint8 [25, 100], expected uint8 [n, 3072]"),
        ({"data": ROWS}, "has no list of labels; found data"),
        ({"data": ROWS, "labels": LABELS[1:]}, "labels are not 25 integers"),
        ({"data": ROWS, "labels": ["a"] * 25}, "labels are not 25 integers"),
        ({"data": ROWS, "labels": [7] * 25}, "label 7 but 4 classes"),
        ({"data": ROWS, "labels": [-7] * 25}, "labels are negative"),
        ([1], "it holds no dict"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(tmp_path, batch, expected):
    ten(tmp_path)
    for number in range(2, 6):
        (tmp_path / f"data_batch_{number}").unlink()
    (tmp_path / "data_batch_1").write_bytes(pickle_python2(batch) if "f4" not in expected else pickle.dumps(batch, 2))
    assert expected in open_error(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"no pickle")
    assert f"{tmp_path / 'data_batch_1'} is not a file of CIFAR: it is not a pickle" in open_error(tmp_path)


def test_names_that_are_none(tmp_path):
    ten(tmp_path)
    for names in (["a", "a", "b", "c"], [1, 2, 3, 4], "abcd", []):
        (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, 2))
        assert "label_names is not a list of unique names" in open_error(tmp_path)


def test_the_test_helper_writes_what_python_reads():
    value = {"a": [1, 2], "data": ROWS[:2]}
    read = pickle.loads(pickle_python2(value), encoding="latin1")  # noqa: S301 (our own)
    assert (read["data"] == ROWS[:2]).all()
    assert read["a"] == [1, 2]
    assert any(opcode.name == "BINSTRING" for opcode, _, _ in pickletools.genops(pickle_python2(value)))
