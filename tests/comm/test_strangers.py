"""A stranger who speaks to every port that a run opens (tests/stranger.py): the run does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import stranger
from processes import train_args, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]
LENGTH = "--kimg=1.6"  # 100 steps
MAX_EXTRA_BYTES = 64 << 20


class RunEnd(NamedTuple):
    """Result of a run.

    peak_bytes : the most memory that one of its processes had
    """

    status: int
    model: bytes
    log: str
    peak_bytes: int


def run_to_the_end(folder: Path, arguments: tuple[str, ...], speaks_to_it: bool) -> RunEnd:
    """Train a run in processes of its own, with or without a stranger."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "paragan", *train_args(run_dir, LENGTH, "--timeout_s=100", *arguments)]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        run = subprocess.Popen(command, stdout=out, stderr=err)
    other = None
    try:
        if speaks_to_it:  # what a stranger can do while the ranks meet is said in SECURITY.md
            wait_until(lambda: (run_dir / "stats.jsonl").exists() or run.poll() is not None, 200, "it trains")
            with (folder / "said").open("w") as said:
                other = subprocess.Popen([sys.executable, stranger.__file__, str(run.pid)], stdout=said)
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if run.returncode is None:
            run.send_signal(signal.SIGTERM)
            run.wait(60)
        if other:
            other.kill()
            other.wait()
    log = (folder / "err").read_text()
    assert run.returncode == 0, log
    return RunEnd(run.returncode, (run_dir / "model" / "model.safetensors").read_bytes(), log, usage.ru_maxrss << 10)


RUNS = {  # arguments, and ports: of the store, and of each rank
    "sync": (("--ranks=2",), 3),
    "gossip": (("--ranks=3", "--strategy=gossip", "--lanes=3", "--batch=24"), 7),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_stranger_changes_nothing(kind, tmp_path):
    arguments, ports = RUNS[kind]
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = run_to_the_end(tmp_path / "undisturbed", arguments, False)
    disturbed = run_to_the_end(tmp_path / "disturbed", arguments, True)
    assert disturbed.model == undisturbed.model
    assert len(disturbed.log.splitlines()) <= len(undisturbed.log.splitlines()) + 1, disturbed.log
    assert disturbed.peak_bytes < undisturbed.peak_bytes + MAX_EXTRA_BYTES
    said = [json.loads(line) for line in (tmp_path / "disturbed" / "said").read_text().splitlines()]
    assert len({row["port"] for row in said}) >= ports
    assert {row["words"] for row in said} == {speak.__name__ for speak in stranger.CONVERSATIONS}
    assert sum(not row["error"] for row in said) > 20
