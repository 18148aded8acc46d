"""Leases: one owner, whatever happens, and whatever the clocks say."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import time

import pytest

from paragan.train.per_label.lease_queue import Leases, gone, process
from processes import until


def taken(folder, name, queue):
    lease = Leases(folder, 60).take("0003", 0, {})
    if lease:
        queue.put(name)


def test_of_many_who_try_at_once_one_has_it(tmp_path):
    context = mp.get_context("fork")
    queue = context.Queue()
    racers = [context.Process(target=taken, args=(tmp_path / "queue", n, queue)) for n in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(30)
    assert queue.get(timeout=5) in range(16)
    assert queue.empty()
    assert [p.name for p in (tmp_path / "queue").iterdir()] == ["0003.1.json"]


def test_only_the_last_word_on_a_job_counts(tmp_path):
    leases = Leases(tmp_path, 60)
    first = leases.take("0003", 0, {"label": 3})
    assert first
    assert leases.take("0003", 0, {}) is None
    second = leases.take("0003", 1, {"label": 3})
    assert second
    first.end("done", images=1)  # it was taken over, and knows not
    entry = Leases(tmp_path, 60).entries()["0003"]
    assert (entry.number, entry.state) == (2, "held")
    assert not first.look()
    assert second.look()
    second.end("done", images=2)
    for found in (Leases(tmp_path, 60).entries()["0003"], leases.entry("0003")):
        assert found
        assert (found.number, found.state, found.about["images"]) == (2, "done", 2)
    assert leases.entry("0004") is None


def elsewhere(folder, job="0003", **about):
    """A lease of a process that this machine knows nothing of."""
    lease = Leases(folder, 60).take(job, 0, about)
    assert lease
    lease.path.write_text(json.dumps(lease.told | {"process": ["another boot", "pid:[1]", "17", "4"]}))
    return lease


@pytest.mark.parametrize("clock", [0, 1.0, 4e9], ids=["now", "1970", "2096"])
def test_no_clock_but_the_watchers_own_decides(tmp_path, clock):
    lease = elsewhere(tmp_path)
    if clock:
        os.utime(lease.path, (clock, clock))
    watcher = Leases(tmp_path, 0.2)
    assert not watcher.dead(watcher.entries()["0003"])  # it was seen for the first time
    time.sleep(0.3)
    assert watcher.dead(watcher.entries()["0003"])
    os.utime(lease.path, (clock + 1, clock + 1))  # a sign of life
    assert not watcher.dead(watcher.entries()["0003"])


def test_an_owner_that_lives_is_never_dead(tmp_path):
    lease = elsewhere(tmp_path)
    lease.lease_s = 0.3
    watcher, deadline = Leases(tmp_path, 0.3), time.monotonic() + 1.5
    with lease:
        while time.monotonic() < deadline:
            assert not watcher.dead(watcher.entries()["0003"])
            time.sleep(0.02)
    until(lambda: watcher.dead(watcher.entries()["0003"]), 5)


def forever(folder):
    with Leases(folder, 60).take("0003", 0, {}):
        signal.pause()


def test_a_process_of_this_machine_that_is_gone_is_dead_at_once(tmp_path):
    child = mp.get_context("fork").Process(target=forever, args=(tmp_path,))
    child.start()
    watcher = Leases(tmp_path, 60)
    until(lambda: "0003" in watcher.entries())
    entry = watcher.entries()["0003"]
    assert not watcher.dead(entry)
    assert watcher.alive(entry)
    child.kill()
    until(lambda: watcher.dead(watcher.entries()["0003"]), 10)
    child.join()
    assert watcher.dead(watcher.entries()["0003"])


def test_another_process_with_the_same_number_is_another():
    mine = process()
    assert mine
    assert not gone(mine)
    assert gone([*mine[:3], "1"])  # began at another time
    assert not gone(["another boot", *mine[1:3], "1"])  # not for us to say
    assert not gone(None)
    assert not gone("nonsense")


def test_an_owner_sees_that_it_was_taken_over(tmp_path):
    lease = elsewhere(tmp_path)
    lease.lease_s = 0.2
    with lease:
        assert Leases(tmp_path, 60).take("0003", 1, {})
        until(lambda: lease.lost, 5)


def test_an_owner_that_cannot_be_seen_to_live_gives_up(tmp_path):
    lease = elsewhere(tmp_path / "queue")
    lease.lease_s = 0.3
    with lease:
        (tmp_path / "queue").rename(tmp_path / "away")
        until(lambda: lease.lost, 5)


@pytest.mark.parametrize("text", ["", "{", "[]", '"held"', '{"state": "held"}', "\x00"])
def test_a_damaged_file_is_watched_like_a_silent_owner(tmp_path, text):
    lease = elsewhere(tmp_path)
    lease.path.write_text(text)
    watcher = Leases(tmp_path, 0.1)
    entry = watcher.entries()["0003"]
    assert entry.state == "held"
    assert not watcher.dead(entry)
    time.sleep(0.2)
    assert watcher.dead(watcher.entries()["0003"])
    assert watcher.take("0003", entry.number, {})


def test_other_files_are_none_of_its(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / ".0003.1.json.abc").write_text("being written")
    assert Leases(tmp_path, 60).entries() == {}
    assert Leases(tmp_path / "nowhere", 60).entries() == {}
