"""Tar shards as webdataset writes them, and their index."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from advice import advises
from fake_datasets import FakeRemoteFileSystem, encode_image, fingerprint, open_error, random_images, read_all_pixels
from paragan.core.errors import UsageError
from paragan.data.dataset import load_data
from paragan.data.formats import tar_index as indices
from paragan.data.formats.tar_index import TarIndex, build_index, from_bytes
from paragan.data.formats.webdataset import INDEX_FILE, expand_pattern, open_tar_shards
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import RemoteOptions
from paragan.data.storage.local import LocalFileSystem

IMAGES = random_images(30)
LABELS = [index % 3 for index in range(30)]
Members = list[tuple[str, bytes]]


def sample(index: int) -> dict:
    return {"__key__": f"{index:06d}", "png": encode_image(IMAGES[index]), "cls": LABELS[index]}


def shards(folder: Path, **options) -> Path:
    with webdataset.ShardWriter(f"{folder}/shard-%03d.tar", maxcount=10, verbose=0, **options) as writer:
        for index in range(30):
            writer.write(sample(index))
    return folder


def tar(path: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def labelled(count: int = 3) -> Members:
    return [
        pair
        for i in range(count)
        for pair in ((f"{i}.png", encode_image(IMAGES[i])), (f"{i}.cls", b"%d\n" % LABELS[i]))
    ]


@pytest.mark.parametrize("name", ["", "shard-*.tar", "shard-{000..002}.tar"])
def test_webdatasets_shards(tmp_path, name):
    where = str(shards(tmp_path) / name) if name else str(shards(tmp_path))
    for note in ("index stored as", "index of"):
        result = open_source(where)
        assert (read_all_pixels(result) == IMAGES).all()
        assert result.labels is not None
        assert result.labels.tolist() == LABELS
        assert result.labels.dtype == np.int64
        assert result.classes == ("0", "1", "2")
        assert result.notes == (f"3 shards; {note} {tmp_path / INDEX_FILE}",)
    assert result.sample_name(12) == f"{tmp_path / 'shard-001.tar'}, 000012"
    assert result.is_local
    assert open_source(where, labels=False).labels is None


def test_one_shard_and_some(tmp_path):
    shards(tmp_path)
    one = open_source(str(tmp_path / "shard-001.tar"))
    assert (read_all_pixels(one) == IMAGES[10:20]).all()
    assert len(open_source(str(tmp_path))) == 30
    for name, rows in (("shard-{001..002}.tar", range(10, 30)), ("*-002.tar", range(20, 30))):
        part = open_source(str(tmp_path / name))
        assert (read_all_pixels(part) == IMAGES[list(rows)]).all()
        assert "index of" in part.notes[0]


def test_ranges():
    assert list(expand_pattern("a-{08..11}.tar")) == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert list(expand_pattern("{1..2}-{0..1}")) == ["1-0", "1-1", "2-0", "2-1"]
    assert len(list(expand_pattern("{000..012}"))) == 13
    for wrong in ("{3..1}.tar", "{0..999999999}.tar"):
        with advises("is not a range of 1 to 100,000 shards. Give one such as {000..012}"):
            list(expand_pattern(wrong))


def test_missing_shards_are_named(tmp_path):
    shards(tmp_path)
    assert f"{tmp_path / 'shard-003.tar'} does not exist" in open_error(tmp_path / "shard-{000..003}.tar")
    with advises(f"{tmp_path} holds no x*.tar. Give the names of its shards, such as *.tar"):
        open_source(str(tmp_path / "x*.tar"))
    assert len(open_source(str(tmp_path / "*.tar"))) == 30
    assert "only the last name may have them" in open_error(tmp_path / "*" / "a.tar")
    with advises(f"{tmp_path / '*.jpg'} is not a pattern of .tar files. Give one such as shard-*.tar, or `digits`, "):
        open_source(str(tmp_path / "*.jpg"))
    for advised in (tmp_path / "shard-*.tar", tmp_path / "shard-{000..002}.tar", tmp_path):
        assert len(open_source(str(advised))) == 30
    assert "does not exist" in open_error(tmp_path / "nowhere" / "*.tar")


def test_the_index_of_remote_shards_is_cached(tmp_path):
    (tmp_path / "a").mkdir()
    place, cache = FakeRemoteFileSystem(shards(tmp_path / "a")), tmp_path / "cache"
    result = open_tar_shards(place, "*.tar", RemoteOptions(cache_dir=str(cache)))
    (stored,) = (cache / "indexes").iterdir()
    place.requests.clear()
    repeated = open_tar_shards(place, "*.tar", RemoteOptions(cache_dir=str(cache)))
    assert f"index of {stored}" in repeated.notes[0]
    assert [name for name, _, _ in place.requests] == [INDEX_FILE, "classes.json"]
    assert (read_all_pixels(repeated) == read_all_pixels(result)).all()
    assert not result.is_local
    place.requests.clear()
    repeated.read(3)
    assert len(place.requests) == 1
    assert not (tmp_path / "a" / INDEX_FILE).exists()
    assert "is built at every start" in open_tar_shards(place, "*.tar", RemoteOptions(cache_dir="")).notes[0]


def test_an_old_or_damaged_index_is_rebuilt(tmp_path):
    shards(tmp_path)
    first = fingerprint(open_source(str(tmp_path)))
    (tmp_path / INDEX_FILE).write_bytes(b"damaged")
    assert fingerprint(open_source(str(tmp_path))) == first
    tar(tmp_path / "shard-002.tar", labelled(1))
    changed = open_source(str(tmp_path))
    assert len(changed) == 21
    assert fingerprint(changed) != first


def relabelled(folder: Path, shift: int) -> Path:
    """A shard of one size, whatever its labels are."""
    members = [
        pair
        for index in range(9)
        for pair in ((f"{index}.png", encode_image(IMAGES[index])), (f"{index}.cls", b"%d" % ((index + shift) % 3)))
    ]
    return tar(folder / "a.tar", members)


def correct_labels(folder: Path) -> None:
    before = (folder / "a.tar").stat()
    after = relabelled(folder, 1)
    assert after.stat().st_size == before.st_size
    os.utime(after, ns=(before.st_mtime_ns + 10**9,) * 2)


def labels_of(source) -> list[int]:
    assert source.labels is not None
    return source.labels.tolist()


def test_labels_that_were_corrected_in_a_shard_of_the_same_size_are_read(tmp_path):
    relabelled(tmp_path, 0)
    first = load_data(str(tmp_path), resolution=8, cache="stream")
    assert "index of" in open_source(str(tmp_path)).notes[0]
    correct_labels(tmp_path)
    second = load_data(str(tmp_path), resolution=8, cache="stream")
    assert labels_of(second) == [(label + 1) % 3 for label in labels_of(first)]
    assert second.fingerprint != first.fingerprint
    assert "index of" in open_source(str(tmp_path)).notes[0]


def test_shards_that_were_moved_keep_their_index(tmp_path):
    relabelled(tmp_path, 0)
    open_source(str(tmp_path / "a.tar"))
    (tmp_path / "moved").mkdir()
    for name in ("a.tar", INDEX_FILE):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    assert "index of" in open_source(str(tmp_path / "moved")).notes[0]


class VersionedFileSystem(FakeRemoteFileSystem):
    """A server that tells versions, as it chooses."""

    label = '"1"'

    def version(self, name: str) -> str:
        return f"server {self.label}" if self.label else ""


def test_remote_shards_that_are_replaced_are_read_again(tmp_path):
    (tmp_path / "a").mkdir()
    relabelled(tmp_path / "a", 0)
    place, remote = VersionedFileSystem(tmp_path / "a"), RemoteOptions(cache_dir=str(tmp_path / "cache"))
    first = labels_of(open_tar_shards(place, "*.tar", remote))
    assert "index of" in open_tar_shards(place, "*.tar", remote).notes[0]
    correct_labels(tmp_path / "a")
    place.label = '"2"'
    result = open_tar_shards(place, "*.tar", remote)
    assert "index stored" in result.notes[0]
    assert labels_of(result) != first
    assert open_tar_shards(place, "*.tar", remote).notes[0].endswith(".npz")  # and is stored


@pytest.mark.parametrize("label", ['"1"', ""], ids=["versions", "no versions"])
def test_an_index_that_was_uploaded_with_its_shards_is_taken_with_a_note(tmp_path, label):
    relabelled(tmp_path, 0)
    first = labels_of(open_source(str(tmp_path)))
    place = VersionedFileSystem(tmp_path)
    place.label = label
    result = open_tar_shards(place, "*.tar", RemoteOptions(cache_dir=""))
    assert labels_of(result) == first
    assert "if labels changed since, `paragan data index` builds it again" in result.notes[0]


def test_the_index_of_a_folder_that_cannot_be_written_is_cached(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    relabelled(tmp_path / "a", 0)
    write = Path.write_bytes

    def fail_request(path: Path, data: bytes) -> int:
        if path.is_relative_to(tmp_path / "a"):
            raise PermissionError
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail_request)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for note in ("index stored as", "index of"):
        assert f"{note} {tmp_path / 'cache'}" in open_source(str(tmp_path / "a")).notes[0]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path, monkeypatch):
    shards(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert "is built at every start" in open_source(str(tmp_path)).notes[0]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_and_long_names(tmp_path, form):
    deep = "/".join(["folder" * 10] * (2 if form == tarfile.USTAR_FORMAT else 5))
    names = [f"{deep}/{'n' * 60}{index}" for index in range(3)] + ([] if form == tarfile.USTAR_FORMAT else ["é" * 90])
    members = [
        pair
        for i, name in enumerate(names)
        for pair in ((f"{name}.png", encode_image(IMAGES[i])), (f"{name}.cls", b"0"))
    ]
    result = open_source(str(tar(tmp_path / "a.tar", members, form)))
    assert (read_all_pixels(result) == IMAGES[: len(names)]).all()
    assert names[0][:250] in result.sample_name(0)


def test_classes_in_every_supported_form(tmp_path):
    members = [
        *(("0.jpg", encode_image(IMAGES[0], "JPEG")), ("0.json", b'{"label": 2}')),
        *(("1.WEBP", encode_image(IMAGES[1], "WEBP")), ("1.txt", b" 1 ")),
        *(("2.png", encode_image(IMAGES[2])), ("2.cls", b"0"), ("2.txt", b"5"), ("2.seg.png", b"other")),
    ]
    result = open_source(str(tar(tmp_path / "a.tar", members)))
    assert result.labels is not None
    assert result.labels.tolist() == [2, 1, 0]
    assert result.read(2) == encode_image(IMAGES[2])


def with_texts(texts: list[bytes], folder: str = "{}") -> Members:
    images = [(f"{folder.format(i // 4)}/{i}.png", encode_image(IMAGES[i])) for i in range(len(texts))]
    return [*images, *((f"{folder.format(i // 4)}/{i}.txt", text) for i, text in enumerate(texts))]


def test_names_of_classes_in_txt_are_read(tmp_path):
    texts = [b"cat", b"dog\n"] * 4
    result = open_source(str(tar(tmp_path / "a.tar", with_texts(texts, "."))))
    assert labels_of(result) == [0, 1] * 4
    assert result.classes == ("cat", "dog")
    assert "ignored" not in "".join(result.notes)


@pytest.mark.parametrize("texts", [[b"a cat"], [b"a cat %d" % i for i in range(8)], [b"a\nb"] * 8, [b"x" * 201] * 8])
def test_captions_are_no_labels(tmp_path, texts):
    path = str(tar(tmp_path / "a.tar", with_texts(texts, ".")))
    for _ in range(2):
        assert "captions are no classes" in open_error(path)
        assert "or use --data.labels=false" in open_error(path)
        result = open_source(path, labels=False)
        assert result.labels is None
        assert f"ignored other files in the shard ({len(texts)})" in result.notes


def test_captions_in_class_folders_are_passed_over(tmp_path):
    texts = [b"caption %d" % i for i in range(8)]
    result = open_source(str(tar(tmp_path / "a.tar", with_texts(texts))))
    assert labels_of(result) == [0] * 4 + [1] * 4
    assert "ignored other files in the shard (8)" in result.notes


def test_a_table_beside_the_shards_is_refused(tmp_path):
    tar(tmp_path / "a.tar", [("0.png", encode_image(IMAGES[0]))])
    (tmp_path / "labels.csv").write_text("file_name,label\n0.png,0")
    with advises(
        f"data: {tmp_path / 'labels.csv'} looks like labels, and those of shards are members of them, such as "
        "0001.cls. Write them so, or use --data.labels=false"
    ):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path), labels=False).labels is None
    tar(tmp_path / "a.tar", labelled())
    assert labels_of(open_source(str(tmp_path))) == LABELS[:3]


def test_what_is_passed_over_in_some_of_the_shards_is_counted(tmp_path):
    for name in ("a", "b"):
        tar(tmp_path / f"{name}.tar", [*labelled(), ("README", b"x"), ("x.csv", b"x")][: 9 if name == "a" else 7])
    assert "ignored other files in the shards (3)" in open_source(str(tmp_path)).notes
    assert "ignored other files in the shard (1)" in open_source(str(tmp_path / "b.tar")).notes


@pytest.mark.parametrize(
    ("texts", "suffix", "expected", "classes"),
    [
        ((b"0", b"1", b"2"), "cls", [0, 1, 2], ("0", "1", "2")),
        ((b"0.0", b"1.0", b"2.0"), "cls", [0, 1, 2], ("0", "1", "2")),
        ((b"0.000e+00", b"1.000e+00", b"2.000E+00"), "cls", [0, 1, 2], ("0", "1", "2")),
        ((b"\xef\xbb\xbf0\r\n", b"1" + b" " * 2**20, b"2"), "cls", [0, 1, 2], ("0", "1", "2")),
        ((b'{"Label": 0}', b'{"label": null, "class": 1}', b'{"label": "2"}'), "json", [0, 1, 2], ("0", "1", "2")),
        ((b"dog\n", b"ant", b"bee"), "cls", [2, 0, 1], ("ant", "bee", "dog")),
        ((b"dog", b"ant", b"bee"), "label", [2, 0, 1], ("ant", "bee", "dog")),
        ((b"[0, 0, 1]", b"[1, 0, 0]", b"[0, 1, 0]"), "json", [2, 0, 1], ("0", "1", "2")),
        ((b"[0,0,1]", b"[1,0,0]", b"[0,1,0]"), "cls", [2, 0, 1], ("0", "1", "2")),
        ((b'{"class": "b"}', b'{"class": "a"}', b'{"class": "c"}'), "json", [1, 0, 2], ("a", "b", "c")),
        ((b'{"label": 2.0}', b'{"label": 1}', b'{"label": [1, 0, 0]}'), "json", [2, 1, 0], ("0", "1", "2")),
        ((b'{"category": 2}', b'{"class_id": 0}', b"1"), "json", [2, 0, 1], ("0", "1", "2")),
        ((b"0", b"1", b"2"), "txt", [0, 1, 2], ("0", "1", "2")),
        ((b"0", b"1", b"2"), "CLS", [0, 1, 2], ("0", "1", "2")),
    ],
)
@pytest.mark.parametrize("layout", ["beside", "labels last", "labels first", "dotted names", "dotted and apart"])
def test_labels_in_common_forms(layout, texts, suffix, expected, classes, tmp_path):
    name = "frame{}_t1.5s" if layout.startswith("dotted") else "{}"
    images = [(f"{name.format(i)}.png", encode_image(IMAGES[i])) for i in range(3)]
    labels = [(f"{name.format(i)}.{suffix}", text) for i, text in enumerate(texts)]
    members = {
        "beside": [member for pair in zip(images, labels) for member in pair],
        "dotted names": [member for pair in zip(labels, images) for member in pair],
        "labels last": images + labels,
        "labels first": labels + images,
        "dotted and apart": images + labels,
    }[layout]
    for _ in range(2):  # from the shard, then from its index
        source = open_source(str(tar(tmp_path / "a.tar", members)))
        assert source.labels is not None
        assert source.labels.tolist() == expected
        assert source.classes == classes
    assert open_source(str(tmp_path / "a.tar"), labels=False).labels is None


@pytest.mark.parametrize(
    "label",
    [("0.cls", b" "), ("0.cls", b"1" * 2**21), ("0.label.npy", b"x"), ("0.json", b'{"label": {}}'), ("a/1.png", b"x")],
)
def test_labels_that_cannot_be_read_can_be_left_out(label, tmp_path):
    path = str(tar(tmp_path / "a.tar", [("0.png", encode_image(IMAGES[0])), label]))
    for _ in range(2):
        assert "or use --data.labels=false" in open_error(path)
        assert open_source(path, labels=False).labels is None  # what the message says


def test_names_from_the_current_folder_and_in_hidden_ones(tmp_path):
    members = [(f"./{i}.png", encode_image(IMAGES[i])) for i in range(3)]
    members += [(f"{i}.cls", b"%d" % i) for i in range(3)]
    members += [("__MACOSX/0.png", b"x"), ("a/.cache/0.png", b"x")]
    source = open_source(str(tar(tmp_path / "a.tar", members)))
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, 2]


def test_class_names_in_a_file_next_to_the_shards(tmp_path):
    (tmp_path / "classes.json").write_text('["ant", "bee", "cat", "dog"]')
    assert open_source(str(shards(tmp_path))).classes == ("ant", "bee", "cat", "dog")
    (tmp_path / INDEX_FILE).unlink()
    for text in ('["a"]', '["a", "a", "b"]', "{"):
        (tmp_path / "classes.json").write_text(text)
        expected = "label 2 but 1 classes" if text == '["a"]' else "is not a list of unique names"
        assert expected in open_error(tmp_path)


def named_samples(folder: Path, names: str) -> Path:
    """Write one shard a name, of two images each, which have it as label."""
    for number, name in enumerate(names.split()):
        images = [(f"{number}{i}.png", encode_image(IMAGES[2 * number + i])) for i in range(2)]
        tar(folder / f"{number}.tar", [*images, *((f"{number}{i}.cls", name.encode()) for i in range(2))])
    return folder


def test_a_stored_index_changes_no_label(tmp_path):
    """Names of classes may be written, changed and removed after the index; it may be of more shards."""
    named_samples(tmp_path, "cat dog")
    for text, labels, classes in (
        (None, [0, 0, 1, 1], ("cat", "dog")),
        ('["dog", "cat"]', [1, 1, 0, 0], ("dog", "cat")),
        ('["cow", "cat", "dog"]', [1, 1, 2, 2], ("cow", "cat", "dog")),
        (None, [0, 0, 1, 1], ("cat", "dog")),
    ):
        (tmp_path / "classes.json").unlink(missing_ok=True)
        if text:
            (tmp_path / "classes.json").write_text(text)
        for _ in range(2):
            result = open_source(str(tmp_path))
            assert (labels_of(result), result.classes) == (labels, classes), text
            assert (tmp_path / INDEX_FILE).exists()
    single = open_source(str(tmp_path / "1.tar"))
    assert (labels_of(single), single.classes) == ([0, 0], ("dog",))
    (tmp_path / "classes.json").write_text('["cat", "cow"]')
    with advises(f"data: {tmp_path}: label dog is not in classes.json. Add it, or use --data.labels=false"):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path), labels=False).labels is None


def test_members_that_are_no_images_are_skipped(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            file.addfile(info)
        for name in (".hidden.png", "a/.b.png", "README", "x.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            file.addfile(info, io.BytesIO(b"0"))
        info = tarfile.TarInfo("../../up.png")
        info.size = len(encode_image(IMAGES[0]))
        file.addfile(info, io.BytesIO(encode_image(IMAGES[0])))
    result = open_source(str(tmp_path / "a.tar"))
    assert len(result) == 1
    assert result.read(0) == encode_image(IMAGES[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", INDEX_FILE]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("a.txt", b"x")], "no image in a.tar"),
        ([("a/0.png", b"x"), ("b/c/0.png", b"x")], "images at different depths"),
        ([("0.png", b"x"), ("0.cls", b"-1")], "1 of 1 labels are negative"),
        ([("0.png", b"x"), ("0.cls", b"2")], "2 of these classes have no image (0, 1)"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(tmp_path, members, expected):
    assert expected in open_error(tar(tmp_path / "a.tar", members))


WITH_CLS = [("0.png", b"x"), ("0.cls", b"0")]
CROP = [("0.crop.png", b"x"), ("0.crop.cls", b"0")]


@pytest.mark.parametrize(
    ("members", "refusal", "mended"),
    [
        ([("0.png", b"x"), ("0.cls", b" ")], advises("a.tar, 0.cls holds ' ', which is no class"), WITH_CLS),
        (
            [("0.png", b"x"), ("0.cls", b"\xff\x00")],
            advises("which is no class. Write a number from 0 on or a name into a .cls, or use --data.labels=false"),
            [("0.png", b"x"), ("0.cls", b"dog")],
        ),
        ([("0.png", b"x"), ("0.cls", b"1.5")], advises("0.cls holds '1.5', which is no class"), WITH_CLS),
        ([("0.png", b"x"), ("0.cls", b"1" * (2**20 + 1))], advises("0.cls holds '1111"), WITH_CLS),
        ([("0.png", b"x"), ("0.cls.txt", b"cat")], advises("labels of this name are not"), WITH_CLS),
        ([("0.png", b"x"), ("0.label.npy", b"\x93NUMPY")], advises("0.label.npy: looks like a label"), WITH_CLS),
        ([("0.png", b"x"), ("0.json", b'{"label": [0, 2]}')], advises("0.json holds '{\"label\": [0, 2]}'"), WITH_CLS),
        ([("0.png", b"x"), ("0.json", b'{"label": NaN}')], advises("which is no class"), WITH_CLS),
        (
            [("0.png", b"x"), ("a.cls", b"0")],
            advises("1 labels belong to no image (a). Give both the same name, or use --data.labels=false"),
            WITH_CLS,
        ),
        (
            [*WITH_CLS, ("1.png", b"x"), ("1.cls", b"cat")],
            advises("0: its label is the number 0"),
            [*WITH_CLS, ("1.png", b"x"), ("1.cls", b"1")],
        ),
        (
            [*WITH_CLS, ("1.png", b"x")],
            advises("1 of 2 images have no class"),
            [*WITH_CLS, ("1.png", b"x"), ("1.cls", b"0")],
        ),
        (
            [("0.png", b"x"), ("0.txt", b"a caption")],
            advises("captions are no classes"),
            [*WITH_CLS, ("0.txt", b"a caption")],
        ),
    ],
)
def test_members_that_are_no_labels_are_mended_or_left_out(tmp_path, members, refusal, mended):
    path = str(tar(tmp_path / "a.tar", members))
    for _ in range(2):  # from the shard, then from its index
        with refusal as error:
            open_source(path)
        assert "--data.labels=false" in str(error.value)
        assert open_source(path, labels=False).labels is None
    assert open_source(str(tar(tmp_path / "b.tar", mended))).labels is not None


@pytest.mark.parametrize("members", [[("0.png", b"x"), ("0.jpg", b"x")], [*WITH_CLS, *CROP]])
def test_of_several_images_of_a_sample_one_is_left_or_the_others_get_names(tmp_path, members):
    with advises("Keep one a sample, or let their names differ before the first dot"):
        open_source(str(tar(tmp_path / "a.tar", members)))
    assert len(open_source(str(tar(tmp_path / "b.tar", [members[0]])))) == 1
    renamed = [(name if index < len(members) // 2 else f"_{name}", data) for index, (name, data) in enumerate(members)]
    assert len(open_source(str(tar(tmp_path / "c.tar", renamed)))) == 2


def extract(path: Path) -> str:
    """Write the files of a tar into a folder and return its path."""
    with tarfile.open(path) as file:
        file.extractall(path.with_suffix(""), filter="data")
    return str(path.with_suffix(""))


def to_zip(path: Path) -> str:
    """Write the files of a tar into a zip and return its path."""
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive, tarfile.open(path) as file:
        for member in file:
            archive.writestr(member.name, file.extractfile(member).read())  # pyright: ignore[reportOptionalMemberAccess]
    return str(path.with_suffix(".zip"))


def check_labels_in_zip_and_folder(path: Path) -> None:
    assert open_source(str(path), labels=False).labels is None
    assert labels_of(open_source(extract(path))) == [0]
    assert labels_of(open_source(to_zip(path))) == [0]


def test_tables_in_tars_are_read_in_a_zip_or_a_folder(tmp_path):
    path = tar(tmp_path / "a.tar", [("0.png", b"x"), ("labels.csv", b"file_name,label\n0.png,0")])
    with advises(
        f"data: {path}, labels.csv looks like labels, and tables in a tar are not read. "
        "Use a zip or a folder of the same files, or --data.labels=false"
    ):
        open_source(str(path))
    check_labels_in_zip_and_folder(path)
    path = tar(tmp_path / "b.tar", [("0.png", b"x"), ("dataset.json", b'{"labels": [["0.png", 0]]}')])
    with advises(
        f"data: {path}: the labels of a dataset.json in a tar are not read. "
        "Use a zip or a folder of the same files, or --data.labels=false"
    ):
        open_source(str(path))
    check_labels_in_zip_and_folder(path)


def test_parts_of_a_data_set_in_a_tar_are_no_classes(tmp_path):
    images = [(f"{part}/0.png", b"x") for part in ("a", "b")]
    tables = [(f"{part}/labels.csv", b"file_name,label\n0.png,0") for part in ("a", "b")]
    path = tar(tmp_path / "a.tar", images + tables)
    with advises("Use a folder of the files in a, move the tables away, or use --data.labels=false"):
        open_source(str(path))
    assert "each of its folders (a, b) has a table (labels.csv, labels.jsonl, metadata.csv" in open_error(path)
    assert open_source(str(path), labels=False).labels is None
    assert labels_of(open_source(f"{extract(path)}/a")) == [0]
    assert labels_of(open_source(str(tar(tmp_path / "b.tar", images)))) == [0, 1]


def test_a_cut_shard_is_named_with_the_place(tmp_path):
    data = tar(tmp_path / "b.tar", labelled()).read_bytes()
    (tmp_path / "b.tar").unlink()
    for length, expected in (
        (0, "at byte 0 the file ends"),
        (600, "0 a member"),
        (1536, "at byte"),
        (700, "truncated"),
    ):
        (tmp_path / "a.tar").write_bytes(data[:length])
        message = open_error(tmp_path)
        assert f"{tmp_path / 'a.tar'}: at byte" in message
        assert expected in message
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with advises("at byte 0 there is no header of a tar. Write this shard again"):
        open_source(str(tmp_path))
    tar(tmp_path / "a.tar", labelled())
    assert labels_of(open_source(str(tmp_path))) == LABELS[:3]


def test_sparse_files_are_refused(tmp_path):
    data = bytearray(tar(tmp_path / "a.tar", labelled()).read_bytes())
    data[156:157] = b"S"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    (tmp_path / "a.tar").write_bytes(data)
    assert "a sparse file begins" in open_error(tmp_path / "a.tar")


def test_damage_is_noticed_by_the_checksum(tmp_path):
    where = tar(tmp_path / "a.tar", labelled())
    open_source(str(where))
    data = bytearray(where.read_bytes())
    data[600] ^= 1
    written_ns = where.stat().st_mtime_ns
    where.write_bytes(data)
    os.utime(where, ns=(written_ns, written_ns))  # as a bad disk does it
    result = open_source(str(where))
    with pytest.raises(DecodeError, match="checksum"):
        result.read(0)
    assert result.read(1) == encode_image(IMAGES[1])


def test_a_large_member_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("paragan.data.formats.tar_reader.READ_CHUNK_BYTES", 512)
    result = open_source(str(tar(tmp_path / "a.tar", [("0.png", encode_image(random_images(1, 64)[0]))])))
    assert (read_all_pixels(result) == random_images(1, 64)).all()


def test_every_shard_is_read_once(tmp_path):
    place = FakeRemoteFileSystem(shards(tmp_path))
    names = [f"shard-00{i}.tar" for i in range(3)]
    expected = []
    build_index(place, names, [place.size(name) for name in names], expected.append)
    assert [name for name, _, _ in place.requests] == names
    assert expected[-1] == "3 of 3 shards read, 30 images"


# The index --------------------------------------------------------------------------------------------------


def build(folder: Path) -> TarIndex:
    place, names = LocalFileSystem(shards(folder)), [f"shard-00{i}.tar" for i in range(3)]
    return build_index(place, names, [place.size(name) for name in names])


def test_an_index_comes_back_as_it_was(tmp_path):
    index = build(tmp_path)
    repeated = from_bytes(index.to_bytes(), "it")
    for key in ("sizes", "num_others", "shard", "start", "size", "label", "crc32", "keys"):
        assert (getattr(repeated, key) == getattr(index, key)).all()
        assert getattr(repeated, key).dtype == getattr(index, key).dtype
    assert repeated.shards == index.shards
    assert repeated.label_names == index.label_names


def test_pickles_and_impossible_members_are_refused(tmp_path):
    index = build(tmp_path)
    parts = dict(np.load(io.BytesIO(index.to_bytes())))
    wrong = [
        {"keys": np.array([{}] * 30, object)},
        {"shard": parts["shard"] + 1},
        {"shard": parts["shard"] - 1},
        {"start": parts["start"] - 10**6},
        {"size": parts["size"] + 2**62},
        {"label": parts["label"][:3]},
        {"label": parts["label"].astype(float)},
        {"shards": np.array(["a", "a", "b"])},
        {"sizes": parts["sizes"][:2]},
        {"start": parts["start"][:, None]},
    ]
    for change in wrong:
        file = io.BytesIO()
        np.savez(file, **{**parts, **change})
        with pytest.raises(UsageError, match="it is not an index, or is damaged"):
            from_bytes(file.getvalue(), "it")
    file = io.BytesIO()
    np.savez_compressed(file, **parts)
    with pytest.raises(UsageError, match="is compressed"):
        from_bytes(file.getvalue(), "it")


def test_labels_may_be_missing_in_it(tmp_path):
    where = tar(tmp_path / "a.tar", [("0.png", b"x"), ("1.png", b"x"), ("1.json", json.dumps({"label": 0}).encode())])
    index = build_index(LocalFileSystem(tmp_path), ["a.tar"], [where.stat().st_size])
    assert index.label.tolist() == [indices.NO_LABEL, 0]
