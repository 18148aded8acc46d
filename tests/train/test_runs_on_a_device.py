"""A whole run on an accelerator: what it writes is what a run on the CPU writes, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import standin
import tiny_run
from advice import ROOT
from paragan.comm.world import World
from paragan.core.devices import BACKENDS
from paragan.train.callbacks.log import LogCallback
from paragan.train.console import RunConsole
from paragan.train.health.monitor import HealthMonitor
from paragan.train.loop import play_round
from processes import final_tensors, train_interrupted, train_tiny

# Python that gives a rank a stand-in, and prints which one it asked for
ONE_CARD_EACH = f"""
import os, sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
import standin
from paragan.core.devices import BACKENDS
device = standin.install()
BACKENDS["cuda"] = BACKENDS[standin.NAME]
BACKENDS["cuda"].device_for_rank = lambda local_rank: print("card", local_rank, flush=True) or device
"""
TICK = "paragan/train/stats.py read_device"  # where a tick waits
SETTINGS = [
    "--kimg=0.08",
    "--nets.batch_norm=true",
    "--device.concat_real_fake=false",
    "--evaluation.metrics=[fd,kid]",
]


@pytest.fixture
def kinds(monkeypatch):
    """`--device.kind=cuda` is a stand-in."""
    standin.install()
    monkeypatch.setitem(BACKENDS, "cuda", BACKENDS[standin.NAME])


def lines_of(file: Path) -> list[dict[str, object]]:
    """Return the lines of a file but for what is measured, and for what a resumed run does not know."""
    left_out = ("Timing/", "Resources/", "Data/", "seconds", "Health/G/update_norm", "Health/D/update_norm")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert final_tensors(folder) == final_tensors(expected)
    for name in ("stats.jsonl", "metrics.jsonl"):
        assert lines_of(folder / name) == lines_of(expected / name)
    for picture in sorted(expected.rglob("*.png")):
        assert (folder / picture.relative_to(expected)).read_bytes() == picture.read_bytes()


def test_a_run_on_a_device_writes_what_one_on_the_cpu_writes(kinds, tmp_path):
    expected = train_tiny(tmp_path / "cpu", *SETTINGS, "--device.kind=cpu")
    with standin.recording() as waits:
        whole = train_tiny(tmp_path / "device", *SETTINGS, "--device.kind=cuda")
    assert_same_run(whole, expected)
    of_ticks = [wait for wait in waits if wait.line.startswith(("paragan/train/stats", "paragan/train/health"))]
    assert {wait.place for wait in of_ticks} == {TICK}
    assert len(of_ticks) == len(lines_of(whole / "stats.jsonl"))
    moved = train_interrupted(tmp_path / "moved", 2, *SETTINGS, "--device.kind=cuda")
    train_interrupted(moved, 3, *SETTINGS, "--device.kind=cpu")
    train_tiny(moved, *SETTINGS, "--device.kind=cuda")
    assert_same_run(moved, expected)


@pytest.mark.parametrize(("ranks", "settings"), [(1, ()), (2, ("strategy=gossip",))])
def test_a_tick_waits_for_the_device_once(ranks, settings, pool, tmp_path):
    groups = "g.groups=[{pattern: 'start.*', lr_factor: 0.5, freeze_from_kimg: 0.04}]"
    finite = ("objective.r1=1", "objective.r1_r2_method=finite_difference")
    run = tiny_run.make_run("nets.batch_norm=true", "g.max_norm=0.1", "d.max_norm=0.1", groups, *finite, *settings)

    def count_waits(world: World) -> list[str]:
        session = tiny_run.make_session(run, world)
        monitor = HealthMonitor(tmp_path, RunConsole(), run.health, run.on_divergence)
        log = LogCallback(tmp_path, RunConsole(), str, monitor)
        for _ in range(2):
            play_round(session)
        log.write(session)
        play_round(session)
        if session.role.barrier:
            session.role.barrier()
        with standin.recording() as waits:
            log.write(session)
        return [wait.place for wait in waits]

    for waits in pool(ranks, count_waits, standin.NAME):
        assert waits == [TICK]


def test_ranks_of_an_evaluation_take_devices_of_their_own(processes, tmp_path):
    run = train_tiny(tmp_path / "run", "--kimg=0.016")

    def start(*arguments, **env):
        return processes.start_forked(*arguments, patch=ONE_CARD_EACH, **env)

    ranks = processes.start_ranks(2, "eval", str(run), "--metrics=kid", "--device=cuda", start=start)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert [rank.out.splitlines()[0] for rank in ranks] == ["card 0", "card 1"]
