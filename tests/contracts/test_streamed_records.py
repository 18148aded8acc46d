"""Streamed records of several arrays keep the contracts of strategies: G is given one field, D judges another."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest

import tiny_run
from fake_records import write_recordings
from paragan.comm.world import World
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def make_run(folder: Path, strategy: str):
    return tiny_run.make_run(
        *(f"data.path={folder}", "data.channels=0", "data.resolution=0", "data.labels=false", "data.cache=stream"),
        *("data.segment=256", "data.transform=fake_records:frames", "nets=named_waves:EnergyNets"),
        *("objective=reconstruction", "objective.outputs={power: 0.1}", "objective.adversarial_weight=0.1"),
        *table.STRATEGIES[strategy],
    )


def play(run, rounds, world=None, saved=None):
    s = tiny_run.make_session(run, world, saved)
    with contextlib.closing(s.lanes):
        for _ in range(rounds):
            play_round(s)
        return tiny_run.gather_owner_state(s)


def save_after(run, rounds, world, folder):
    saved, s = tiny_run.save_after(run, rounds, world, folder)
    s.lanes.close()
    return saved


@pytest.fixture
def recordings(tmp_path):
    return write_recordings(tmp_path / "recordings")


@pytest.mark.parametrize("strategy", ["sync", "sync simultaneous", "CPOAdam", "async", "async teams"])
def test_n_ranks_equal_one(pool, recordings, strategy):
    run = make_run(recordings, strategy)
    one = play(run, 6)
    other = pool(3, lambda world: play(run, 6, world))[0]
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "strategy",
    ["sync", "sync int4", "quantized", "sync every 2", "gossip int8", "async teams", "async, lags and replay"],
)
def test_six_and_four_rounds_equal_ten(pool, recordings, strategy, tmp_path):
    run = make_run(recordings, strategy)

    def same(world):
        ten = play(run, 10, world)
        saved = save_after(run, 6, world, tmp_path)
        return tiny_run.is_equal(ten, play(run, 4, world, saved))

    assert all(pool(2, same))
    assert same(World.solo())
