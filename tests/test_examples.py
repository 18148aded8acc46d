"""Examples run, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def shown(folder: Path, *words: str) -> str:
    """What an example prints that is started in a folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_papers_interface(tmp_path):
    told = shown(tmp_path, str(ROOT / "examples" / "estimator.py"), "--steps", "20")
    assert "learning rate" in told
    assert "fd_pixels" in told or "fid" in told


# example: (what makes it short, what it tells)
OWN = {
    "mixture": (("square", "--nets.width=16", "--kimg=2"), "of 25 modes covered"),
    "showers": (("--nets.width=2", "--kimg=0.256", "--evaluation.metrics=kid"), "longitudinal profile"),
    "tokenizer": (("--nets.width=8", "--kimg=1", "--ranks=2"), "dB, on 1,797 digits"),
}


@pytest.mark.parametrize("name", OWN)
def test_networks_and_losses_of_ones_own(name, tmp_path):
    words, told = OWN[name]
    assert told in shown(tmp_path, "-m", f"examples.{name}", *words, "--evaluation.count=100")
    (page,) = tmp_path.rglob("report.html")
    assert page.stat().st_size > 10_000
