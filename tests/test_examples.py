"""Examples run, as a user would start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_papers_interface():
    command = [sys.executable, str(EXAMPLES / "estimator.py"), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "learning rate" in done.stdout
    assert "fd_pixels" in done.stdout or "fid" in done.stdout
