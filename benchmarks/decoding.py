"""How many JPEGs a second two cores decode: from tar shards in the page cache to batches, contestants in turns.

Beside the contestants of loaders.py, the limit: simplejpeg alone, from bytes in memory to memory that stays in cache,
two threads, 32 images a task.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import loaders
import numpy as np
import simplejpeg
from loaders import BATCH, Feed
from shards import Files, Shards
from timing import Times, interleave

CORES, CHUNK, WARM_UP, SETTLE_S = 2, 32, 8, 0.5  # WARM_UP: batches, more than any contestant has ready
FLOAT: dict[str, Callable[[str, Shards], Feed]] = {
    "ours": loaders.ours,
    "dataloader": loaders.dataloader,
    "webdataset": loaders.web,
}


def measured(folder: Path, shards: Shards, batches: int, rounds: int) -> dict[str, Any]:
    """Images a second of everyone, and their ratios, from `batches` batches a round."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    feeds = {name: make(str(folder), shards) for name, make in FLOAT.items()}
    for feed in feeds.values():
        loaders.checked(next(feed.batches), shards.resolution)
    feeds["ours, uint8"] = loaders.ours_uint8(str(folder), shards)
    with ThreadPoolExecutor(CORES) as pool:
        plays = {"decoder alone": _limit(folder, shards, pool)} | {name: _taking(f) for name, f in feeds.items()}
        times = _in_turns(plays, batches, rounds)
    for feed in feeds.values():
        feed.close()
    return {"data": shards.about(), "batches": batches, "contestants": _compared(times)}


def _in_turns(plays: dict[str, Callable[[int], None]], batches: int, rounds: int) -> Times:
    """Every turn first takes what had been made ready while others had theirs."""

    def turn(play: Callable[[int], None]) -> Callable[[int], None]:
        def blocks(count: int) -> None:
            if count == 1:  # the step that `interleave` does not time
                time.sleep(SETTLE_S)
            play(WARM_UP if count == 1 else count)

        return blocks

    return interleave({name: turn(play) for name, play in plays.items()}, rounds=rounds, steps=batches)


def _compared(times: Times) -> dict[str, Any]:
    found = {}
    for name, ms in times.ms.items():
        rates = sorted(1000 * BATCH / one for one in ms)
        found[name] = {
            "images_s": {"median": float(np.median(rates)), "range": [rates[0], rates[-1]]},
            "of_the_limit": times.ratio("decoder alone", name).median,
            "ours_is_faster": times.ratio(name, "ours").median,
            "rounds_ms_a_batch": list(ms),
        }
    return found


def _taking(feed: Feed) -> Callable[[int], None]:
    def play(count: int) -> None:
        for _ in range(count):
            next(feed.batches)

    return play


def _limit(folder: Path, shards: Shards, pool: ThreadPoolExecutor) -> Callable[[int], None]:
    files = Files(str(folder), shards)
    records = [files.jpeg(index) for index in range(len(shards))]
    chunks = _endlessly([records[i : i + CHUNK] for i in range(0, len(records) // CHUNK * CHUNK, CHUNK)])

    def decode(chunk: list[bytes]) -> None:
        out = np.empty((CHUNK, shards.resolution, shards.resolution, 3), np.uint8)
        for record, image in zip(chunk, out):
            simplejpeg.decode_jpeg(record, buffer=image)

    def play(count: int) -> None:
        list(pool.map(decode, [next(chunks) for _ in range(count * BATCH // CHUNK)]))

    return play


def _endlessly(chunks: list[list[bytes]]) -> Iterator[list[bytes]]:
    while True:
        yield from chunks
