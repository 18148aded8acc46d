"""Which source a name means, here and far away."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from advice import advises
from fake_datasets import FakeRemoteFileSystem, encode_image, open_error, random_images, read_all_pixels
from paragan.data.open_source import open_source
from paragan.data.storage import remote as remote_storage

IMAGES = random_images(3)


def everything(folder: Path) -> Path:
    np.savez(folder / "a.npz", images=IMAGES)
    with zipfile.ZipFile(folder / "a.zip", "w") as archive, tarfile.open(folder / "a.tar", "w") as tar:
        for index, image in enumerate(IMAGES):
            archive.writestr(f"{index}.png", encode_image(image))
            info = tarfile.TarInfo(f"{index}.png")
            info.size = len(encode_image(image))
            tar.addfile(info, io.BytesIO(encode_image(image)))
            (folder / "flat").mkdir(exist_ok=True)
            (folder / "flat" / f"{index}.png").write_bytes(encode_image(image))
    with h5py.File(folder / "a.h5", "w") as file:
        file["imgs"] = IMAGES
    return folder


@pytest.mark.parametrize("name", ["a.npz", "a.zip", "a.h5", "a.tar", "*.tar", "", "flat"])
@pytest.mark.parametrize("remote", [False, True])
def test_the_same_images_in_every_form(tmp_path, monkeypatch, name, remote):
    everything(tmp_path)

    def remote_fs(where, _reach):
        path = tmp_path / where.removeprefix("far://data/")
        return (FakeRemoteFileSystem(path), "") if path.is_dir() else (FakeRemoteFileSystem(path.parent), path.name)

    monkeypatch.setattr(remote_storage, "open_remote", remote_fs)
    result = open_source(f"far://data/{name}" if remote else str(tmp_path / name))
    assert (read_all_pixels(result) == IMAGES).all()
    assert result.labels is None
    assert result.is_local is not remote or result.array is not None


def test_a_name_that_looks_like_a_pattern_but_exists_is_that_file(tmp_path):
    everything(tmp_path)
    (tmp_path / "a.tar").rename(tmp_path / "{1..2}*.tar")
    assert len(open_source(str(tmp_path / "{1..2}*.tar"))) == 3


def test_the_formats_are_named_in_one_line(tmp_path):
    (tmp_path / "a.rar").write_text("")
    message = open_error(tmp_path / "a.rar")
    for word in ("digits", ".npz", ".zip", ".h5", "shard-{000..012}.tar", ".webp", "Hugging Face"):
        assert word in message


@pytest.mark.parametrize("files", [("data_batch_1", "batches.meta"), ("train", "test", "meta")])
def test_cifar_in_pickles_is_written_as_an_npz(tmp_path, monkeypatch, files):
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\nU\x04true\x85R.")
    with advises(
        f"data: {tmp_path}: CIFAR in pickles, which are never loaded, since that can run code. Use an npz: "
        "np.savez('cifar.npz', images=x.data, labels=x.targets, classes=x.classes) of torchvision's x=CIFAR10(...)"
    ):
        open_source(str(tmp_path))
    x = SimpleNamespace(data=random_images(6, 32), targets=[1, 0, 1, 0, 1, 0], classes=["cat", "dog"])
    call = re.search(r"np\.savez\(.*?\)", open_error(tmp_path))
    assert call
    monkeypatch.chdir(tmp_path)
    eval(call[0], {"np": np, "x": x})
    source = open_source("cifar.npz")
    assert (read_all_pixels(source) == x.data).all()
    assert source.labels is not None
    assert (source.labels.tolist(), source.classes) == (x.targets, ("cat", "dog"))


def test_what_is_slow_to_import_is_imported_where_it_is_needed():
    program = "import sys, paragan.data.open_source; print({'h5py', 'datasets', 'sklearn', 'fsspec'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "h5py" not in ran.stdout
    assert "datasets" not in ran.stdout
