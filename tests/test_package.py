"""The source archive and the wheel: complete, without tests, and the wheel trains where the checkout is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.lib.document import ROOT

FILES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"),
    *("SECURITY.md", "constraints.txt"),
)


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Mapping[str, Path]:
    """The built archives by their suffix; a copy of the checkout is built, since building writes into it."""
    folder = tmp_path_factory.mktemp("build")
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "paragan", checkout / "paragan", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_package.py", checkout / "tests")
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    run(sys.executable, "-m", "build", "--no-isolation", f"--outdir={folder / 'dist'}", checkout, cwd=folder)
    return {path.suffix: path for path in (folder / "dist").iterdir()}


def test_the_wheel_has_the_files_of_the_package_and_no_others(archives):
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "paragan").rglob("*") if p.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    names = zipfile.ZipFile(archives[".whl"]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == package


def test_the_source_archive_has_no_tests(archives):
    with tarfile.open(archives[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, "paragan/comm/exchange.py"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_trains_the_digits(archives, tmp_path):
    """Unpacked into a folder that comes before the checkout on the path, with the dependencies of this environment."""
    site = tmp_path / "site"
    with zipfile.ZipFile(archives[".whl"]) as wheel:
        wheel.extractall(site)
    show = ("-P", "-c", "import paragan; print(paragan.__file__)")
    where = run(sys.executable, *show, cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(where.strip()) == site / "paragan" / "__init__.py"
    command = ("-P", "-m", "paragan", "train", "digits", "--kimg=1", "--nets.width=8", "--run-dir=run")
    run(sys.executable, *command, cwd=tmp_path, PYTHONPATH=str(site))
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 0
