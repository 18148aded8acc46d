"""Releasing, as docs/releasing.md says: from a tag to an index of packages, and from there into an environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.document import ROOT
from paragan.core.version import __version__
from processes import free_port, wait_until
from servers import is_listening

USER = ("-c", "user.name=a", "-c", "user.email=a@example.com")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250)


@pytest.fixture
def checkout(tmp_path):
    """A repository with the tracked files of this one, and the environment of this process."""
    folder = tmp_path / "checkout"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    kept = [name for name in names.decode().split("\0") if name and not name.startswith(("tests/", "benchmarks/"))]
    for name in kept:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for command in (("init", "-q"), ("add", "-A"), (*USER, "commit", "-qm", "all"), ("tag", f"v{__version__}")):
        assert run("git", *command, cwd=folder).returncode == 0
    return folder


def make_dist(checkout: Path) -> subprocess.CompletedProcess[str]:
    python = f"PYTHON_OF_DIST={sys.executable}"
    return run("make", "dist", python, cwd=checkout)


@pytest.mark.slow
def test_a_release_is_built_published_and_installed(checkout, tmp_path):
    built = make_dist(checkout)
    assert built.returncode == 0, built.stdout + built.stderr
    archives = sorted(path.name for path in (checkout / "dist").iterdir())
    assert archives == [f"paragan-{__version__}-py3-none-any.whl", f"paragan-{__version__}.tar.gz"]
    port = free_port()
    packages = tmp_path / "packages"
    packages.mkdir()
    server = [sys.executable, "-m", "pypiserver", "run", "-p", str(port), "-i", "127.0.0.1", "-P", ".", "-a", "."]
    with subprocess.Popen([*server, str(packages)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as index:
        try:
            address = f"http://127.0.0.1:{port}"
            files = [str(checkout / "dist" / name) for name in archives]
            login = ("-u", "a", "-p", "a", "--non-interactive", "--disable-progress-bar")
            upload = [sys.executable, "-m", "twine", "upload", "--repository-url", address, *login, *files]
            wait_until(lambda: is_listening(port), 60, "the index answers")
            uploaded = run(*upload, cwd=tmp_path)
            assert uploaded.returncode == 0, uploaded.stdout + uploaded.stderr
            target = tmp_path / "site"
            install = ("install", "--no-deps", "--no-cache-dir", "--index-url", f"{address}/simple/")
            pip = [sys.executable, "-m", "pip", *install, f"--target={target}", f"paragan=={__version__}"]
            installed = run(*pip, cwd=tmp_path)
            assert installed.returncode == 0, installed.stdout + installed.stderr
        finally:
            index.terminate()
    env = os.environ | {"PYTHONPATH": str(target)}
    command = [sys.executable, "-P", "-c", "import paragan; print(paragan.__file__, paragan.__version__)"]
    shown = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert shown.stdout.split() == [str(target / "paragan" / "__init__.py"), __version__]


def test_changes_and_other_tags_are_refused(checkout):
    (checkout / "README.md").write_text("changed")
    refused = make_dist(checkout)
    assert refused.returncode != 0
    assert "there are changes that are not committed" in refused.stderr
    assert not (checkout / "dist").exists()
    for command in (("checkout", "-q", "."), ("tag", "-d", f"v{__version__}"), ("tag", "v9.9.9")):
        assert run("git", *command, cwd=checkout).returncode == 0
    refused = make_dist(checkout)
    assert refused.returncode != 0
    assert re.search(rf"no tag v{re.escape(__version__)} at this commit", refused.stderr)
