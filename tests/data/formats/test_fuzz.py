"""Ten thousand broken sets and images: each is read, or refused in one line. See fuzz.py, which runs on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz

ROOT = Path(__file__).parents[3]
LONGEST_S = 800  # all blocks, on a busy machine; each takes seconds

pytestmark = pytest.mark.timeout(LONGEST_S + 60)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> dict[str, dict]:
    """What became of each block; one that is missing took the program with it."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("work", "home", "cache", "tmp"):
        (folder / name).mkdir()
    places = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    with (folder / "tmp" / "said").open("w") as expected:
        ran = subprocess.run(
            [sys.executable, Path(fuzz.__file__), folder, *fuzz.CASES],
            cwd=folder / "work",
            env={**os.environ, **places},
            stdout=subprocess.PIPE,
            stderr=expected,
            timeout=LONGEST_S,
            text=True,
        )
    result = {one["block"]: one for one in map(json.loads, ran.stdout.splitlines())}
    last = (folder / "tmp" / "said").read_text()[-3000:]
    return {name: result.get(name, {"ended": f"status {ran.returncode} after: {last}"}) for name in fuzz.CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.CASES)
def test_damaged_files_give_one_line(blocks, name):
    block = blocks[name]
    assert "ended" not in block, block["ended"]
    assert block["many_wrong"] == 0, "\n".join(block["wrong"])
    assert block["count"] == fuzz.CASES[name][1]
    assert block["made"] == []  # no file anywhere else, and no trap was sprung
    assert len(block["ends"]) > 1  # some were fine, so the damage was of the right size
    assert block["peak_mb"] < 2048


def test_ten_thousand_files_are_tried():
    assert sum(count for _, count in fuzz.CASES.values()) >= 10_000
