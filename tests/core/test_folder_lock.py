import multiprocessing as mp
import os
import threading

from paragan.core.folder_lock import FolderLock, lock_owner

FORK = mp.get_context("fork")


def hold(folder, held, end):
    lock = FolderLock(folder)
    held.send(lock.acquire())
    end.wait(60)


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "run"
    assert lock_owner(folder) == ""
    here, there = FORK.Pipe()
    end = FORK.Event()
    process = FORK.Process(target=hold, args=(folder, there, end))
    process.start()
    assert here.recv()
    lock = FolderLock(folder)
    assert not lock.acquire()
    assert lock_owner(folder).startswith(f"process {process.pid} on ")
    end.set()
    process.join()
    assert lock_owner(folder) == ""
    assert lock.acquire()
    assert lock.acquire()
    assert lock_owner(folder).startswith(f"process {os.getpid()} on ")
    lock.release()
    lock.release()
    assert lock_owner(folder) == ""


def test_whoever_looks_does_not_keep_a_process_from_locking(tmp_path):
    ended = threading.Event()

    def probe():
        while not ended.is_set():
            lock_owner(tmp_path)

    watchers = [threading.Thread(target=probe) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            lock = FolderLock(tmp_path)
            assert lock.acquire()
            lock.release()
    finally:
        ended.set()
        for watcher in watchers:
            watcher.join()


def test_a_forked_child_that_outlives_its_parent_holds_no_lock(tmp_path):
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    here, there = FORK.Pipe()
    end = FORK.Event()
    child = FORK.Process(target=lambda: (there.send("runs"), end.wait(60)))
    child.start()
    assert here.recv() == "runs"
    assert lock_owner(tmp_path)  # the child has not released it for its parent
    lock.release()
    assert not lock_owner(tmp_path)
    end.set()
    child.join()
