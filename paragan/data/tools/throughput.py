"""How fast images come: of the pipeline, and of decoding alone, which is its limit where storage is fast."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from paragan.core.rng import shuffled
from paragan.data.decode import place
from paragan.data.loader.memory_budget import CHUNK
from paragan.data.loader.prefetch import Feed, Order, Pipeline
from paragan.data.source import DecodeError
from paragan.data.streaming import Streamed

SAMPLE = 1024  # images that the decoder is measured with
BEFORE = 32  # batches that are not timed: hands are found meanwhile


@dataclass(frozen=True)
class Speed:
    """images_s : of the pipeline, when nobody computes;  decoder_s : of decoding alone, from memory, on all cores
    fetch_ms : latency of an image, median;  workers, fetches, depth, apart : the hands at the end
    """

    images_s: float
    decoder_s: float
    fetch_ms: float
    workers: int
    fetches: int
    depth: int
    apart: int

    def line(self) -> str:
        share = self.images_s / self.decoder_s
        hands = "processes" if self.apart else "threads"
        return (
            f"{self.images_s:,.0f} images/s, {share:.0%} of the {self.decoder_s:,.0f} that decoding alone makes here; "
            f"an image comes in {self.fetch_ms:.3g} ms; {self.workers} {hands} decode, {self.fetches} "
            f"requests at once, {self.depth} batches ahead"
        )


def measure(images: Streamed, batch: int, seconds: float, feed: Feed | None = None) -> Speed:
    """Take batches as fast as they come for so long, in a shuffled order."""
    alone = _alone(images, seconds / 8)
    pipeline = Pipeline(images, _orders(len(images), batch), feed)
    try:
        deadline = time.perf_counter() + seconds / 4
        for _ in itertools.takewhile(lambda _: time.perf_counter() < deadline, range(BEFORE)):
            pipeline.take()
        begin, count, latencies = time.perf_counter(), 0, []
        while (spent := time.perf_counter() - begin) < seconds / 2 or not count:
            count += len(pipeline.take())
            latencies.append(pipeline.last.fetch_s)
        hands = pipeline.tuning.hands
        alone = max(alone, _alone(images, seconds / 8))  # both sides of it: machines have good and bad seconds
        return Speed(count / spent, alone, 1000 * float(np.median(latencies)), *hands.values())
    finally:
        pipeline.close()


def _orders(count: int, batch: int) -> Iterator[Order]:
    for epoch in itertools.count():
        order = shuffled(0, epoch, count)
        order = np.resize(order, max(batch, count))  # [count], or a batch of the same ones again
        for start in range(0, len(order) - batch + 1, batch):
            yield Order(order[start : start + batch])


def _alone(images: Streamed, seconds: float) -> float:
    """Images a second from records in memory to memory, on all cores."""
    records = []
    for index in range(min(SAMPLE, len(images))):
        try:
            records.append(images.fetch(index))
        except DecodeError:
            continue
    cores = len(os.sched_getaffinity(0))
    deadline = time.perf_counter() + seconds

    def decode(first: int) -> int:
        out, done = np.empty((CHUNK, *images.shape[1:]), np.uint8), 0
        for record in itertools.cycle(records[first:] + records[:first]):
            try:
                place(record, out[done % CHUNK])
            except DecodeError:
                continue
            done += 1
            if not done % CHUNK and time.perf_counter() > deadline:
                return done
        return 0

    with ThreadPoolExecutor(cores) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(decode, [len(records) * core // cores for core in range(cores)]))
    return done / (time.perf_counter() - begin)
