"""How fast images come: of the pipeline, and of decoding alone, which is its limit where storage is fast."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from paragan.core.rng import epoch_permutation
from paragan.data.decode import decode_into
from paragan.data.loader.memory_budget import CHUNK_IMAGES
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.source import DecodeError
from paragan.data.streaming import StreamingImages

DECODE_SAMPLE_IMAGES = 1024  # images that the decoder is measured with
WARMUP_BATCHES = 32  # batches that are not timed: hands are found meanwhile


@dataclass(frozen=True)
class Throughput:
    """images_s : of the pipeline, when nobody computes;  decoder_s : of decoding alone, from memory, on all cores
    fetch_ms : latency of an image, median;  workers, fetches, depth, apart : the hands at the end
    """

    images_per_s: float
    decode_images_per_s: float
    fetch_ms: float
    workers: int
    concurrent_requests: int
    batches: int
    use_processes: int

    def to_line(self) -> str:
        share = self.images_per_s / self.decode_images_per_s
        hands = "processes" if self.use_processes else "threads"
        return (
            f"{self.images_per_s:,.0f} images/s, {share:.0%} of the {self.decode_images_per_s:,.0f} that decoding alone makes here; "
            f"an image comes in {self.fetch_ms:.3g} ms; {self.workers} {hands} decode, {self.concurrent_requests} "
            f"requests at once, {self.batches} batches ahead"
        )


def measure_throughput(
    images: StreamingImages, batch: int, seconds: float, prefetch: PrefetchOptions | None = None
) -> Throughput:
    """Take batches as fast as they come for so long, in a shuffled order."""
    alone = _measure_decoding(images, seconds / 8)
    pipeline = PrefetchPipeline(images, _shuffled_batches(len(images), batch), prefetch)
    try:
        deadline = time.perf_counter() + seconds / 4
        for _ in itertools.takewhile(lambda _: time.perf_counter() < deadline, range(WARMUP_BATCHES)):
            pipeline.next_batch()
        begin, count, latencies = time.perf_counter(), 0, []
        while (spent := time.perf_counter() - begin) < seconds / 2 or not count:
            count += len(pipeline.next_batch())
            latencies.append(pipeline.last_window.fetch_s)
        hands = pipeline.tuner_state.knobs
        alone = max(
            alone, _measure_decoding(images, seconds / 8)
        )  # both sides of it: machines have good and bad seconds
        return Throughput(count / spent, alone, 1000 * float(np.median(latencies)), *hands.as_tuple())
    finally:
        pipeline.close()


def _shuffled_batches(count: int, batch: int) -> Iterator[BatchIndices]:
    for epoch in itertools.count():
        order = epoch_permutation(0, epoch, count)
        order = np.resize(order, max(batch, count))  # [count], or a batch of the same ones again
        for start in range(0, len(order) - batch + 1, batch):
            yield BatchIndices(order[start : start + batch])


def _measure_decoding(images: StreamingImages, seconds: float) -> float:
    """Images a second from records in memory to memory, on all cores."""
    records = []
    for index in range(min(DECODE_SAMPLE_IMAGES, len(images))):
        try:
            records.append(images.read_record(index))
        except DecodeError:
            continue
    cores = len(os.sched_getaffinity(0))
    deadline = time.perf_counter() + seconds

    def decode_loop(first: int) -> int:
        out, done = np.empty((CHUNK_IMAGES, *images.shape[1:]), np.uint8), 0
        for record in itertools.cycle(records[first:] + records[:first]):
            try:
                decode_into(record, out[done % CHUNK_IMAGES])
            except DecodeError:
                continue
            done += 1
            if not done % CHUNK_IMAGES and time.perf_counter() > deadline:
                return done
        return 0

    with ThreadPoolExecutor(cores) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(decode_loop, [len(records) * core // cores for core in range(cores)]))
    return done / (time.perf_counter() - begin)
