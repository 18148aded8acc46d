"""Training on images that are not held in memory is the same training, to the bit, whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import servers
from paragan.data.formats.image_folder import ImageFolderSource
from processes import (
    final_tensors,
    logged_steps,
    on_step,
    run_cli,
    train_args,
    train_interrupted,
    usage_error,
    wait_until,
)
from servers import run_nginx

NO_DIGITS = ("folder", "--data.resolution=8", "--data.channels=3", "--kimg=0.16")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """70 PNGs and JPEGs of two classes: an epoch ends inside a batch of 16. One is damaged."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for index in range(70):
        folder = root / "ab"[index % 2]
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (8 + index % 3, 9, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03d}.{'png' if index % 3 else 'jpg'}", quality=95)
    (root / "a" / "020.png").write_bytes((root / "a" / "020.png").read_bytes()[:100])
    return root


def run(folder: Path, photos: Path | str, *more: str) -> list[str]:
    """A tiny run on the photos."""
    private = [word for word in train_args(folder) if word != "digits"]
    return [*private[:1], *NO_DIGITS, *private[1:], f"--data={photos}", "--data.max_bad_fraction=0.02", *more]


def trained(folder: Path, photos: Path | str, *more: str) -> Path:
    ended = run_cli(*run(folder, photos, *more))
    assert ended.status == 0, ended
    return folder


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, photos) -> Path:
    return trained(tmp_path_factory.mktemp("streamed") / "run", photos, "--data.cache=stream")


def networks(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors"))]


def test_streamed_or_held_it_is_the_same_training(photos, streamed, tmp_path):
    held = trained(tmp_path / "held", photos)
    assert networks(held) == networks(streamed)
    assert networks(held)
    assert (held / "reals.png").read_bytes() == (streamed / "reals.png").read_bytes()
    scores = [
        [json.loads(line)["value"] for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (held, streamed)
    ]
    assert scores[0] == scores[1]
    assert "cache: memory" in (held / "run.yaml").read_text()
    assert "cache: stream" in (streamed / "run.yaml").read_text()


def test_bad_images_are_listed_with_their_reasons(photos, streamed):
    (line,) = (streamed / "bad_files.txt").read_text().splitlines()
    name, reason = line.split("\t")
    assert "1 image could not be used and was" in (streamed / "report.html").read_text()
    assert name == str(photos / "a" / "020.png")
    assert reason


def test_the_pipeline_is_in_the_lines_of_stats(streamed):
    rows = [json.loads(line) for line in (streamed / "stats.jsonl").read_text().splitlines()]
    keys = ["workers", "batches_ahead", "concurrent_requests", "ready", "fetch_ms", "baseline_ms", "decode_ms"]
    for key in (*keys, "congested", "bad"):
        assert all(f"Data/{key}" in row for row in rows)
    assert rows[-1]["Data/bad"] == 1
    assert "Data: batches ahead" in (streamed / "report.html").read_text()


@pytest.mark.parametrize("step", [2, 5])
def test_a_resume_in_the_middle_of_an_epoch(step, photos, streamed, tmp_path, monkeypatch):
    monkeypatch.setattr("processes.train_args", lambda folder, *more: run(folder, photos, *more))
    stopped = train_interrupted(tmp_path / "run", step, "--data.cache=stream")
    assert run_cli(*run(stopped, photos, "--data.cache=stream")).status == 0
    assert final_tensors(stopped) == final_tensors(streamed)
    assert logged_steps(stopped) == logged_steps(streamed)
    assert len((stopped / "bad_files.txt").read_text().splitlines()) == 1


@pytest.mark.slow
def test_on_four_ranks_then_on_two(photos, tmp_path, processes):
    """The same images on whatever ranks: networks as on one, but for rounding."""
    from safetensors.numpy import load_file

    more = ("--data.cache=stream", "--lanes=4", "--device.precision=float32")
    single = trained(tmp_path / "alone", photos, *more)
    first = processes.start_ranks(4, *run(tmp_path / "run", photos, *more, "--kimg=0.08"))
    assert [rank.wait() for rank in first] == [0] * 4
    then = processes.start_ranks(2, *run(tmp_path / "run", photos, *more))
    assert [rank.wait() for rank in then] == [0] * 2
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (single, tmp_path / "run"))
    remote = sum(float(((value - other[name]) ** 2).sum()) for name, value in one.items())
    assert remote < 1e-4 * sum(float((value**2).sum()) for value in one.values())


def test_other_data_on_resume_is_noticed(photos, tmp_path):
    trained(tmp_path / "run", photos, "--data.cache=stream", "--kimg=0.08")
    copy = tmp_path / "other"
    for path in photos.rglob("*.*"):
        (copy / path.parent.name).mkdir(parents=True, exist_ok=True)
        (copy / path.parent.name / path.name).write_bytes(path.read_bytes())
    (copy / "a" / "000.jpg").unlink()
    line = usage_error(*run(tmp_path / "run", copy, "--data.cache=stream"))
    assert "other" in line


def test_more_damage_than_is_allowed_ends_the_run(photos, tmp_path):
    ended = run_cli(
        *run(tmp_path / "run", photos, "--data.cache=stream", "--data.max_bad_fraction=0.001", "--kimg=1.6")
    )
    assert ended.status == 1
    assert "a/020.png cannot be decoded" in ended.err
    assert "--data.max_bad_fraction" in ended.err
    assert ended.err.count("\n") == 1
    more = run_cli(*run(tmp_path / "run", photos, "--data.cache=stream", "--data.max_bad_fraction=0.1", "--kimg=0.4"))
    assert more.status == 0, more
    held = usage_error(*run(tmp_path / "held", photos, "--data.max_bad_fraction=0.001"))
    assert "a/020.png cannot be decoded" in held


@pytest.mark.parametrize("setting", ["--data.cache=disk", "--data.max_bad_fraction=2", "--data.prefetch.memory_gb=0"])
def test_settings_that_cannot_be(setting, photos, tmp_path):
    assert setting.removeprefix("--").split("=")[0] in usage_error(*run(tmp_path / "run", photos, setting))


@pytest.mark.skipif("PARAGAN_SOAK" not in os.environ, reason="soak")
def test_per_label(photos, tmp_path):
    more = ("--strategy=per-label", "--kimg=0.128", "--data.max_bad_fraction=0.04")
    held = run_cli(*run(tmp_path / "held", photos, *more))
    assert held.status == 0, held
    streamed = run_cli(*run(tmp_path / "streamed", photos, *more, "--data.cache=stream"))
    assert streamed.status == 0, streamed
    for label in ("0000", "0001"):
        assert networks(tmp_path / "held" / "labels" / label) == networks(tmp_path / "streamed" / "labels" / label)


def test_an_address_is_used_as_typed(photos, streamed, tmp_path):
    with run_nginx(photos, tmp_path / "nginx") as server:
        remote = trained(tmp_path / "run", f"{server.url}/", "--data.cache=stream", "--data.remote.cache_dir=")
    assert networks(remote) == networks(streamed)
    assert f"path: {server.url}/" in (remote / "run.yaml").read_text()


class Stalling:
    """A set that answers until it does not."""

    def __init__(self, folder: Path, step: int):
        self.folder, self.step, self.over = folder, step, threading.Event()

    def read(self, source: ImageFolderSource, index: int) -> bytes:
        if (logged_steps(self.folder) or [0])[-1] >= self.step:
            self.over.wait(60)
        return (source.fs.root / source.names[index]).read_bytes()  # pyright: ignore


@pytest.mark.parametrize("merge", [0, 1])
def test_a_stop_does_not_wait_for_data_that_stalls(merge, photos, tmp_path, monkeypatch):
    """Between rounds it leaves a checkpoint; within one, the last stands."""
    folder = tmp_path / "run"
    stalling = Stalling(folder, 3)
    monkeypatch.setattr(ImageFolderSource, "read", lambda source, index: stalling.read(source, index))
    monkeypatch.setattr("paragan.train.loop.STOP_DATA_TIMEOUT_S", 0.5)

    def end() -> None:
        wait_until(lambda: (logged_steps(folder) or [0])[-1] >= 3)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    start = time.monotonic()
    ended = run_cli(
        *run(
            folder,
            photos,
            "--data.cache=stream",
            "--data.prefetch.batches=2",
            f"--device.lanes_per_pass={merge}",
            "--kimg=1.6",
        )
    )
    stalling.over.set()
    thread.join()
    assert ended.status == 3, ended
    assert time.monotonic() - start < 30
    assert "SIGTERM: stopped" in ended.err


# Far away -----------------------------------------------------------------------------------------------------


NO_LISTS = "location / { autoindex off; }"


@pytest.fixture(scope="module")
def shards(tmp_path_factory, photos) -> Path:
    """The good photos as tar shards with their index."""
    folder = tmp_path_factory.mktemp("sharded") / "shards"
    result = run_cli("data", "convert", photos, folder.parent / "good.zip", "--skip-bad")
    assert result.status == 0, result
    assert run_cli("data", "shard", folder.parent / "good.zip", folder, "--shard-mb=0.01").status == 0
    assert len(list(folder.glob("*.tar"))) > 1
    return folder


def test_shards_behind_an_address_are_the_same_training(shards, tmp_path):
    """The server lists no folders: the index beside the shards names them."""
    near = trained(tmp_path / "near", shards, "--data.cache=stream")
    server = servers.Nginx(shards.parent, tmp_path / "nginx", NO_LISTS)
    try:
        remote = trained(tmp_path / "far", f"{server.url}/shards")  # pyright: ignore[reportArgumentType]
    finally:
        server.stop()
    assert networks(near) == networks(remote)
    assert f"{server.url}/shards" in (remote / "run.yaml").read_text()


def test_a_server_that_is_gone_ends_the_run_and_the_command_goes_on(shards, tmp_path):
    near = trained(tmp_path / "near", shards, "--data.cache=stream")
    server = servers.Nginx(shards.parent, tmp_path / "nginx", NO_LISTS)
    command = run(
        tmp_path / "far",
        f"{server.url}/shards",  # pyright: ignore[reportArgumentType]
        *(
            "--data.remote.cache_dir=",
            "--data.remote.retry_for_s=1",
            "--data.prefetch.batches=2",
            "--output.checkpoint_kimg=0.016",
        ),
    )
    try:
        with on_step(4, lambda session: server.stop()):
            ended = run_cli(*command)
        assert ended.status == 1, ended
        assert ended.err.count("\n") == 1
        assert f"{server.url}/shards/" in ended.err
        assert "cannot be reached" in ended.err
        assert "the same command resumes from the last checkpoint" in ended.err
        server.start()
        assert run_cli(*command).status == 0
    finally:
        server.stop()
    assert networks(near) == networks(tmp_path / "far")
