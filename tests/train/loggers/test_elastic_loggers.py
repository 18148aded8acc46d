"""Where ranks may be lost, the next first rank continues what the lost one has logged."""

from __future__ import annotations

import json
import signal

import pytest

from elastic_ranks import RankProcesses
from processes import logged_steps, wait_for_step

pytestmark = pytest.mark.kill


@pytest.mark.slow
def test_the_next_first_rank_continues_to_log(tmp_path, processes):
    calls = tmp_path / "calls.jsonl"
    logger = f"--output.loggers=[{{name: recorder:Recorder, path: {calls}}}]"
    ranks = RankProcesses(
        tmp_path / "run", processes, "--lanes=4", "--strategy.peer_timeout_s=3", "--kimg=64", logger, size=3
    )
    wait_for_step(ranks.run, 20)
    ranks.send_signal(signal.SIGKILL, 0)
    lost = ranks.wait_for_event(lambda row: row["lost"] == [0])
    wait_for_step(ranks.run, lost["step"] + 20)
    step = ranks.stop(1, 2)
    rows = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [value[2] for method, value, _ in rows if method == "start"] == ["", "run 1"]
    logged = [images // 16 for method, _, images in rows if method == "tick"]
    assert logged_steps(ranks.run) == [*range(1, step + 1)]
    missing = {*range(1, step + 1)} - {*logged}
    assert all(lost["step"] - 3 <= number <= lost["step"] + 1 for number in missing)  # what rank 0 had not sent yet
    assert {*logged} <= {*range(1, step + 1)}
    (close,) = [value for method, value, _ in rows if method == "close"]
    assert "SIGTERM" in close
