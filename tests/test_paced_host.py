"""benchmarks/comm/clock.py: hosts train at the pace of a profile, and what is said of their seconds and bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.comm.clock_grid import WAYS, Grid, Job, make_jobs, parse_ways, scale_profile
from benchmarks.comm.clock_summary import first_within, format_summary, summarize_rows
from benchmarks.lib.document import ROOT
from benchmarks.lib.paced_host import DeviceClock
from fake_profiles import make_profile
from paragan.core.errors import UsageError
from paragan.core.schema import to_dict
from paragan.plan.profile.profile import profile_to_yaml
from processes import free_port

ROUNDS, BATCH = 8, 32


def train_paced(tmp_path, ranks, profile, *settings):
    """The lines of clock.jsonl and of stats.jsonl of a run of digits on some ranks."""
    (tmp_path / "profile.yaml").write_text(profile_to_yaml(profile))
    command = [sys.executable, "-m", "benchmarks.lib.paced_host", f"--profile={tmp_path / 'profile.yaml'}", "--"]
    command += ["digits", f"--batch={BATCH}", f"--kimg={ROUNDS * BATCH / 1000}", f"--run-dir={tmp_path / 'run'}"]
    command += ["--nets.width=8", "--evaluation.metrics=fd", "--evaluation.every_kimg=0.128", *settings]
    launch = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    launch |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=os.environ | launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(200) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    names = ("clock.jsonl", "stats.jsonl")
    return [[json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()] for name in names]


@pytest.mark.slow
def test_rounds_take_the_time_of_the_profile_and_bytes_are_those_of_the_run(tmp_path):
    profile = make_profile(g_s=0.1, d_s=0.15)
    lines, stats = train_paced(tmp_path, 2, profile, "--strategy.wire=int8")
    last = lines[-1]
    assert last["kimg"] == stats[-1]["Progress/kimg"] == ROUNDS * BATCH / 1000
    assert last["rounds"] == ROUNDS
    assert last["seconds"] >= ROUNDS * profile.round_s(BATCH / 2)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(set(seconds))
    sent = sum(line["Comm/G/sent_bytes"] + line["Comm/D/sent_bytes"] for line in stats)
    assert last["sent_bytes"] == sent > 0
    assert last["sent_bytes_all"] == 2 * sent


@pytest.mark.slow
def test_teams_compute_at_once(tmp_path):
    profile = make_profile(g_s=0.1, d_s=0.15)
    lines, _ = train_paced(tmp_path, 2, profile, "--strategy=async", "--strategy.split=1:1")
    g_turn_s, d_turn_s = (profile.turn(name, BATCH).total_s for name in ("G", "D"))
    assert lines[-1]["rounds"] == ROUNDS
    assert lines[-1]["seconds"] >= ROUNDS * max(g_turn_s, d_turn_s / 2)  # D's turn, without making images


@pytest.mark.slow
def test_a_plan_is_made_for_the_links_of_a_job_at_its_pace():
    grid = Grid(None, 10.0, {"digits": to_dict(make_profile())})
    (job,) = make_jobs(["digits"], [2], ["100 Mbit/s, 20 ms"], ["sync"], [0], {"digits": 10}, {"digits": 100})
    rows = {row.name: row for row in grid.plan(job).rows}
    assert rows["sync"].prediction.step_s > 0.1 + 2 * 0.02  # two messages of a round wait for each other
    assert 0.1 <= rows["sync+sync_period=128"].prediction.step_s < 0.11
    assert rows["sync"].kimg == job.kimg < rows["sync+sync_period=128"].kimg


def test_device_takes_its_time_and_counts_what_comes_late():
    clock = DeviceClock()
    clock.start()
    start = time.perf_counter()
    clock.compute(0.05)
    clock.compute(0.05)
    assert time.perf_counter() - start >= 0.1
    clock.end()
    clock.pop_late_s()
    clock.start()
    time.sleep(0.05)
    clock.compute(0.01)  # the processor took longer than the device
    clock.end()
    assert clock.pop_late_s() >= 0.04
    assert clock.pop_late_s() == 0
    clock.start()
    time.sleep(0.05)
    clock.skip_idle()  # it waited for a message
    start = time.perf_counter()
    clock.compute(0.02)
    assert time.perf_counter() - start >= 0.015


def test_scaled_profile_keeps_the_shape_of_a_turn():
    profile = make_profile()
    scaled = scale_profile(profile, 3.0)
    assert scaled.round_s(16) == pytest.approx(3 * profile.round_s(16))
    for before, after in zip(profile.g, scaled.g, strict=True):
        assert after.grads_ready_s == pytest.approx([3 * s for s in before.grads_ready_s])


def make_row(way, fd, seconds, seed=0, valid=True):
    job = Job("digits", 4, "20 Mbit/s, 50 ms", way, seed, 3.0, 100.0)
    curve = [(i + 1.0, value, (i + 1) * seconds, (i + 1) * 1000, (i + 1) * 4000) for i, value in enumerate(fd)]
    totals = {"seconds": curve[-1][2], "sent_bytes": curve[-1][3], "expected_s": 0.8 * curve[-1][2]}
    return {**job.key, "fd": fd[-1], **totals, "valid": valid, "curve": curve}


def test_time_to_the_worst_seed_of_sync():
    rows = [make_row("sync", (3.0, 2.0, 1.0), 10, seed) for seed in (0, 1)]
    rows[1]["fd"] = 1.5
    rows += [make_row("gossip", (2.0, 1.4, 1.2), 2), make_row("DPOSG", (4.0, 4.0, 4.0), 2)]
    lines = {line["way"]: line for line in summarize_rows(rows)}
    assert {line["target"] for line in lines.values()} == {1.5}
    assert lines["gossip"]["seconds_to_target"] == [4, 4, 4]
    assert lines["gossip"]["bytes_to_target"] == [2000, 2000, 2000]
    assert lines["DPOSG"]["seconds_to_target"] == [None, None, None]
    assert lines["sync"]["seconds_to_target"] == [30, 30, 30]
    text = format_summary(list(lines.values()))
    assert "digits, 4 hosts, 20 Mbit/s, 50 ms: gossip 4 s, sync 30 s" in text
    assert "never" in text
    assert lines["gossip"]["error"] == pytest.approx([0.25] * 3)
    assert "median 25.0%, largest 25.0%" in text
    assert first_within(rows[0]["curve"], 0.5) is None


def test_a_way_may_train_longer_than_sync():
    rows = [make_row("sync", (3.0, 2.0), 10), make_row("period 8", (3.0, 2.5, 2.0), 1) | {"kimg": 4.5}]
    lines = {line["way"]: line for line in summarize_rows(rows)}
    assert {line["target"] for line in lines.values()} == {2.0}
    assert (lines["sync"]["kimg"], lines["period 8"]["kimg"]) == (3.0, 4.5)
    assert lines["period 8"]["seconds_to_target"] == [3, 3, 3]


def test_an_invalid_run_is_no_choice():
    rows = [make_row("sync", (1.0,), 10), make_row("gossip", (1.0,), 2, valid=False)]
    text = format_summary(summarize_rows(rows))
    assert "INVALID" in text
    assert "gossip 2 s" not in text


def test_names_of_ways():
    assert parse_ways("sync;gossip;sync") == ["sync", "gossip"]
    assert set(parse_ways("grid;dposg;dqgan;qgenx")) == set(WAYS)
    with pytest.raises(UsageError, match="there is no snyc"):
        parse_ways("snyc")


def test_jobs_are_named_by_folders_of_their_own():
    links = ("20 Mbit/s, 50 ms", "1 Gbit/s, 1 ms")
    jobs = make_jobs(("digits",), (1, 4), links, list(WAYS), (0, 1), {"digits": 1.0}, {"digits": 50.0})
    assert len({job.folder for job in jobs}) == len(jobs) == 2 * 2 * 2 * len(WAYS)
    assert jobs[-1].lab_options == ("--hosts=4", "--rate=1000000kbit", "--latency=1ms")
    assert jobs[0].lab_options == ("--hosts=1", "--rate=20000kbit", "--latency=50ms")
