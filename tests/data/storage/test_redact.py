"""Passwords and signatures of addresses are written nowhere, and a run goes on with other ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from advice import Case
from paragan.data.storage.filesystem import redact_url
from processes import TINY_RUN_ARGS, logged_steps, run_cli, usage_error
from servers import FaultyRequest, FaultyServer, run_faulty

SECRETS = ("hunter2", "0123abcd")


@pytest.fixture
def server():
    with run_faulty() as server:
        yield server


def guarded(server: FaultyServer, tmp_path: Path) -> None:
    """A set that only the right user with the right signature gets."""
    np.savez(tmp_path / "set.npz", images=np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8))
    server.files["/set.npz"] = (tmp_path / "set.npz").read_bytes()

    def play(requested: FaultyRequest) -> None:
        known = requested.headers.get("Authorization") and "X-Amz-Signature=" in requested.path
        requested.serve() if known else requested.send_status(403)

    server.responses = [play]


def address(server: FaultyServer, password: str, signature: str) -> str:
    return f"http://me:{password}@127.0.0.1:{server.server_port}/set.npz?X-Amz-Signature={signature}"


def test_secrets_are_in_no_file_and_may_change(server, tmp_path, check_advice):
    guarded(server, tmp_path)
    folder = tmp_path / "run"
    private = [
        "train",
        "folder",
        "--data.cache=stream",
        "--data.remote.cache_dir=",
        *TINY_RUN_ARGS[1:],
        f"--run-dir={folder}",
    ]
    first = run_cli(*private, "--kimg=0.032", f"--data={address(server, *SECRETS)}")
    assert first.status == 0, first
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert written
    for secret in SECRETS:
        assert secret not in first.out + first.err
        assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert f"path: http://***@127.0.0.1:{server.server_port}/set.npz?..." in (folder / "run.yaml").read_text()
    then = run_cli(*private, "--kimg=0.064", f"--data={address(server, 'other', '4567')}")
    assert then.status == 0, then
    assert logged_steps(folder)[-1] == 4
    assert any("4567" in path for path, _ in server.requests)
    public = redact_url(address(server, *SECRETS))
    again = f"--data={address(server, 'new', '89ef')}"
    for command in (f"train {folder}/run.yaml --run-dir={folder} --kimg=0.096", f"eval {folder}"):
        check_advice(
            Case(
                command,
                f"data: {public} needs its password or signature, which is never saved. Give --data again",
                (again,),
            )
        )


def test_the_dry_run_prints_no_secrets(server, tmp_path):
    guarded(server, tmp_path)
    displayed = run_cli(
        "train", "folder", "-n", *TINY_RUN_ARGS[1:], "--data.remote.cache_dir=", f"--data={address(server, *SECRETS)}"
    )
    assert displayed.status == 0, displayed
    assert "set.npz?..." in displayed.out
    assert not [secret for secret in SECRETS if secret in displayed.out + displayed.err]
    server.files.clear()
    gone = usage_error(
        "train", "folder", *TINY_RUN_ARGS[1:], f"--run-dir={tmp_path}/run", f"--data={address(server, *SECRETS)}"
    )
    assert not [secret for secret in SECRETS if secret in gone]


def test_a_path_is_no_address():
    assert redact_url("/data/what?is/a@b.zip") == "/data/what?is/a@b.zip"
    assert redact_url("s3://key:word@bucket/set.zip") == "s3://***@bucket/set.zip"
