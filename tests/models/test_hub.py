"""Onto a hub and back, in processes of their own, with a small hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys

import flask
import numpy as np
import pytest
import torch

import paragan
from servers import run_app

SHA = "0123456789abcdef0123456789abcdef01234567"


def hub(files: dict[str, bytes]) -> flask.Flask:
    """As much of the hub's API as a push and a fetch of one repository use."""
    app = flask.Flask(__name__)

    @app.post("/api/repos/create")
    def create():
        return {"url": f"{flask.request.host_url}me/it", "name": "me/it"}

    @app.post("/api/validate-yaml")
    def validate():
        return {"errors": [], "warnings": []}

    @app.post("/api/models/me/it/preupload/main")
    def preupload():
        requested = flask.request.get_json()["files"]
        return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in requested]}

    @app.post("/api/models/me/it/commit/main")
    def commit():
        for line in flask.request.get_data().splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        return {"success": True, "commitOid": SHA, "commitUrl": f"{flask.request.host_url}me/it/commit/{SHA}"}

    @app.get("/api/models/me/it")
    @app.get("/api/models/me/it/revision/<revision>")
    def info(revision="main"):
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        return {"id": "me/it", "modelId": "me/it", "sha": SHA, "private": False, "siblings": siblings, "tags": []}

    @app.get("/api/models/me/it/tree/<revision>")
    def tree(revision):
        return [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]

    @app.get("/me/it/resolve/<revision>/<path:name>")
    def resolve(revision, name):
        answer = flask.Response(files[name], mimetype="application/octet-stream")
        answer.headers |= {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": SHA}
        return answer

    return app


@pytest.fixture
def pushed(tmp_path):
    """The files of a hub, and the environment of a process that finds it."""
    files: dict[str, bytes] = {}
    more = {"HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    more["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # samples of these processes and of this one are compared
    with run_app(hub(files)) as address:
        yield files, {**os.environ, **more, "HF_ENDPOINT": address}


def test_a_model_goes_to_a_hub_and_comes_back_by_its_name(small, tmp_path, pushed):
    files, environment = pushed

    def command(*arguments):
        line = [sys.executable, "-m", "paragan", *map(str, arguments)]
        ended = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended
        return ended.stdout

    assert "paragan.load('me/it')" in command("export", small, "--push", "me/it")
    assert set(files) == {"model.safetensors", "config.json", "README.md", "samples.png"}
    assert b"library_name: paragan" in files["README.md"]
    command("sample", "me/it", "--count=5", "--out", tmp_path / "samples.npz")
    samples = np.load(tmp_path / "samples.npz")
    np.testing.assert_array_equal(samples["images"], paragan.load(small).sample(5))
    fetched = {path.name for path in (tmp_path / "hf").rglob("snapshots/*/*")}
    assert fetched == {"model.safetensors", "config.json"}  # weights, and what they are


@pytest.mark.slow
def test_a_name_that_no_hub_has_is_one_line(tmp_path, pushed):
    line = [sys.executable, "-m", "paragan", "sample", "me/other", "--out", "a.png"]
    ended = subprocess.run(line, env=pushed[1], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 2, ended
    assert "me/other: not a local folder, and not available on the hub" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_hub_out_of_reach_is_one_line(small, tmp_path, pushed):
    environment = pushed[1] | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    line = [sys.executable, "-m", "paragan", "export", str(small), "--push", "me/it"]
    ended = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 2, ended
    assert "--push me/it: " in ended.stderr
    assert ended.stderr.count("\n") == 1
