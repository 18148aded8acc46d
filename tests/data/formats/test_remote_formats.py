"""Training on a set in one file behind an address: the same to the bit, whatever becomes of file and cache."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

import servers
from paragan.data.storage import disk_cache as caches
from processes import on_step, run_cli, train_args, usage_error
from servers import Nginx

FORMS = {"npz": "set.npz", "h5": "set.h5", "chunked": "chunked.h5", "zip": "set.zip", "tar": "shards/shard-000000.tar"}
SMALL = ("--data.prefetch.batches=2", "--output.checkpoint_kimg=0.016")


def build(folder: Path, seed: int) -> Path:
    """Equal sets of 70 images of two classes, in every form."""
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(0, 256, (70, 8, 8, 3), np.uint8), np.arange(70) % 2
    folder.mkdir()
    np.savez(folder / "set.npz", images=images, labels=labels)
    for out in ("set.h5", "set.zip", "shards"):
        more = ["--to=tars"] if out == "shards" else []
        assert run_cli("data", "convert", folder / "set.npz", folder / out, *more).status == 0
    with h5py.File(folder / "chunked.h5", "w") as file:
        file.create_dataset("imgs", data=images, chunks=(16, 8, 8, 3), compression="gzip")
        file["labels"] = labels
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("sets") / "sets", 0)


@pytest.fixture
def served(sets, tmp_path) -> Iterator[tuple[Nginx, Path]]:
    """The sets in a folder of their own, behind a real server."""
    folder = tmp_path / "served"
    shutil.copytree(sets, folder)
    with servers.run_nginx(folder, tmp_path / "nginx") as server:
        yield server, folder


def command(folder: Path, where: str | Path, *more: str) -> list[str]:
    private = [word for word in train_args(folder) if word != "digits"]
    return [*private[:1], "folder", "--kimg=0.16", *private[1:], f"--data={where}", *more]


def networks(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors"))]


def trained(folder: Path, where: str | Path, *more: str) -> list[bytes]:
    ended = run_cli(*command(folder, where, *more))
    assert ended.status == 0, ended
    return networks(folder)


@pytest.fixture(scope="module")
def near(sets, tmp_path_factory) -> list[bytes]:
    """What training makes of them here, held in memory."""
    return trained(tmp_path_factory.mktemp("near") / "run", sets / "set.npz", "--data.cache=memory")


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_training(form, served, near, tmp_path):
    server, folder = served
    cache = f"--data.remote.cache_dir={tmp_path / 'cache'}"
    assert trained(tmp_path / "far", f"{server.url}/{FORMS[form]}", cache) == near
    assert trained(tmp_path / "here", folder / FORMS[form], "--data.cache=stream") == near


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("form", ["h5", "zip", "tar"])
def test_a_file_replaced_on_the_server_ends_the_run_by_name(form, served, near, tmp_path):
    server, folder = served
    other, name = build(tmp_path / "other", 1), FORMS[form]
    reported = command(tmp_path / "run", f"{server.url}/{name}", "--data.remote.cache_dir=", *SMALL)
    old = folder / "old"
    shutil.copy2(folder / name, old)
    with on_step(2, lambda session: shutil.copyfile(other / name, folder / name)):
        ended = run_cli(*reported)
    assert ended.status == 1, ended
    assert f"{server.url}/{name} was replaced on its server while it was used" in ended.err
    assert ended.err.count("\n") == 1
    shutil.copy2(old, folder / name)
    assert run_cli(*reported).status == 0
    assert networks(tmp_path / "run") == near


def test_a_local_file_written_over_ends_the_run_by_name(sets, tmp_path):
    other, file = build(tmp_path / "other", 1), tmp_path / "a.h5"
    shutil.copyfile(sets / "set.h5", file)
    with on_step(2, lambda session: shutil.copyfile(other / "set.h5", file)):
        ended = run_cli(*command(tmp_path / "run", file, "--data.cache=stream", *SMALL))
    assert ended.status == 1, ended
    assert f"data: {file} was changed while it was used" in ended.err


# The cache ----------------------------------------------------------------------------------------------------


def test_a_cache_that_was_damaged_between_runs(served, near, tmp_path):
    server, _ = served
    cache, rng = f"--data.remote.cache_dir={tmp_path / 'cache'}", np.random.default_rng(0)
    for number in range(3):
        assert trained(tmp_path / str(number), f"{server.url}/set.zip", cache) == near
        for file in (tmp_path / "cache").rglob("*"):
            if file.is_file():
                data = np.frombuffer(file.read_bytes(), np.uint8).copy()
                data[rng.integers(0, len(data), 50)] ^= 0x55
                file.write_bytes(data[: -rng.integers(1, 100)].tobytes())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_accepts_no_writes(code, served, near, tmp_path, monkeypatch):
    def fails(file: int, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    server, _ = served
    monkeypatch.setattr(caches, "_append", fails)
    assert trained(tmp_path / "run", f"{server.url}/set.zip", f"--data.remote.cache_dir={tmp_path / 'cache'}") == near


def test_a_cache_that_cannot_be_written_is_named(served, tmp_path, monkeypatch):
    real = os.open

    def read_only(path, flags: int, *more) -> int:
        if "cache" in str(path) and flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more)

    server, _ = served
    monkeypatch.setattr(caches.os, "open", read_only)
    line = usage_error(
        *command(tmp_path / "run", f"{server.url}/set.zip", f"--data.remote.cache_dir={tmp_path / 'cache'}")
    )
    assert "data.remote.cache_dir=" in line
    assert "Read-only file system" in line
    assert '"" for none' in line


def test_two_runs_at_once_share_it(served, near, tmp_path, processes):
    server, _ = served
    reported = [
        command(tmp_path / str(number), f"{server.url}/set.zip", f"--data.remote.cache_dir={tmp_path / 'cache'}")
        for number in range(2)
    ]
    running = [processes.start_forked(*one) for one in reported]
    assert [one.wait() for one in running] == [0, 0]
    assert [networks(tmp_path / str(number)) for number in range(2)] == [near, near]
