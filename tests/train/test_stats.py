"""A line of stats says what happened since the one before, and only that."""

from __future__ import annotations

import time

import torch

import tiny_run
from paragan.train.console import format_stats
from paragan.train.loop import play_round
from paragan.train.stats import StatsCollector


def test_excluded_time_does_not_lower_the_rate():
    stats = StatsCollector(tiny_run.World.solo(), ())
    time.sleep(0.02)
    with stats.exclude_from_timing():
        time.sleep(0.5)
    line = stats.tick(1000, 1)
    assert line["Timing/total_s"] > 0.5
    assert line["Timing/sec_per_kimg"] < 0.3


def test_huge_losses_are_printed_short():
    line = {"Timing/img_per_sec": 100.0, "Loss/G/loss": -4.6985e28, "Loss/D/loss": 1.23456}
    assert format_stats(line) == "100 img/s  G -4.7e+28  D 1.235"


def test_excluded_time_after_a_tick_counts_to_the_next():
    stats = StatsCollector(tiny_run.World.solo(), ())
    with stats.exclude_from_timing():
        stats.tick(0, 0)
        time.sleep(0.5)
    assert stats.tick(1000, 1)["Timing/sec_per_kimg"] < 0.3


def test_losses_are_means_over_lanes_for_any_pass_size():
    def losses(merge):
        s = tiny_run.make_session(tiny_run.make_run("objective.r1=1", f"device.lanes_per_pass={merge}"))
        play_round(s)
        return s.stats.mean_losses()

    reference = losses(0)
    for merge in (1, 3):  # 3: passes of 3, 3 and 2 lanes
        for name, value in losses(merge).items():
            torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-6, msg=name)
