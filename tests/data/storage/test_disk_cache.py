"""What came once comes from disk: by all threads, processes and later runs, checked, and never in the way."""

import errno
import multiprocessing as mp
import os
import random
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paragan.core.errors import UsageError
from paragan.data.storage import disk_cache as caches
from paragan.data.storage.disk_cache import ENTRY_BYTES, DiskCache, default_cache_dir, parse_index
from processes import PRELOADED_MODULES


def build(number: int) -> bytes:
    """What range `number` holds: some 3 kB, its own."""
    return np.random.default_rng(number).bytes(1000 + number % 5000)


def opened(folder: Path, most_gb: float = 0.01) -> DiskCache:
    return DiskCache(str(folder), "http://host/set", most_gb)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_entries_are_shared_and_persistent(tmp_path: Path):
    first, adjacent = opened(tmp_path), opened(tmp_path)
    assert first.get(1) is None
    first.put(1, b"one")
    first.put(2, b"")
    assert (first.get(1), adjacent.get(1), adjacent.get(2)) == (b"one", b"one", b"")
    adjacent.put(3, b"three")
    assert first.get(3) == b"three"
    del first, adjacent
    assert opened(tmp_path).get(3) == b"three"
    assert DiskCache(str(tmp_path), "http://host/other").get(1) is None


def test_keys_differ_by_file_version_and_range():
    requested = [
        ("a", "v", 9, 0, 5),
        ("b", "v", 9, 0, 5),
        ("a", "w", 9, 0, 5),
        ("a", "v", 8, 0, 5),
        ("a", "v", 9, 1, 5),
    ]
    assert len({DiskCache.key(*one) for one in requested} | {DiskCache.key("a", "v", 9, 0, 6)}) == 6


def test_a_range_is_stored_once(tmp_path: Path):
    first, adjacent = opened(tmp_path), opened(tmp_path)
    for cache in (first, adjacent, first):
        cache.put(1, b"one")
    assert (first.path / "data").read_bytes() == b"one"
    assert (first.stored, adjacent.stored) == (1, 0)


@pytest.mark.parametrize("at", [0, 1500, 2999])
def test_a_flipped_byte_is_detected_and_the_range_fetched_again(tmp_path: Path, at: int):
    cache, adjacent = opened(tmp_path), opened(tmp_path)
    for key in range(3):
        cache.put(key, bytes([key]) * 1000)
    flip(cache.path / "data", at)
    wrong = at // 1000
    assert [cache.get(key) is None for key in range(3)] == [key == wrong for key in range(3)]
    assert cache.corrupted == 1
    cache.put(wrong, bytes([wrong]) * 1000)
    for one in (cache, adjacent, opened(tmp_path)):
        assert [one.get(key) for key in range(3)] == [bytes([key]) * 1000 for key in range(3)]


def test_a_file_cut_off_is_noticed(tmp_path: Path):
    cache = opened(tmp_path)
    cache.put(1, b"one")
    os.truncate(cache.path / "data", 2)
    assert opened(tmp_path).get(1) is None


@pytest.mark.parametrize("torn", [1, 7, 39, 41, 100])
def test_entries_after_a_torn_one_count(tmp_path: Path, torn: int):
    cache = opened(tmp_path)
    for key in range(5):
        cache.put(key, build(key))
    with (cache.path / "index").open("ab") as index:
        index.write(random.Random(torn).randbytes(torn))
    for key in range(5, 9):
        cache.put(key, build(key))
    later = opened(tmp_path)
    assert [later.get(key) for key in range(9)] == [build(key) for key in range(9)]


def test_a_damaged_index_entry_loses_only_itself(tmp_path: Path):
    cache = opened(tmp_path)
    for key in range(50):
        cache.put(key, build(key))
    index = (cache.path / "index").read_bytes()
    assert len(index) == 50 * ENTRY_BYTES
    for at in range(10 * ENTRY_BYTES, 11 * ENTRY_BYTES):
        for bit in (1, 128):
            broken = bytearray(index)
            broken[at] ^= bit
            used, result = parse_index(bytes(broken))
            assert used == len(index)
            assert result.keys() == set(range(50)) - {10}
    assert parse_index(bytes(1000)) == (961, {})


def test_a_crash_at_any_byte_leaves_a_cache_that_works(tmp_path: Path):
    cache = opened(tmp_path)
    for key in range(3):
        cache.put(key, build(key))
    index = (cache.path / "index").read_bytes()
    for end in range(len(index)):
        assert parse_index(index[:end])[1].keys() == set(range(end // ENTRY_BYTES))


def work(folder: str, seed: int) -> None:
    """Thousands of gets and puts on 8 threads, in another order each process."""
    cache, keys = opened(Path(folder)), list(range(400)) * 2
    random.Random(seed).shuffle(keys)

    def one(key: int) -> bool:
        data = cache.get(key)
        if data is None:
            cache.put(key, data := build(key))
        return data == build(key)

    with ThreadPoolExecutor(8) as pool:
        good = all(pool.map(one, keys))
    os._exit(0 if good and not cache.corrupted and not cache.not_stored and len(cache) == 400 else 1)


def test_processes_and_threads_write_at_once(tmp_path: Path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    workers = [context.Process(target=work, args=(str(tmp_path), seed)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    later = opened(tmp_path)
    assert [later.get(key) for key in range(400)] == [build(key) for key in range(400)]


def test_a_process_killed_while_writing_leaves_the_cache_valid(tmp_path: Path):
    context = mp.get_context("forkserver")
    worker = context.Process(target=work, args=(str(tmp_path), 0))
    cache = opened(tmp_path)
    worker.start()
    while len(cache) < 20:
        cache.get(-1)
    worker.kill()
    worker.join()
    for key in range(400):
        assert (opened(tmp_path) if key == 100 else cache).get(key) in (None, build(key))
    assert not cache.corrupted


def test_a_full_cache_stores_no_more(tmp_path: Path):
    cache = opened(tmp_path, most_gb=10e-6)
    for key in range(20):
        cache.put(key, bytes(1000))
    assert (cache.stored, cache.not_stored, len(cache)) == (10, 10, 10)
    repeated = DiskCache(str(tmp_path), "http://host/other", 10e-6)  # the limit is of all places together
    repeated.put(0, b"no")
    assert (repeated.stored, repeated.not_stored) == (0, 1)


def test_half_of_what_is_free_is_the_limit_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = caches.shutil.disk_usage(tmp_path)._replace(free=2**21)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: usage)
    cache = opened(tmp_path, 0)
    for key in range(3):
        cache.put(key, bytes(2**19))
    assert (cache.stored, cache.not_stored) == (2, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("written", [-1, 0, 5])
def test_a_failing_disk_only_disables_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, written: int
):
    cache, write = opened(tmp_path), os.write
    cache.put(1, b"one")

    def fails(file: int, data: bytes) -> int:
        if written < 0:
            raise OSError(code, os.strerror(code))
        return write(file, data[:written])

    monkeypatch.setattr(caches.os, "write", fails)
    cache.put(2, b"number two")
    monkeypatch.undo()
    assert (cache.get(1), cache.get(2), cache.not_stored) == (b"one", None, 1)
    cache.put(2, b"number two")
    assert opened(tmp_path).get(2) == b"number two"


@pytest.mark.parametrize("inside", ["file/cache", "file", "/proc/cache"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, inside: str):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r'^data\.remote\.cache_dir=.* cannot be used \(.+\): give a folder .* or "" for none$'
    ):
        opened(tmp_path / inside)


def test_a_full_disk_is_refused_at_opening_unless_mostly_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened(tmp_path / "used").put(1, b"one")
    usage = caches.shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="No space left"):
        opened(tmp_path / "new")
    assert opened(tmp_path / "used").get(1) == b"one"


def test_where_it_lies_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == "/x/paragan/data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == "/home/me/.cache/paragan/data"


def test_a_cache_hit_adds_little_to_reading_and_checking(tmp_path: Path):
    cache = opened(tmp_path)
    for key in range(1000):
        cache.put(key, bytes(1000))

    def best(work) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for key in range(1000):
                work(key)
            times.append((time.perf_counter() - start) / 1000)
        return min(times)

    bare = best(lambda key: zlib.crc32(os.pread(cache._data, 1000, 0)))
    assert best(cache.get) - bare < 30e-6
