"""Measure the throughput of the prefetch pipeline, and of decoding alone, its limit if storage is fast."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from paragan.core.philox import epoch_permutation
from paragan.data.loader.memory_budget import CHUNK_IMAGES
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.source import DecodeError
from paragan.data.streaming import StreamingImages

DECODE_SAMPLE_IMAGES = 1024  # for the measurement of decoding alone
WARMUP_BATCHES = 32  # are not timed: the tuner settles


@dataclass(frozen=True)
class Throughput:
    """Measured throughput.

    images_per_s        : of the pipeline, without training
    decode_images_per_s : of decoding alone, from memory, on all cores
    fetch_ms            : median latency of an image
    workers, concurrent_requests, batches, use_processes : the knobs at the end
    """

    images_per_s: float
    decode_images_per_s: float
    fetch_ms: float
    workers: int
    concurrent_requests: int
    batches: int
    use_processes: int

    def to_line(self) -> str:
        """Return a line for people."""
        fraction = self.images_per_s / self.decode_images_per_s
        worker_type = "processes" if self.use_processes else "threads"
        return (
            f"{self.images_per_s:,.0f} images/s, {fraction:.0%} of the {self.decode_images_per_s:,.0f} of decoding "
            f"alone; latency of an image {self.fetch_ms:.3g} ms; {self.workers} {worker_type} decode, "
            f"{self.concurrent_requests} concurrent requests, {self.batches} batches ahead"
        )


def measure_throughput(
    images: StreamingImages, batch: int, seconds: float, prefetch: PrefetchOptions | None = None
) -> Throughput:
    """Take batches as fast as possible, in a shuffled order.

    Args:
        images: the images.
        batch: images of a batch.
        seconds: time for all measurements.
        prefetch: options of the pipeline.
    """
    decode_images_per_s = _measure_decoding(images, seconds / 8)
    pipeline = PrefetchPipeline(images, _shuffled_batches(len(images), batch), prefetch)
    try:
        deadline = time.perf_counter() + seconds / 4
        for _ in itertools.takewhile(lambda _: time.perf_counter() < deadline, range(WARMUP_BATCHES)):
            pipeline.next_batch()
        start = time.perf_counter()
        count = 0
        latencies_s: list[float] = []
        while (elapsed_s := time.perf_counter() - start) < seconds / 2 or not count:
            count += len(pipeline.next_batch())
            latencies_s.append(pipeline.last_window.fetch_s)
        knobs = pipeline.tuner_state.knobs
        # Decoding is measured before and after, since the speed of a machine varies.
        decode_images_per_s = max(decode_images_per_s, _measure_decoding(images, seconds / 8))
        fetch_ms = 1000 * float(np.median(latencies_s))
        return Throughput(count / elapsed_s, decode_images_per_s, fetch_ms, *knobs.as_tuple())
    finally:
        pipeline.close()


def _shuffled_batches(count: int, batch: int) -> Iterator[BatchIndices]:
    for epoch in itertools.count():
        order = epoch_permutation(0, epoch, count)
        order = np.resize(order, max(batch, count))  # a data set smaller than a batch is repeated
        for start in range(0, len(order) - batch + 1, batch):
            yield BatchIndices(order[start : start + batch])


def _measure_decoding(images: StreamingImages, seconds: float) -> float:
    """Return the images per second that all cores decode, from records in memory."""
    records = []
    for index in range(min(DECODE_SAMPLE_IMAGES, len(images))):
        try:
            records.append(images.read_record(index))
        except DecodeError:
            continue
    cores = len(os.sched_getaffinity(0))
    deadline = time.perf_counter() + seconds

    def decode_loop(first: int) -> int:
        out = np.empty((CHUNK_IMAGES, *images.shape[1:]), np.uint8)
        done = 0
        for record in itertools.cycle(records[first:] + records[:first]):
            try:
                images.decode(record, out[done % CHUNK_IMAGES])
            except DecodeError:
                continue
            done += 1
            if not done % CHUNK_IMAGES and time.perf_counter() > deadline:
                return done
        return 0

    with ThreadPoolExecutor(cores) as pool:
        start = time.perf_counter()
        done = sum(pool.map(decode_loop, [len(records) * core // cores for core in range(cores)]))
    return done / (time.perf_counter() - start)
