"""A lease has one owner, whatever happens, and whatever the clocks say."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import time

import pytest

from paragan.train.per_label.lease_queue import LeaseQueue, is_process_gone, process_identity
from processes import wait_until


def acquire_and_report(folder, name, queue):
    lease = LeaseQueue(folder, 60).acquire("0003", 0, {})
    if lease:
        queue.put(name)


def test_one_of_many_processes_acquires_a_job(tmp_path):
    context = mp.get_context("fork")
    queue = context.Queue()
    racers = [context.Process(target=acquire_and_report, args=(tmp_path / "queue", n, queue)) for n in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(30)
    assert queue.get(timeout=5) in range(16)
    assert queue.empty()
    assert [p.name for p in (tmp_path / "queue").iterdir()] == ["0003.1.json"]


def test_only_the_last_entry_of_a_job_counts(tmp_path):
    leases = LeaseQueue(tmp_path, 60)
    first = leases.acquire("0003", 0, {"label": 3})
    assert first
    assert leases.acquire("0003", 0, {}) is None
    second = leases.acquire("0003", 1, {"label": 3})
    assert second
    first.release("done", images=1)  # it lost the lease and does not know
    entry = LeaseQueue(tmp_path, 60).entries()["0003"]
    assert (entry.lease_number, entry.state) == (2, "held")
    assert not first.is_owned()
    assert second.is_owned()
    second.release("done", images=2)
    for released in (LeaseQueue(tmp_path, 60).entries()["0003"], leases.entry("0003")):
        assert released
        assert (released.lease_number, released.state, released.metadata["images"]) == (2, "done", 2)
    assert leases.entry("0004") is None


def acquire_from_other_host(folder, job="0003", **about):
    """A lease of a process that this machine knows nothing of."""
    lease = LeaseQueue(folder, 60).acquire(job, 0, about)
    assert lease
    lease.path.write_text(json.dumps(lease.contents | {"process": ["another boot", "pid:[1]", "17", "4"]}))
    return lease


@pytest.mark.parametrize("clock", [0, 1.0, 4e9], ids=["now", "1970", "2096"])
def test_only_the_watcher_s_clock_decides(tmp_path, clock):
    lease = acquire_from_other_host(tmp_path)
    if clock:
        os.utime(lease.path, (clock, clock))
    watcher = LeaseQueue(tmp_path, 0.2)
    assert not watcher.is_dead(watcher.entries()["0003"])  # it was seen for the first time
    time.sleep(0.3)
    assert watcher.is_dead(watcher.entries()["0003"])
    os.utime(lease.path, (clock + 1, clock + 1))  # a sign of life
    assert not watcher.is_dead(watcher.entries()["0003"])


def test_a_living_owner_is_never_dead(tmp_path):
    lease = acquire_from_other_host(tmp_path)
    lease.lease_s = 0.3
    watcher, deadline = LeaseQueue(tmp_path, 0.3), time.monotonic() + 1.5
    with lease:
        while time.monotonic() < deadline:
            assert not watcher.is_dead(watcher.entries()["0003"])
            time.sleep(0.02)
    wait_until(lambda: watcher.is_dead(watcher.entries()["0003"]), 5)


def hold_lease(folder):
    with LeaseQueue(folder, 60).acquire("0003", 0, {}):
        signal.pause()


def test_an_ended_local_process_is_dead_at_once(tmp_path):
    child = mp.get_context("fork").Process(target=hold_lease, args=(tmp_path,))
    child.start()
    watcher = LeaseQueue(tmp_path, 60)
    wait_until(lambda: "0003" in watcher.entries())
    entry = watcher.entries()["0003"]
    assert not watcher.is_dead(entry)
    assert watcher.is_alive(entry)
    child.kill()
    wait_until(lambda: watcher.is_dead(watcher.entries()["0003"]), 10)
    child.join()
    assert watcher.is_dead(watcher.entries()["0003"])


def test_a_reused_pid_is_another_process():
    mine = process_identity()
    assert mine
    assert not is_process_gone(mine)
    assert is_process_gone([*mine[:3], "1"])  # began at another time
    assert not is_process_gone(["another boot", *mine[1:3], "1"])  # not for us to say
    assert not is_process_gone(None)
    assert not is_process_gone("nonsense")


def test_an_owner_sees_that_it_lost_the_lease(tmp_path):
    lease = acquire_from_other_host(tmp_path)
    lease.lease_s = 0.2
    with lease:
        assert LeaseQueue(tmp_path, 60).acquire("0003", 1, {})
        wait_until(lambda: lease.is_lost, 5)


def test_an_owner_without_heartbeat_stops(tmp_path):
    lease = acquire_from_other_host(tmp_path / "queue")
    lease.lease_s = 0.3
    with lease:
        (tmp_path / "queue").rename(tmp_path / "away")
        wait_until(lambda: lease.is_lost, 5)


@pytest.mark.parametrize("text", ["", "{", "[]", '"held"', '{"state": "held"}', "\x00"])
def test_a_damaged_file_counts_as_a_silent_owner(tmp_path, text):
    lease = acquire_from_other_host(tmp_path)
    lease.path.write_text(text)
    watcher = LeaseQueue(tmp_path, 0.1)
    entry = watcher.entries()["0003"]
    assert entry.state == "held"
    assert not watcher.is_dead(entry)
    time.sleep(0.2)
    assert watcher.is_dead(watcher.entries()["0003"])
    assert watcher.acquire("0003", entry.lease_number, {})


def test_other_files_are_ignored(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / ".0003.1.json.abc").write_text("being written")
    assert LeaseQueue(tmp_path, 60).entries() == {}
    assert LeaseQueue(tmp_path / "nowhere", 60).entries() == {}
