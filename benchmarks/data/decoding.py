"""How many JPEGs a second two cores decode: from tar shards in the page cache to batches, contestants in turns.

Beside the contestants of loaders.py, the limit: simplejpeg alone, from bytes in memory to memory that stays in cache,
two threads, 32 images a task; and the same by two processes, which do not even share an interpreter's lock.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from benchmarks.data import loaders
from benchmarks.data.loaders import BATCH, Feed
from benchmarks.data.make_shards import ShardReader, Shards
from benchmarks.lib.timing import Times, interleave

CORES, CHUNK, WARM_UP, SETTLE_S, TUNE_S = 2, 32, 8, 0.5, 4.0  # WARM_UP: batches, more than any contestant has ready
FIXED_OPTIONS = {"batches": 6}  # fewer batches ahead than are taken to warm up
FLOAT_FEEDS: dict[str, Callable[[str, Shards], Feed]] = {
    "ours": lambda where, shards: loaders.make_ours(where, shards, **FIXED_OPTIONS),
    "dataloader": loaders.make_dataloader,
    "webdataset": loaders.make_webdataset,
}


def measure(folder: Path, shards: Shards, batches: int, rounds: int) -> dict[str, Any]:
    """Images a second of everyone, and their ratios, from `batches` batches a round."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    chunks = _chunks(folder, shards)
    _set_chunks(chunks)
    threads = ThreadPoolExecutor(CORES)
    processes = ProcessPoolExecutor(CORES, multiprocessing.get_context("fork"), _set_chunks, (chunks,))
    limits = {
        "decoder alone": _decode_limit(len(chunks), threads),
        "decoder alone, processes": _decode_limit(len(chunks), processes),
    }
    limits["decoder alone, processes"](1)  # they start while there is nothing else
    feeds = {name: make(str(folder), shards) for name, make in FLOAT_FEEDS.items()}
    for feed in feeds.values():
        loaders.check_batch(next(feed.batches), shards.resolution)
    feeds["ours, uint8"] = loaders.make_ours_uint8(str(folder), shards, **FIXED_OPTIONS)
    for kind in ("threads", "processes"):
        feeds[f"ours, uint8, {kind}"] = loaders.make_ours_uint8(str(folder), shards, **FIXED_OPTIONS, worker_type=kind)
    for feed in feeds.values():
        _warm_up(feed)
    times = _interleave_feeds(limits | {name: _take_batches(feed) for name, feed in feeds.items()}, batches, rounds)
    for feed in feeds.values():
        feed.close()
    for pool in (threads, processes):
        pool.shutdown()
    return {"data": shards.describe(), "batches": batches, "contestants": _summarize(times)}


def _interleave_feeds(plays: dict[str, Callable[[int], None]], batches: int, rounds: int) -> Times:
    """Every turn first takes what had been made ready while others had theirs."""

    def turn(play: Callable[[int], None]) -> Callable[[int], None]:
        def blocks(count: int) -> None:
            if count == 1:  # the step that `interleave` does not time
                time.sleep(SETTLE_S)
            play(WARM_UP if count == 1 else count)

        return blocks

    return interleave({name: turn(play) for name, play in plays.items()}, rounds=rounds, steps=batches)


def _summarize(times: Times) -> dict[str, Any]:
    result = {}
    for name, ms in times.ms.items():
        rates = sorted(1000 * BATCH / one for one in ms)
        result[name] = {
            "images_s": {"median": float(np.median(rates)), "range": [rates[0], rates[-1]]},
            "of_the_limit": times.ratio("decoder alone", name).median,
            "ours_is_faster": times.ratio(name, "ours").median,
            "rounds_ms_a_batch": list(ms),
        }
    return result


def _take_batches(feed: Feed) -> Callable[[int], None]:
    def play(count: int) -> None:
        for _ in range(count):
            next(feed.batches)

    return play


def _warm_up(feed: Feed) -> None:
    """Take for a while, for whatever adapts to that."""
    end = time.perf_counter() + TUNE_S
    while time.perf_counter() < end:
        next(feed.batches)


def _chunks(folder: Path, shards: Shards) -> list[list[bytes]]:
    files = ShardReader(str(folder), shards)
    records = [files.read_jpeg(index) for index in range(len(shards))]
    return [records[i : i + CHUNK] for i in range(0, len(records) // CHUNK * CHUNK, CHUNK)]


def _set_chunks(chunks: list[list[bytes]]) -> None:
    global _known
    _known = chunks


def _decode(number: int) -> None:
    """One of the chunks that are known, to nowhere."""
    chunk = _known[number % len(_known)]
    height, width, _, _ = simplejpeg.decode_jpeg_header(chunk[0])
    out = np.empty((CHUNK, int(height), int(width), 3), np.uint8)
    for record, image in zip(chunk, out):
        simplejpeg.decode_jpeg(record, buffer=image)


def _decode_limit(chunks: int, pool: Executor) -> Callable[[int], None]:
    numbers = itertools.cycle(range(chunks))

    def play(count: int) -> None:
        list(pool.map(_decode, itertools.islice(numbers, count * BATCH // CHUNK)))

    return play
