"""Parquet files in folders, on servers and on a hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import datasets
import flask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from advice import advises
from fake_datasets import encode_image, fingerprint, open_error, random_images, read_all_pixels
from paragan.core.errors import RunError, UsageError
from paragan.data.formats import parquet
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import RemoteOptions, expand_hub_address
from servers import run_app, run_nginx

IMAGES = random_images(30)
LABELS = [index % 3 for index in range(30)]
NAMES = ["ant", "bee", "cat"]
SHA = "0123456789abcdef0123456789abcdef01234567"


def rows(images=IMAGES) -> list[dict]:
    return [{"bytes": encode_image(image), "path": None} for image in images]


def write_like_datasets(path: Path, start: int = 0, stop: int = 30, group_rows: int = 7) -> Path:
    """Write as `datasets` does, with its features in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    columns = {"image": rows(IMAGES[start:stop]), "label": LABELS[start:stop]}
    datasets.Dataset.from_dict(columns, features).to_parquet(path, batch_size=group_rows)
    return path


def write_plain(path: Path, columns: dict, **options) -> Path:
    """Write without the metadata of `datasets`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.fixture(autouse=True)
def _quietly():
    datasets.disable_progress_bars()


def check(source) -> None:
    assert (read_all_pixels(source) == IMAGES).all()
    assert source.labels.tolist() == LABELS
    assert source.labels.dtype == np.int64
    assert source.classes == tuple(NAMES)


def test_one_file(tmp_path):
    path = write_like_datasets(tmp_path / "a.parquet")
    source = open_source(str(path))
    check(source)
    assert source.is_local
    assert source.location == str(path)
    assert source.sample_name(29) == f"{path}, row 29"
    assert len(source.groups) == 5
    assert source.notes == ("labels of column label",)


def test_files_of_a_split(tmp_path):
    folder = tmp_path / "set" / "data"
    write_like_datasets(folder / "train-00000-of-00002.parquet", 0, 17)
    write_like_datasets(folder / "train-00001-of-00002-0123456789abcdef.parquet", 17, 30)
    write_like_datasets(folder / "test-00000-of-00001.parquet", 0, 5)
    source = open_source(str(tmp_path / "set"))  # around the only folder, as on the hub
    check(source)
    assert "ignored splits: test" in source.notes
    assert source.sample_name(17).endswith("train-00001-of-00002-0123456789abcdef.parquet, row 0")
    assert fingerprint(source) == fingerprint(open_source(str(folder)))


def test_the_only_split(tmp_path):
    write_like_datasets(tmp_path / "validation-00000-of-00001.parquet")
    check(open_source(str(tmp_path)))


def test_no_split_called_train(tmp_path):
    for split in ("test", "validation"):
        write_like_datasets(tmp_path / f"{split}-00000-of-00001.parquet")
    with advises(f"data: {tmp_path} has no split called train, but test, validation. Give one of its files"):
        open_source(str(tmp_path))
    check(open_source(str(tmp_path / "test-00000-of-00001.parquet")))


def test_several_configurations(tmp_path):
    for name in ("large", "small"):
        write_like_datasets(tmp_path / name / "train-00000-of-00001.parquet")
    with advises(f"data: {tmp_path} has Parquet files in several folders (large, small). Give one"):
        open_source(str(tmp_path))
    check(open_source(str(tmp_path / "small")))


@pytest.mark.parametrize("kind", ["bytes", "large_bytes", "struct"])
def test_without_the_metadata_of_datasets(tmp_path, kind):
    encoded = [row["bytes"] for row in rows()]
    types = {"bytes": pa.binary(), "large_bytes": pa.large_binary()}
    images = pa.array(rows()) if kind == "struct" else pa.array(encoded, types[kind])
    words = [NAMES[label] for label in LABELS]
    path = write_plain(tmp_path / "a.parquet", {"image": images, "label": words, "caption": words}, row_group_size=4)
    source = open_source(str(path))
    check(source)
    assert source.notes == ("labels of column label", "ignored columns: caption")


def test_labels_are_left_out_or_chosen(tmp_path):
    columns = {"image": rows(), "label": LABELS, "other": [index % 5 for index in range(30)]}
    path = write_plain(tmp_path / "a.parquet", columns)
    assert open_source(str(path), labels=False).labels is None
    chosen = open_source(str(path), labels="other")
    assert chosen.labels is not None
    assert chosen.labels.max() == 4
    with pytest.raises(UsageError, match="nothing"):
        open_source(str(path), labels="nothing")


BAD = {
    "no images": ({"a": [1, 2]}, "has no column of images, only a: int64"),
    "empty": ({"image": pa.array([], pa.binary())}, "has no image. Give at least one"),
    "two columns": ({"a": rows()[:2], "b": rows()[:2]}, "several columns of images"),
    "no label": ({"image": rows()[:2], "label": [0, None]}, "1 of 2 images have no label"),
    "negative": ({"image": rows()[:2], "label": [0, -1]}, "-1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path, case):
    columns, words = BAD[case]
    assert words in open_error(write_plain(tmp_path / "a.parquet", columns))


def test_row_groups_that_are_too_large(tmp_path, monkeypatch):
    path = write_like_datasets(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1000)
    size = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    with advises(
        f"data: {path}: row group 0 takes {size:,} bytes, and has to be read as a whole. Write smaller ones: "
        "row_group_size=100 of pyarrow.parquet.write_table"
    ):
        open_source(str(path))
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2**32)
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    check(open_source(str(path)))


def test_damaged_files(tmp_path):
    path = write_like_datasets(tmp_path / "a.parquet")
    data = path.read_bytes()
    for damaged in (b"", b"PAR1", data[:-9], b"PAR1" + bytes(len(data) - 8) + b"PAR1"):
        path.write_bytes(damaged)
        reason = re.search(r"as Parquet \((.*)\)\. Write", open_error(path))
        assert reason
        with advises(f"data: {path} cannot be read as Parquet ({reason[1]}). Write the file again"):
            open_source(str(path))
    path.write_bytes(data)
    check(open_source(str(path)))
    path.write_bytes(data[:4] + bytes(2000) + data[2004:])
    source = open_source(str(path), labels=False)
    with pytest.raises(DecodeError):
        read_all_pixels(source)


def test_other_columns_in_another_file(tmp_path):
    write_plain(tmp_path / "a.parquet", {"image": rows()})
    write_plain(tmp_path / "b.parquet", {"image": rows(), "label": LABELS})
    other, first = tmp_path / "b.parquet", tmp_path / "a.parquet"
    with advises(
        f"data: {other} has other columns or classes (image, label) than {first}. Give a folder with one data set"
    ):
        open_source(str(tmp_path))
    (tmp_path / "b").mkdir()
    other.rename(tmp_path / "b" / "b.parquet")
    assert (read_all_pixels(open_source(str(tmp_path / "b"))) == IMAGES).all()


def test_files_of_other_classes(tmp_path):
    for name, classes in (("a", NAMES), ("b", NAMES[::-1])):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)})
        columns = {"image": rows()[:2], "label": [0, 1]}
        datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / f"{name}.parquet")
    assert "b.parquet has other columns or classes" in open_error(tmp_path)
    write_plain(tmp_path / "b.parquet", {"image": [1, 2], "label": [0, 1]})
    assert "b.parquet has other columns or classes" in open_error(tmp_path)


def test_labels_of_several_widths(tmp_path):
    for name, start, kind in (("a", 0, pa.int32()), ("b", 15, pa.int64())):
        columns = {"image": rows()[start : start + 15], "label": pa.array(LABELS[start : start + 15], kind)}
        write_plain(tmp_path / f"{name}.parquet", columns)
    assert open_source(str(tmp_path)).labels.tolist() == LABELS
    write_plain(tmp_path / "b.parquet", {"image": rows(), "label": [NAMES[label] for label in LABELS]})
    assert "column label" in open_error(tmp_path)
    large = pa.array([0, 2**63], pa.uint64())
    assert "column label" in open_error(
        write_plain(tmp_path / "c" / "c.parquet", {"image": rows()[:2], "label": large})
    )


def test_metadata_that_does_not_fit_the_columns(tmp_path):
    features = {"label": {"_type": "ClassLabel", "names": NAMES}, "image": {"_type": "Image"}}
    words = [NAMES[label] for label in LABELS]
    for text in (json.dumps({"info": {"features": features}}), "[" * 100_000, "{}", "[1]", "x"):
        table = pa.table({"image": rows(), "label": words}).replace_schema_metadata({"huggingface": text})
        pq.write_table(table, tmp_path / "a.parquet")
        check(open_source(str(tmp_path / "a.parquet")))


def test_two_columns_of_one_name(tmp_path):
    table = pa.table([pa.array(rows()), pa.array(rows())], names=["image", "image"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "has several columns of one name (image, image)" in open_error(tmp_path)


def test_a_table_beside_images_is_not_the_data_set(tmp_path):
    (tmp_path / "a.png").write_bytes(rows()[0]["bytes"])
    write_plain(tmp_path / "metadata.parquet", {"file_name": ["a.png"]})
    assert "metadata.parquet looks like labels, and is not read" in open_error(tmp_path)
    assert len(open_source(str(tmp_path), labels=False)) == 1


def test_files_that_are_missing(tmp_path):
    for number in (0, 2):
        write_like_datasets(tmp_path / f"train-0000{number}-of-00003.parquet")
    names = "train-00000-of-00003.parquet, train-00002-of-00003.parquet"
    with advises(f"data: {tmp_path}: these are not all files of one split: {names}. Copy it again, whole"):
        open_source(str(tmp_path))
    write_like_datasets(tmp_path / "train-00001-of-00003.parquet")
    assert len(open_source(str(tmp_path))) == 90
    write_like_datasets(tmp_path / "train-00000-of-00001.parquet")
    assert "not all files of one split" in open_error(tmp_path)


def test_labels_that_are_damaged(tmp_path):
    path = write_plain(tmp_path / "a.parquet", {"image": rows(), "label": LABELS})
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    assert column.path_in_schema == "label"
    data = path.read_bytes()
    start = column.dictionary_page_offset or column.data_page_offset
    path.write_bytes(data[:start] + b"\xff" * 8 + data[start + 8 :])
    reason = re.search(r"column label of (.*)\. Leave", open_error(path))
    assert reason
    with advises(f"data: {path}: column label of {reason[1]}. Leave it out with --data.labels=false"):
        open_source(str(path))
    assert (read_all_pixels(open_source(str(path), labels=False)) == IMAGES).all()


def test_images_that_are_only_paths(tmp_path):
    images = [{"bytes": None, "path": "a.png"}, *rows()[:1]]
    types = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    source = open_source(str(write_plain(tmp_path / "a.parquet", {"image": pa.array(images, types)})))
    with pytest.raises(DecodeError, match="only its path"):
        source.read(0)
    assert source.read(1) == rows()[0]["bytes"]


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write_like_datasets(tmp_path / "a.parquet")
    source = open_source(str(path))
    source.read(0)
    write_like_datasets(path, 5, 30)
    with pytest.raises((RunError, DecodeError), match="was changed while it was used"):
        source.read(29)


def test_the_cache_is_bounded_and_right_in_many_threads(tmp_path, monkeypatch):
    source = open_source(str(write_like_datasets(tmp_path / "a.parquet", group_rows=3)))
    monkeypatch.setattr(parquet, "CACHE_BYTES", 2 * len(source.read(0)))
    encoded = [row["bytes"] for row in rows()]
    errors: list[int] = []

    def read(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 30, 60):
            if source.read(int(index)) != encoded[index]:
                errors.append(int(index))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(source._cache) <= 2


def test_pyarrow_is_optional(tmp_path, monkeypatch):
    path = write_like_datasets(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.delattr(pa, "parquet")
    assert "is Parquet: pip install pyarrow to read it" in open_error(path)


def test_on_a_server(tmp_path):
    folder = tmp_path / "served" / "data"
    write_like_datasets(folder / "train-00000-of-00001.parquet")
    with run_nginx(tmp_path / "served", tmp_path / "work") as server:
        remote = RemoteOptions(cache_dir=str(tmp_path / "cache"))
        source = open_source(f"{server.url}/data/", remote)
        check(source)
        assert not source.is_local
        check(open_source(f"{server.url}/data/train-00000-of-00001.parquet", remote))
        server.stop()
        check(source)  # from memory


def hub(files: dict[str, bytes], requests: list[str]) -> flask.Flask:
    """As much of the hub's API as reading files of one data set uses."""
    app = flask.Flask(__name__)

    @app.before_request
    def note() -> None:
        requests.append(f"{flask.request.method} {flask.request.path} {flask.request.headers.get('Range', '')}")

    @app.errorhandler(404)
    def not_found(error):
        return {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}

    def describe(name: str) -> dict:
        if name in files:
            return {"type": "file", "path": name, "size": len(files[name]), "oid": "1" * 40}
        return {"type": "directory", "path": name, "size": 0, "oid": "2" * 40}

    @app.get("/api/datasets/me/it")
    @app.get("/api/datasets/me/it/revision/<revision>")
    def info(revision="main"):
        return {"id": "me/it", "sha": SHA, "private": False, "siblings": [], "tags": []}

    @app.get("/api/datasets/me/it/tree/<revision>")
    @app.get("/api/datasets/me/it/tree/<revision>/<path:folder>")
    def tree(revision, folder=""):
        start = f"{unquote(folder)}/" if folder else ""
        below = [name.removeprefix(start) for name in files if name.startswith(start)]
        if not below:
            return {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"}
        return [describe(start + name) for name in dict.fromkeys(name.partition("/")[0] for name in below)]

    @app.post("/api/datasets/me/it/paths-info/<revision>")
    def paths_info(revision):
        names = flask.request.form.getlist("paths") or (flask.request.get_json(silent=True) or {}).get("paths", [])
        names = [names] if isinstance(names, str) else names
        known = [name for name in names if name in files or any(one.startswith(f"{name}/") for one in files)]
        return [describe(name) for name in known]

    @app.get("/datasets/me/it/resolve/<revision>/<path:name>")
    def resolve(revision, name):
        answer = flask.Response(files[name], mimetype="application/octet-stream")
        answer.headers |= {"ETag": f'"{len(files[name])}"', "X-Repo-Commit": SHA}
        return answer.make_conditional(flask.request, accept_ranges=True, complete_length=len(files[name]))

    return app


@pytest.fixture
def hub_files(tmp_path):
    """The files of a hub, the requests it gets, and the environment of a process that finds it."""
    files: dict[str, bytes] = {}
    requests: list[str] = []
    more = {"HF_TOKEN": "hf_none", "HF_HUB_DISABLE_XET": "1"}
    more |= {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with run_app(hub(files, requests)) as address:
        yield files, requests, {**os.environ, **more, "HF_ENDPOINT": address}


READ = """
import json, sys
from paragan.data.open_source import open_source
source = open_source(sys.argv[1])
print(json.dumps([source.labels.tolist(), source.classes, [len(source.read(i)) for i in range(len(source))]]))
"""


def test_a_data_set_of_the_hub(tmp_path, hub_files):
    files, requests, environment = hub_files
    path = write_like_datasets(tmp_path / "a.parquet")
    files["README.md"] = b"# it"
    files["data/train-00000-of-00001.parquet"] = path.read_bytes()
    for _ in range(2):  # the second time from the disk cache
        before = len(requests)
        command = [sys.executable, "-c", READ, "hf://me/it"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        labels, classes, sizes = json.loads(ended.stdout)
        assert (labels, classes) == (LABELS, NAMES)
        assert sizes == [len(row["bytes"]) for row in rows()]
        reads = [request for request in requests[before:] if "/resolve/" in request]
    assert reads == []


@pytest.mark.slow
def test_the_command_inspects_a_data_set_of_the_hub(tmp_path, hub_files):
    files, _, environment = hub_files
    files["data/train-00000-of-00001.parquet"] = write_like_datasets(tmp_path / "a.parquet").read_bytes()
    command = [sys.executable, "-m", "paragan", "data", "inspect", "hf://me/it"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "images    30" in ended.stdout
    missing = subprocess.run(
        [*command[:-1], "hf://me/other"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert missing.returncode == 2, missing
    assert missing.stderr.count("\n") == 1
    assert "hf://datasets/me/other" in missing.stderr


def test_addresses_of_the_hub():
    assert expand_hub_address("hf://me/it") == "hf://datasets/me/it"
    assert expand_hub_address("hf://me/it@v1/data") == "hf://datasets/me/it@v1/data"
    for other in ("hf://datasets/me/it", "hf://models/me/it", "s3://me/it", "me/it", "digits", ""):
        assert expand_hub_address(other) == other
