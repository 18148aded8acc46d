"""Run folders in a real S3 server: complete or absent there, and resumed from there on a machine that has no copy."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch

import servers
from advice import Case, advises, case_id
from paragan.core.errors import RunError, UsageError
from paragan.data.storage import object_folder
from paragan.data.storage.object_folder import ObjectFolder
from paragan.data.storage.object_store import ObjectStore
from paragan.data.storage.retry import FileStat, Response, RetryableError
from paragan.train.console import RunConsole
from paragan.train.remote_run import ownership, upload
from paragan.train.remote_run.ownership import Ownership, OwnershipLost
from paragan.train.remote_run.remote_run import download_run, wait_for_uploads
from paragan.train.remote_run.upload import Uploader
from processes import (
    LONG_RUN_ARG,
    CliProcess,
    CliProcesses,
    free_port,
    run_cli,
    train_args,
    train_tiny,
    usage_error,
    wait_until,
)
from servers import S3Server

CHECKPOINTS = "--output.checkpoint_kimg=0.08"  # every five steps

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


class Bucket:
    """A bucket of its own for every test."""

    def __init__(self, server: S3Server, name: str):
        import boto3

        self.name, self.server = name, server
        keys = {"aws_access_key_id": "someone", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=server.url, **keys)
        self.client.create_bucket(Bucket=name)
        self.address = f"s3://{name}/runs/a"

    def objects(self) -> dict[str, int]:
        """Return the sizes of the objects of the run, by name."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix="runs/a/").get("Contents", [])
        return {entry["Key"].removeprefix("runs/a/"): entry["Size"] for entry in found}

    def get(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=f"runs/a/{name}")["Body"].read()

    def manifests(self) -> list[str]:
        return [name for name in self.objects() if name.endswith("/checkpoint.json")]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with servers.run_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(server, f"bucket-{tmp_path.name.replace('_', '-').lower()[:40].strip('-')}")
    yield bucket
    bucket.client.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the run on this machine alone."""
    return model_of(train_tiny(tmp_path_factory.mktemp("undisturbed") / "run", LONG_RUN_ARG, CHECKPOINTS))


def start(processes: CliProcesses, machine: Path, *arguments: str, **env: str) -> CliProcess:
    """Start a command on a machine: with a home of its own."""
    return processes.start_forked(*arguments, **{**os.environ, "XDG_CACHE_HOME": str(machine), **env})


def finish(process: CliProcess, timeout_s: float = 400) -> tuple[int, str]:
    return process.wait(timeout_s), process.out + process.err


def wait_for(condition: Any, process: CliProcess, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.status() is None, process.out + process.err
        assert time.monotonic() < deadline
        time.sleep(0.05)


def model_of(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_whose_machine_is_taken_away_goes_on_on_another(
    bucket: Bucket, undisturbed: bytes, tmp_path: Path, processes: CliProcesses
):
    arguments = train_args(bucket.address, LONG_RUN_ARG, CHECKPOINTS)  # pyright: ignore[reportArgumentType]
    first = start(processes, tmp_path / "first", *arguments)
    wait_for(bucket.manifests, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    status, output = finish(start(processes, tmp_path / "second", *arguments))
    assert status == 0, output
    assert "still trains there" in output  # the former one did not say that it ends
    assert "resumed from" in output
    assert bucket.get("model/model.safetensors") == undisturbed
    rows = [json.loads(line) for line in bucket.get("stats.jsonl").splitlines()]
    assert [row["Progress/step"] for row in rows] == list(range(1, 101))
    names = bucket.objects()
    assert {"run.yaml", "report.html", "metrics.jsonl", "model/config.json", "reals.png"} <= set(names)
    assert not any(name.startswith(".") or "members" in name for name in names)
    assert len(bucket.manifests()) == 2  # as many as here
    assert json.loads(bucket.get("owner.json")).keys() == {"run", "session"}  # the next one need not wait


def test_a_stopped_run_says_so_and_goes_on_at_once(
    bucket: Bucket, undisturbed: bytes, tmp_path: Path, processes: CliProcesses
):
    arguments = train_args(bucket.address, LONG_RUN_ARG, CHECKPOINTS)  # pyright: ignore[reportArgumentType]
    first = start(processes, tmp_path / "first", *arguments)
    wait_for(bucket.manifests, first)
    first.send_signal(signal.SIGTERM)
    status, output = finish(first)
    assert status == 3, output
    step = int(json.loads(bucket.get("stats.jsonl").splitlines()[-1])["Progress/step"])
    assert f"checkpoints/{step:08d}/checkpoint.json" in bucket.objects()  # the last one was uploaded
    status, output = finish(start(processes, tmp_path / "second", *arguments))
    assert status == 0, output
    assert "still trains there" not in output
    assert bucket.get("model/model.safetensors") == undisturbed


def test_one_session_at_a_time_writes_a_folder(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ownership, "EXPIRE_S", 4.0)
    monkeypatch.setattr(ownership, "POLL_S", 0.1)
    console = RunConsole(enabled=False)
    folder = ObjectFolder(bucket.address, "--run-dir")
    first, second, third = (Ownership(folder) for _ in range(3))
    first.acquire(console)
    assert first.is_new
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.acquire, console)
        time.sleep(0.5)
        first.renew()
        with pytest.raises(UsageError, match=rf"is being written by process {os.getpid()} on .* Stop that run"):
            waiting.result(30)
    second.acquire(console)  # the first one is silent now
    assert (second.run_id, second.is_new) == (first.run_id, False)
    with pytest.raises(OwnershipLost, match="is written by process"):
        first.renew()
    first.release()  # of what it has lost
    second.renew()
    Ownership(folder, second.run_id, second.session).renew()  # another rank of this session
    second.renew()
    second.release()
    start_s = time.monotonic()
    third.acquire(console)
    assert time.monotonic() - start_s < 4.0
    bucket.client.put_object(Bucket=bucket.name, Key="runs/a/owner.json", Body=b"not JSON")
    fourth = Ownership(folder)
    with monkeypatch.context() as patch, advises("another process starts there now. Use another --run-dir, or wait"):
        patch.setattr(ObjectFolder, "read", lambda *_: None)  # as before another one wrote it
        fourth.acquire(console)
    fourth.acquire(console)


def test_a_session_that_was_frozen_writes_nothing_more(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It wakes up when another session has taken the folder, trained in it to the end and released it."""
    monkeypatch.setattr(ownership, "EXPIRE_S", 0.5)
    monkeypatch.setattr(ownership, "POLL_S", 0.1)
    monkeypatch.setattr(upload, "RENEW_S", 1000.0)  # what it uploads before it renews counts
    console = RunConsole(enabled=False)
    folder = ObjectFolder(bucket.address, "--run-dir")
    frozen, other = Ownership(folder), Ownership(folder)
    frozen.acquire(console)
    (tmp_path / "run.yaml").write_text("old")
    other.acquire(console)
    bucket.client.put_object(Bucket=bucket.name, Key="runs/a/run.yaml", Body=b"new")
    other.release()
    uploader = Uploader(folder, tmp_path, frozen, lambda: True, "", console)
    uploader.start()
    assert "is written by another process now: nothing more is uploaded" in uploader.finish(30)
    assert bucket.get("run.yaml") == b"new"
    with pytest.raises(OwnershipLost):
        frozen.renew()
    other.renew()  # after its release: does not take it back
    assert "owner" not in json.loads(bucket.get("owner.json"))


def test_a_response_that_is_lost_is_no_other_owner(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    original = ObjectStore.put_if
    attempts: list[str] = []

    def put_if(self: ObjectStore, name: str, *arguments: Any) -> None:
        attempts.append(name)
        original(self, name, *arguments)
        if len(attempts) == 1:
            raise RetryableError("the connection was closed")

    monkeypatch.setattr(ObjectStore, "put_if", put_if)
    owner = Ownership(ObjectFolder(bucket.address, "--run-dir"))
    owner.acquire(RunConsole(enabled=False))
    assert attempts == ["owner.json"] * 2
    assert json.loads(bucket.get("owner.json"))["session"] == owner.session


def test_a_machine_gets_all_checkpoints_and_nothing_else(bucket: Bucket, tmp_path: Path):
    """A run goes back to an older checkpoint if the newest is damaged, or if it diverges."""
    names = [f"checkpoints/{step:08d}/{name}" for step in (5, 10) for name in ("rank0000.safetensors", upload.MANIFEST)]
    others = ["", "checkpoints/", "members.json", ".hidden", "checkpoints/\u00b2/checkpoint.json"]
    others += ["checkpoints/00000015/rank0000.safetensors", "checkpoints/undone1-00000020/checkpoint.json"]
    for name in [*names, "run.yaml", "notes of mine.txt"]:
        bucket.client.put_object(Bucket=bucket.name, Key=f"runs/a/{name}", Body=name.encode())
    for name in others:  # those that end with / are folders as consoles make them
        bucket.client.put_object(Bucket=bucket.name, Key=f"runs/a/{name}", Body=b"" if name[-1:] in "/" else b"x")
    folder = ObjectFolder(bucket.address, "--run-dir")
    owner = Ownership(folder)
    owner.acquire(RunConsole(enabled=False))
    assert sorted(download_run(folder, tmp_path / "run", owner, has_all_parts=True)) == sorted(names)
    files = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files == {*names, "run.yaml", "notes of mine.txt", ".run-id"}


def test_a_download_that_was_cut_off_is_begun_again(bucket: Bucket, tmp_path: Path, monkeypatch: Any):
    """Of a machine with an older checkpoint: the newest one counts as here only when everything else is."""
    folder = ObjectFolder(bucket.address, "--run-dir")
    owner = Ownership(folder)
    owner.acquire(RunConsole(enabled=False))

    def write(step: int) -> None:
        for name in (f"checkpoints/{step:08d}/rank0000.safetensors", f"checkpoints/{step:08d}/checkpoint.json"):
            bucket.client.put_object(Bucket=bucket.name, Key=f"runs/a/{name}", Body=b"x")
        for name in ("run.yaml", "stats.jsonl"):
            bucket.client.put_object(Bucket=bucket.name, Key=f"runs/a/{name}", Body=str(step).encode())

    write(5)
    download_run(folder, tmp_path, owner, has_all_parts=True)
    write(10)
    original = ObjectFolder.download
    count = len(bucket.objects())
    for number in range(count):
        downloads = iter(range(number))

        def download(self: ObjectFolder, name: str, path: Path, downloads: Any = downloads) -> None:
            if next(downloads, None) is None:
                raise RunError("killed")
            original(self, name, path)

        shutil.rmtree(tmp_path / "checkpoints" / "00000010", ignore_errors=True)
        (tmp_path / "stats.jsonl").write_text("5")
        with monkeypatch.context() as patch, contextlib.suppress(RunError):
            patch.setattr(ObjectFolder, "download", download)
            download_run(folder, tmp_path, owner, has_all_parts=True)
        download_run(folder, tmp_path, owner, has_all_parts=True)
        assert (tmp_path / "stats.jsonl").read_text() == "10"
        assert (tmp_path / "checkpoints" / "00000010" / "checkpoint.json").exists()


def test_a_large_object_is_downloaded_in_parts_of_one_version(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_folder, "READ_PART_BYTES", 10)
    original = ObjectStore.fetch
    requests: list[int] = []

    def fetch(self: ObjectStore, name: str, start: int, *arguments: Any) -> Response:
        requests.append(start)
        if len(requests) == 2:
            raise RetryableError("it answers 500")
        if len(requests) == 4:
            bucket.client.put_object(Bucket=bucket.name, Key="runs/a/large", Body=b"b" * 25)
        return original(self, name, start, *arguments)

    monkeypatch.setattr(ObjectStore, "fetch", fetch)
    bucket.client.put_object(Bucket=bucket.name, Key="runs/a/large", Body=b"a" * 25)
    ObjectFolder(bucket.address, "--run-dir").download("large", tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == b"b" * 25
    assert requests == [0, 10, 10, 20, 0, 10, 20]  # the failed part again; then all of the new version
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_files_that_cannot_be_uploaded_do_not_keep_others_from_it(bucket: Bucket, tmp_path: Path):
    """An undone checkpoint leaves the object store, one of the same step replaces it, and damaged ones stay here."""
    checkpoints = tmp_path / "checkpoints"

    def write(name: str, content: str) -> None:
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "rank0000.safetensors").write_text(content)
        files = {"rank0000.safetensors": {"bytes": len(content)}}
        (checkpoints / name / "checkpoint.json").write_text(json.dumps({"files": files}))

    folder = ObjectFolder(bucket.address, "--run-dir")
    uploader = Uploader(folder, tmp_path, Ownership(folder), lambda: True, "", RunConsole(enabled=False))
    write("00000005", "five")
    write("00000010", "ten")
    write("damaged-00000007", "seven")
    (checkpoints / "damaged-00000007" / "checkpoint.json").write_text("not JSON")
    uploader._upload_all(False)
    assert len(bucket.manifests()) == 2
    assert not any("damaged" in name for name in bucket.objects())
    (checkpoints / "00000010").rename(checkpoints / "undone1-00000010")
    uploader._upload_all(False)
    assert bucket.manifests() == ["checkpoints/00000005/checkpoint.json"]
    write("00000010", "another")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "\udcff.safetensors").write_text("no name that an object can have")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("run")
    with pytest.raises(UsageError, match="does not support this request"):
        uploader._upload_all(True)
    assert bucket.get("checkpoints/00000010/rank0000.safetensors") == b"another"
    assert "checkpoints/00000010/checkpoint.json" in bucket.objects()
    assert bucket.get("run.yaml") == b"run"
    assert "model/config.json" not in bucket.objects()  # it would say that the weights are there


def test_a_file_that_disappears_during_its_upload_does_not_end_the_thread(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = ObjectFolder(bucket.address, "--run-dir")
    with pytest.raises(FileNotFoundError):
        folder.write("gone", tmp_path / "gone")
    monkeypatch.setattr(upload, "SCAN_S", 0.05)
    uploader = Uploader(folder, tmp_path, Ownership(folder), lambda: True, "", RunConsole(enabled=False))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    original = ObjectFolder.write

    def write(self: ObjectFolder, name: str, data: bytes | Path) -> None:
        if name == "a.txt":
            (tmp_path / name).unlink()
        original(self, name, data)

    monkeypatch.setattr(ObjectFolder, "write", write)
    uploader.start()
    assert uploader.finish(60) == ""
    assert bucket.objects().keys() == {"b.txt"}


def test_a_copy_of_a_run_that_is_gone_is_not_continued_in_silence(bucket: Bucket, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = ObjectFolder(bucket.address, "--run-dir")
    local = train_tiny(folder.local_copy("runs"), "--kimg=0.032")
    ownership = Ownership(folder)
    ownership.acquire(RunConsole(enabled=False))
    with advises("Remove that copy to start again, or continue it with --run-dir and its path"):
        download_run(folder, local, ownership, has_all_parts=True)
    train_tiny(local, "--kimg=0.048")  # continued
    shutil.rmtree(local)
    assert download_run(folder, local, ownership, has_all_parts=True) == []
    train_tiny(local, "--kimg=0.032")
    (local / ".run-id").write_text("former")
    ownership.is_new = False  # another run is there now
    download_run(folder, local, ownership, has_all_parts=True)
    assert not (local / "run.yaml").exists()
    (moved,) = local.parent.glob(f"{local.name}-former-*")
    assert (moved / "run.yaml").exists()
    assert (local / ".run-id").read_text() == ownership.run_id


def test_what_is_there_is_complete_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After every single write and delete: a checkpoint.json stands beside all the files that it names."""
    there: dict[str, int] = {}
    fails = True

    def check() -> None:
        for name in there:
            if name.endswith("/checkpoint.json"):
                checkpoint = name.removesuffix("/checkpoint.json")
                parts = {other for other in there if other.startswith(f"{checkpoint}/rank")}
                assert parts == {f"{checkpoint}/rank000{rank}.safetensors" for rank in range(3)}

    class Recorder:
        address = "s3://bucket/run"

        def read(self, name: str) -> None: ...

        def write(self, name: str, data: bytes | Path) -> None:
            nonlocal fails
            fails = not fails
            if fails:  # every second one
                raise RunError(f"{name} cannot be reached")
            there[name] = len(data) if isinstance(data, bytes) else data.stat().st_size
            check()

        def delete(self, names: list[str]) -> None:
            for name in names:
                del there[name]
                check()

        def list_all(self, folder: str) -> dict[str, FileStat]:
            return {name: FileStat(size) for name, size in there.items() if name.startswith(f"{folder}/")}

    def write_checkpoint(name: str, count: int) -> None:
        path = tmp_path / "checkpoints" / f".writing-{name}"
        path.mkdir(parents=True)
        for rank in range(count):
            (path / f"rank000{rank}.safetensors").write_bytes(bytes(rank + 1))
        files = {f"rank000{rank}.safetensors": {"bytes": rank + 1} for rank in range(3)}
        (path / "checkpoint.json").write_text(json.dumps({"files": files}))
        path.rename(tmp_path / "checkpoints" / name)

    monkeypatch.setattr(upload, "SCAN_S", 0.01)
    monkeypatch.setattr(upload, "ENDING_SCAN_S", 0.01)
    monkeypatch.setattr(upload, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(Ownership, "release", lambda _: None)
    recorder = cast(ObjectFolder, Recorder())
    console = RunConsole(enabled=False)
    uploader = Uploader(recorder, tmp_path, Ownership(recorder), lambda: True, "", console)
    write_checkpoint("00000001", 3)
    (tmp_path / "stats.jsonl").write_text("{}\n")
    (tmp_path / "members.json").write_text("{}")
    uploader.start()
    wait_until(lambda: "checkpoints/00000001/checkpoint.json" in there, 30, "the first checkpoint")
    assert "stats.jsonl" in there
    write_checkpoint("00000002", 2)
    wait_until(lambda: "checkpoints/00000002/rank0001.safetensors" in there, 30, "two parts")
    time.sleep(0.3)
    assert "checkpoints/00000002/checkpoint.json" not in there  # the part of rank 2 is missing
    assert "lacks checkpoints/00000002/checkpoint.json" in uploader.finish(0.3)
    there["checkpoints/00000002/rank0002.safetensors"] = 3  # which it uploads itself
    shutil.rmtree(tmp_path / "checkpoints" / "00000001")
    assert uploader.finish(30) == ""
    assert {name.split("/")[1] for name in there if name.startswith("checkpoints/")} == {"00000002"}
    assert "members.json" not in there


@pytest.mark.slow
def test_ranks_without_shared_storage_leave_one_checkpoint(bucket: Bucket, tmp_path: Path, processes: CliProcesses):
    """Two hosts, each with a disk of its own: rank 1 has residuals, which only it can upload."""
    options = ["--strategy=quantized", "--strategy.wire=int4", CHECKPOINTS, LONG_RUN_ARG]
    arguments = train_args(bucket.address, *options)  # pyright: ignore[reportArgumentType]

    def start_ranks(hosts: str) -> list[CliProcess]:
        launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        launch |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        return [
            start(processes, tmp_path / f"{hosts}{rank}", *arguments, RANK=str(rank), **launch) for rank in range(2)
        ]

    ranks = start_ranks("old")
    wait_for(bucket.manifests, ranks[0])
    for process in ranks:
        process.send_signal(signal.SIGKILL)
    for process in ranks:
        process.wait()
    (name,) = {manifest.split("/")[1] for manifest in bucket.manifests()[-1:]}
    assert {f"checkpoints/{name}/rank000{rank}.safetensors" for rank in range(2)} <= set(bucket.objects())
    results = [finish(process) for process in start_ranks("new")]
    assert [status for status, _ in results] == [0, 0], results
    other = tmp_path / "other"
    local = [finish(rank) for rank in processes.start_ranks(2, *train_args(other, *options))]
    assert [status for status, _ in local] == [0, 0], local
    assert bucket.get("model/model.safetensors") == model_of(other)


@pytest.mark.slow
def test_training_goes_on_without_the_bucket(
    bucket: Bucket, undisturbed: bytes, tmp_path: Path, processes: CliProcesses
):
    arguments = train_args(bucket.address, LONG_RUN_ARG, CHECKPOINTS, "--output.upload_s=5")  # pyright: ignore
    process = start(processes, tmp_path / "machine", *arguments)
    wait_for(bucket.manifests, process)
    bucket.client.delete_objects(
        Bucket=bucket.name, Delete={"Objects": [{"Key": f"runs/a/{name}"} for name in bucket.objects()]}
    )
    while bucket.objects():
        for name in bucket.objects():
            bucket.client.delete_object(Bucket=bucket.name, Key=f"runs/a/{name}")
    bucket.client.delete_bucket(Bucket=bucket.name)
    status, output = finish(process)
    assert status == 1, output
    lines = output.splitlines()
    assert any("there is no such bucket" in line and "training goes on" in line for line in lines), output
    assert "lacks " in lines[-1] or "lacks " in lines[-2]
    assert "The run is complete in" in output
    assert "Traceback" not in output
    (copy,) = (tmp_path / "machine" / "paragan" / "runs").iterdir()
    assert model_of(copy) == undisturbed
    bucket.client.create_bucket(Bucket=bucket.name)
    status, output = finish(start(processes, tmp_path / "machine", *arguments))
    assert status == 2, output
    assert f"is empty, but {copy} is a copy of it at 1.6 kimg. Remove that copy to start again, or continue" in output
    status, output = finish(start(processes, tmp_path / "machine", *arguments, f"--run-dir={copy}"))
    assert status == 0, output


@pytest.mark.slow
def test_missing_uploads_are_the_status_of_a_run_whose_ranks_may_be_lost(
    bucket: Bucket, tmp_path: Path, processes: CliProcesses
):
    """The launcher of a gossip run takes the status of any rank: all have to know what rank 0 could not upload."""
    options = ["--strategy=gossip", "--ranks=2", "--output.upload_s=2", LONG_RUN_ARG, CHECKPOINTS]
    arguments = train_args(bucket.address, *options)  # pyright: ignore[reportArgumentType]
    process = start(processes, tmp_path / "machine", *arguments)
    wait_for(bucket.manifests, process)
    while objects := bucket.objects():
        for name in objects:
            bucket.client.delete_object(Bucket=bucket.name, Key=f"runs/a/{name}")
    bucket.client.delete_bucket(Bucket=bucket.name)
    status, output = finish(process)
    assert status == 1, output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if "lacks " in line]) == 1, output


def test_a_signal_ends_the_wait_for_uploads(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    console = RunConsole(enabled=False)
    monkeypatch.setattr(console, "print", lines.append)
    folder = ObjectFolder(f"s3://no-{bucket.name}/run", "--run-dir")
    uploader = Uploader(folder, tmp_path, Ownership(folder), lambda: True, "", console)
    (tmp_path / "run.yaml").write_text("run")
    uploader.start()
    with pytest.raises(KeyboardInterrupt), signal_after(0.5):
        wait_for_uploads(uploader, 300.0, tmp_path, console)
    assert "lacks run.yaml" in lines[-1]
    assert f"What was trained is in {tmp_path}" in lines[-1]
    bucket.client.create_bucket(Bucket=f"no-{bucket.name}")
    assert uploader.finish(60) == ""


@contextlib.contextmanager
def signal_after(pause_s: float) -> Iterator[None]:
    """Send SIGINT to this process a moment later."""
    timer = threading.Timer(pause_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_bucket_without_rights_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: CliProcesses):
    with servers.run_faulty() as server:
        server.responses = [servers.respond_status(403)]
        for name, value in S3Server(server.url).environment.items():
            monkeypatch.setenv(name, value)
        status, output = finish(start(processes, tmp_path / "machine", *train_args("s3://bucket/run")))  # pyright: ignore
    assert status == 2
    (line,) = [line for line in output.splitlines() if "paragan:" in line]
    assert "--run-dir: s3://bucket/run: it denies access (403): set AWS_ACCESS_KEY_ID" in line


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "--outdir=s3://bucket/runs",
            "--outdir s3://bucket/runs: numbered folders are of this machine. Use --run-dir s3://bucket/NAME",
            ("~outdir --run-dir=s3://bucket/name",),
        ),
        Case(
            "--run-dir=s3://bucket/run --strategy=per-label",
            "workers of --strategy per-label share a folder. Use one on a shared disk",
            ("~run-dir --run-dir=NEW/run",),
        ),
        Case(
            "--run-dir=s3://bucket",
            "--run-dir s3://bucket: is a whole bucket. Use s3://bucket/NAME",
            ("~run-dir --run-dir=s3://bucket/NAME",),
        ),
        Case(
            "--run-dir=s4://bucket/run",
            "--run-dir s4://bucket/run: is neither a folder nor in an object store. Use s3://, gs:// or az://",
            ("~run-dir --run-dir=s3://bucket/run", "~run-dir --run-dir=gs://bucket/run"),
        ),
        Case(
            "--run-dir=s3://",
            "--run-dir: s3://: names no bucket. Use s3://BUCKET/NAME",
            ("~run-dir --run-dir=s3://bucket/name",),
        ),
    ],
    ids=case_id,
)
def test_addresses_that_cannot_be_used(case: Case, check_advice, server: S3Server):
    check_advice(case, ["train", "digits", "-n"])


def test_an_address_with_a_secret_is_refused_and_not_shown(server: S3Server):
    with advises("Set the variables for credentials instead (docs/data.md)") as refusal:
        ObjectFolder("s3://key:hidden@bucket/run", "--run-dir")
    assert "hidden" not in str(cast(Any, refusal).value)
    ObjectFolder("s3://bucket/run", "--run-dir")


def test_an_endpoint_without_a_scheme_is_one_line(monkeypatch: pytest.MonkeyPatch, server: S3Server):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.removeprefix("http://"))
    with advises("has no scheme. Use http:// or https:// before it"):
        ObjectFolder("s3://bucket/run", "--run-dir")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    ObjectFolder("s3://bucket/run", "--run-dir")


def test_what_is_there_is_read_like_a_folder(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import paragan

    folder = train_tiny(tmp_path / "run", "--kimg=0.08")
    for path in (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        key = f"runs/a/{path.relative_to(folder).as_posix()}"
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=path.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    there, here = paragan.load(bucket.address), paragan.load(folder)
    assert (there.sample(4, seed=1) == here.sample(4, seed=1)).all()
    assert (paragan.load(f"{bucket.address}/model").sample(4, seed=1) == here.sample(4, seed=1)).all()
    assert not list((tmp_path / "machine").rglob("checkpoints/*/*.safetensors"))
    status = run_cli("status", bucket.address)
    assert status.out.startswith(f"{bucket.address}: complete, 0.08 of 0.08 kimg, checkpoint at 0.08 kimg"), status
    for command in (
        ["sample", bucket.address, "--out", str(tmp_path / "grid.png")],
        ["report", bucket.address, "--out", str(tmp_path / "page.html")],
        ["status", bucket.address],
        ["export", bucket.address, "--out", str(tmp_path / "exported")],
        ["eval", bucket.address, "--metrics=fd", "--count=16"],
        train_args(tmp_path / "next", "--kimg=0.016", f"--init-from={bucket.address}"),
    ):
        result = run_cli(*command)
        assert result.status == 0, (command, result)
    weights = safetensors.torch.load(model_of(folder))
    weights = {name: value + 1 for name, value in weights.items()}
    config = json.loads((folder / "model" / "config.json").read_text())
    del config["crc32"]
    bucket.client.put_object(
        Bucket=bucket.name, Key="runs/a/model/model.safetensors", Body=safetensors.torch.save(weights)
    )
    bucket.client.put_object(Bucket=bucket.name, Key="runs/a/model/config.json", Body=json.dumps(config).encode())
    assert not (paragan.load(bucket.address).sample(4, seed=1) == here.sample(4, seed=1)).all()  # of the same size
    result = run_cli("sample", f"s3://{bucket.name}/none", "--out", str(tmp_path / "none.png"))
    assert result.status == 2
    assert f"MODEL: s3://{bucket.name}/none has no files: check the address" in result.err
    assert "RUN_DIR: s3://" in usage_error("status", f"s3://{bucket.name}/none")
