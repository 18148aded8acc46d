"""Examples run, as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(folder: Path, *arguments: str) -> str:
    """Run an example in a folder. Returns its output."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, cwd=folder, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interface_of_the_paper(tmp_path):
    out = run_example(tmp_path, str(ROOT / "examples" / "estimator.py"), "--steps", "20")
    assert "learning rate" in out
    assert "fd_pixels" in out or "fid" in out


EXAMPLES = {  # name -> (arguments that make it short, a part of its output)
    "mixture": (("square", "--nets.width=16", "--kimg=2"), "of 25 modes covered"),
    "showers": (("--nets.width=2", "--kimg=0.256", "--evaluation.metrics=kid"), "longitudinal profile"),
    "tokenizer": (("--nets.width=8", "--kimg=1", "--ranks=2"), "dB, on 1,797 digits"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_user_defined_networks_and_losses(name, tmp_path):
    arguments, text = EXAMPLES[name]
    assert text in run_example(tmp_path, "-m", f"examples.{name}", *arguments, "--evaluation.count=100")
    (page,) = tmp_path.rglob("report.html")
    assert page.stat().st_size > 10_000
