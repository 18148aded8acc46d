"""The prefetch pipeline: fetches and decodes images ahead of the training step.

    pipeline = PrefetchPipeline(images, batch_sampler)   # batch_sampler: the images of each batch, without end
    pixels = pipeline.next_batch()                       # [N, H, W, C] uint8, in the order of the sampler

Workers are threads, because decoders release the interpreter's lock and threads share memory for free. If images are so
small that threads wait for the lock more than they decode, each worker gets a process that decodes into shared memory
(`decode_worker`). Workers read local images themselves. Remote images are fetched by other threads, one request each,
and decoded in chunks once a chunk is complete. `autotune` decides how many of each there are.

Only the thread of the step starts batches, so queues are all that threads share. A batch that fails keeps its error
until it is taken: a run ends at the same step however early the error was found.

Memory: pixels of batches started and not yet taken, and encoded images, stay below `PrefetchOptions.memory_gb`. In
addition each worker holds one image at full size and a megabyte of local records.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from paragan.core.errors import RunError, UsageError
from paragan.core.schema import config_class
from paragan.data.loader.autotune import WINDOW_S, PipelineKnobs, TunerState, WindowStats, tune, workers_to_saturate
from paragan.data.loader.decode_worker import DecodeCost, DecodeWorker, EncodedSample, decode_batch
from paragan.data.loader.memory_budget import CHUNK_IMAGES, MemoryBudget
from paragan.data.loader.shared_memory import SPARE_BLOCKS, MemoryBlock, SharedArena
from paragan.data.source import DecodeError, RowKey, Variation
from paragan.data.streaming import StreamingRows

Count = Annotated[int, Field(ge=0)]
LOCAL_CHUNK_IMAGES = 64  # local images that are decoded together, if their pixels fit CHUNK_BYTES
CHUNK_BYTES = 2**20  # pixels of a local chunk; local records that are read before they are decoded
MAX_REQUESTS = 128
MAX_BATCHES = 1024
STALL_TIMEOUT_S = 600.0  # without a single image, after which something is considered hung


@config_class
class PrefetchOptions:
    """How images that are not cached in memory are read ahead. 0: tuned while training runs.

    workers             : threads that decode
    concurrent_requests : requests to remote storage at the same time
    batches             : batches ahead of the step
    worker_type         : whether workers are threads or have a process each; auto: processes if the step waits for
                          images so small that threads mostly wait for each other
    memory_gb           : limit of the memory of all that is ahead, on every rank
    """

    workers: Count = 0
    concurrent_requests: Count = 0
    batches: Count = 0
    worker_type: Literal["auto", "threads", "processes"] = "auto"
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True)
class BatchIndices:
    """The images of one batch.

    index : [N] indices of the images
    flip  : [N] bool, which of them are mirrored; None for none
    keys  : [N] of the random numbers of records that are cut or transformed; None for images
    """

    index: np.ndarray
    flip: np.ndarray | None = None
    keys: Sequence[RowKey] | None = None

    def variations(self, rows: slice) -> Sequence[Variation]:
        """Return how some rows are varied."""
        if self.keys is not None:
            return self.keys[rows]
        return [False] * len(self.index[rows]) if self.flip is None else self.flip[rows].tolist()


@dataclass(eq=False)
class _PendingBatch:
    """A batch that was started and not yet taken.

    number    : position in the order of the sampler
    selection : its images
    block     : [N, H, W, C] uint8, where their pixels go
    remaining : images not yet decoded
    records   : [N] remote images that were fetched
    unfetched : images not yet fetched, for each chunk
    error     : why the batch failed
    """

    number: int
    selection: BatchIndices
    block: MemoryBlock
    remaining: int
    records: list[EncodedSample | None] = field(default_factory=list)
    unfetched: list[int] = field(default_factory=list)
    error: Exception | None = None

    @property
    def out(self) -> np.ndarray:
        return self.block.array


class _WindowRecorder:
    """Collects the measurements of one window. Its owner holds a lock."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.wait_s = 0.0
        self.images = 0
        self.batches = 0
        self.fetch_latencies_s: list[float] = []
        self.decode_s = 0.0
        self.decoded_images = 0

    def to_stats(self, ready_batches: int) -> WindowStats:
        """Return the measurements up to now."""
        median, p90 = np.quantile(self.fetch_latencies_s, (0.5, 0.9)) if self.fetch_latencies_s else (0.0, 0.0)
        duration_s = max(time.perf_counter() - self.start_s, 1e-6)
        return WindowStats(
            duration_s=duration_s,
            wait_s=min(self.wait_s, duration_s),
            images=self.images,
            batches=self.batches,
            fetch_s=float(median),
            fetch_p90_s=float(p90),
            decode_s=self.decode_s / max(self.decoded_images, 1),
            ready_batches=ready_batches,
        )


class PrefetchPipeline:
    """Batches in the order of a sampler, made ahead by threads whose number `autotune` decides.

    Args:
        images: the images.
        batch_sampler: yields the images of each batch, without end.
        prefetch: options.
        page_lock: page-locks memory that batches lie in, for asynchronous copies to the device.
        cores: CPU cores this rank may use; None for all.
        stall_timeout_s: raise RunError if no image arrives for so long while the step waits.

    Raises:
        UsageError: the memory limit does not hold two batches.
    """

    def __init__(
        self,
        images: StreamingRows,
        batch_sampler: Iterator[BatchIndices],
        prefetch: PrefetchOptions | None = None,
        *,
        page_lock: Callable[[np.ndarray], None] | None = None,
        cores: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ):
        prefetch = prefetch or PrefetchOptions()
        self.images = images
        self.batch_sampler = batch_sampler
        self.is_local = images.source.is_local
        self.memory_budget = MemoryBudget(int(prefetch.memory_gb * 2**30))
        self._seekable_source = images.seekable_source
        self._is_encoded = False  # whether records are encoded images, as far as is known
        is_small = LOCAL_CHUNK_IMAGES * images.row_bytes <= CHUNK_BYTES
        self._chunk_images = LOCAL_CHUNK_IMAGES if self.is_local and is_small else CHUNK_IMAGES
        self._next_selection = next(batch_sampler)
        batch_bytes = self._batch_bytes(self._next_selection)
        required_bytes = (SPARE_BLOCKS + 3) * batch_bytes  # two batches ahead, and the one that the step has
        if required_bytes > self.memory_budget.limit_bytes:
            raise UsageError(
                f"data.prefetch.memory_gb={prefetch.memory_gb:g}: does not hold two batches ahead. Use "
                f"{math.ceil(required_bytes / 2**30 * 1000) / 1000:g} or more"
            )
        self._cores = cores or max(1, len(os.sched_getaffinity(0)))
        max_batches = self.memory_budget.limit_bytes // batch_bytes - SPARE_BLOCKS - 1
        self._min_knobs, self._max_knobs = _knob_bounds(prefetch, self.is_local, self._cores, max_batches)
        first_knobs = PipelineKnobs(max(1, self._cores // 2), 0 if self.is_local else 16, 4)
        self.tuner_state = TunerState(first_knobs.clamp(self._max_knobs, self._min_knobs))
        self.window_recorder = _WindowRecorder()
        self.last_window = WindowStats(0, 0, 0, 0, 0, 0, 0, 0)
        self.decision_log: list[str] = []
        self.num_decisions = 0
        self.start_time = time.monotonic()
        self._decode_queue: queue.PriorityQueue[tuple[int, int, _PendingBatch | None]] = queue.PriorityQueue()
        self._fetch_queue: queue.SimpleQueue[tuple[_PendingBatch, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._batch_done = threading.Condition(self._lock)
        self._memory_freed = threading.Condition(self._lock)
        self._pending = deque[_PendingBatch]()
        self._arena = SharedArena(page_lock)
        self._lent_block: MemoryBlock | None = None  # of the batch that the step has
        self._next_number = 0
        self._closed = False
        self._waiting_since = math.inf  # when the step began to wait for its batch
        self._stall_timeout_s = stall_timeout_s
        self._last_progress = time.monotonic()
        self._running = PipelineKnobs(0, 0, 0)  # threads that were started
        self._stop_counter = itertools.count()  # makes entries of the priority queue that stop a thread comparable
        self._start_batches()

    # Called by the step -------------------------------------------------------------------------------------

    def next_batch(self) -> np.ndarray:
        """Return the next batch, [N, H, W, C] uint8, valid until the next call.

        Raises:
            RunError: an image cannot be read, too many are bad, or nothing arrives.
        """
        lent_block = self._lent_block
        self._lent_block = None
        if lent_block is not None:
            self._arena.release(lent_block)
        self.wait()
        batch = self._pending[0]
        with self._batch_done:
            self._waiting_since = math.inf
            if batch.error:
                raise batch.error
            self.window_recorder.images += len(batch.out)
            self.window_recorder.batches += 1
            self._pending.popleft()
            self.memory_budget.pixel_bytes -= batch.out.nbytes
            if self._is_window_over():
                self._tune()
        self._start_batches()
        self._lent_block = batch.block
        return batch.out

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Block up to `timeout_s` until a batch is ready. Returns True if one is, or if it has failed.

        Raises:
            RunError: no image has arrived for `stall_timeout_s`.
        """
        batch = self._pending[0]
        start = time.perf_counter()
        end = start + timeout_s
        with self._batch_done:
            self._waiting_since = min(self._waiting_since, time.monotonic())
            while batch.remaining and not batch.error and start < end:
                self._batch_done.wait(min(WINDOW_S, end - start))
                now = time.perf_counter()
                self.window_recorder.wait_s += now - start
                start = now
                if batch.remaining and self._is_window_over():
                    self._tune()
                stalled_s = time.monotonic() - max(self._last_progress, self._waiting_since)
                if batch.remaining and stalled_s > self._stall_timeout_s:
                    raise RunError(
                        f"data: no image of {self.images.source.location} arrived within {self._stall_timeout_s:g} s"
                    )
        return not batch.remaining or batch.error is not None

    def stats(self) -> dict[str, float]:
        """Return the keys of the pipeline for a line of stats.jsonl."""
        knobs = self.tuner_state.knobs
        window = self.last_window
        return {
            "Data/workers": float(knobs.workers),
            "Data/processes": float(knobs.workers * knobs.use_processes),
            "Data/batches_ahead": float(knobs.batches),
            "Data/concurrent_requests": float(knobs.concurrent_requests),
            "Data/ready": float(self._num_ready()),
            "Data/ahead_mb": self.memory_budget.used_bytes / 2**20,
            "Data/fetch_ms": 1000 * window.fetch_s,
            "Data/fetch_p90_ms": 1000 * window.fetch_p90_s,
            "Data/baseline_ms": 1000 * self.tuner_state.baseline_latency_s,
            "Data/decode_ms": 1000 * window.decode_s,
            "Data/congested": float(self.tuner_state.congested),
            "Data/changes": float(self.num_decisions),
            "Data/bad": float(len(self.images.bad_samples.reasons)),
        }

    def pop_decisions(self) -> list[str]:
        """Return and clear the lines about decisions of the tuner."""
        decisions = self.decision_log
        self.decision_log = []
        return decisions

    def close(self) -> None:
        """Stop the threads. One that waits for remote storage ends with its request."""
        self._closed = True
        self._resize_threads(PipelineKnobs(0, 0, 0))

    def num_consecutive_ready(self) -> int:
        """Return how many of the next batches are complete, up to the first that is not."""
        count = 0
        for batch in tuple(self._pending):
            if batch.remaining or batch.error:
                break
            count += 1
        return count

    @property
    def is_ready(self) -> bool:
        """Whether `next_batch` would return at once."""
        return not self._pending[0].remaining

    # Starting batches: on the thread of the step ------------------------------------------------------------

    def _batch_bytes(self, selection: BatchIndices) -> int:
        return len(selection.index) * self.images.row_bytes

    def _start_batches(self) -> None:
        """Start as many batches as the tuner and the memory limit allow, at least one."""
        self._resize_threads(self.tuner_state.knobs)
        while not self._pending or (
            len(self._pending) < self.tuner_state.knobs.batches and self._can_start_batch(self._next_selection)
        ):
            selection = self._next_selection
            self._next_selection = next(self.batch_sampler)
            count = len(selection.index)
            block = self._arena.allocate((count, *self.images.row_shape))
            batch = _PendingBatch(self._next_number, selection, block, remaining=count)
            self._next_number += 1
            self._pending.append(batch)
            with self._lock:
                self.memory_budget.on_batch_started(batch.out.nbytes, 0 if self.is_local else count)
            self._enqueue(batch)

    def _can_start_batch(self, selection: BatchIndices) -> bool:
        with self._lock:
            return self.memory_budget.can_start_batch(len(selection.index), self._batch_bytes(selection))

    def _enqueue(self, batch: _PendingBatch) -> None:
        starts = range(0, batch.remaining, self._chunk_images)
        if self.is_local:
            for start in starts:
                self._decode_queue.put((batch.number, start, batch))
            return
        batch.records = [None] * batch.remaining
        batch.unfetched = [min(self._chunk_images, batch.remaining - start) for start in starts]
        for row in range(batch.remaining):
            self._fetch_queue.put((batch, row))

    def _resize_threads(self, knobs: PipelineKnobs) -> None:
        """Start threads, or enqueue entries that stop some, until there are as many as `knobs` says."""
        for _ in range(self._running.workers, knobs.workers):
            threading.Thread(target=self._decode_loop, name="paragan data", daemon=True).start()
        for _ in range(knobs.workers, self._running.workers):
            self._decode_queue.put((-1, next(self._stop_counter), None))
        for _ in range(self._running.concurrent_requests, knobs.concurrent_requests):
            threading.Thread(target=self._fetch_loop, name="paragan data", daemon=True).start()
        for _ in range(knobs.concurrent_requests, self._running.concurrent_requests):
            self._fetch_queue.put(None)
        self._running = knobs

    def _num_ready(self) -> int:
        return sum(not batch.remaining for batch in tuple(self._pending))

    def _is_window_over(self) -> bool:
        return time.perf_counter() - self.window_recorder.start_s >= WINDOW_S

    def _tune(self) -> None:
        """Make one decision. The lock is held, so only threads are changed now; batches at the next `next_batch`."""
        self.last_window = self.window_recorder.to_stats(self._num_ready())
        self.window_recorder = _WindowRecorder()
        old = self.tuner_state.knobs
        upper = self._max_knobs
        if not self._is_encoded:  # processes do not pay off for pixels
            upper = replace(upper, use_processes=self._min_knobs.use_processes)
        if len(self._pending) + 1 < old.batches:  # the memory limit allows no more
            upper = replace(upper, batches=min(upper.batches, old.batches))
        if self.is_local:
            useful_workers = workers_to_saturate(self._cores, self.last_window)
            useful_workers += old.use_processes  # one more, while requests are on their way to processes
            upper = replace(upper, workers=min(upper.workers, max(self._min_knobs.workers, useful_workers)))
        self.tuner_state = tune(self.tuner_state, self.last_window, upper, self._min_knobs)
        if self.tuner_state.reason:
            self.decision_log.append(self._format_decision(old))
            self.num_decisions += 1
        self._resize_threads(self.tuner_state.knobs)

    def _format_decision(self, old_knobs: PipelineKnobs) -> str:
        names = ("workers", "concurrent_requests", "batches", "processes")
        pairs = zip(names, old_knobs.as_tuple(), self.tuner_state.knobs.as_tuple())
        changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
        window = self.last_window
        return (
            f"{time.monotonic() - self.start_time:.1f} s, {self.tuner_state.reason}: {changes}; "
            f"fetch {1000 * window.fetch_s:.3g} ms (baseline {1000 * self.tuner_state.baseline_latency_s:.3g}), "
            f"waited {window.wait_s / window.duration_s:.0%}"
        )

    # The threads --------------------------------------------------------------------------------------------

    def _fetch_loop(self) -> None:
        """Fetch remote images until told to stop."""
        while (request := self._next_request()) and not self._closed:
            batch, row = request
            start = time.perf_counter()
            try:
                sample: EncodedSample = self.images.read_record(int(batch.selection.index[row]))
            except DecodeError as error:
                sample = error
            except Exception as error:  # any other error is raised where the batch is taken
                with self._lock:
                    self.memory_budget.in_flight -= 1
                self._fail(batch, error)
                continue
            latency_s = time.perf_counter() - start
            batch.records[row] = sample
            chunk = row // self._chunk_images
            with self._lock:
                self.window_recorder.fetch_latencies_s.append(latency_s)
                self.memory_budget.on_received(_encoded_bytes(sample))
                self._memory_freed.notify()
                self._last_progress = time.monotonic()
                batch.unfetched[chunk] -= 1
                is_complete = not batch.unfetched[chunk]
                self.memory_budget.undecoded_chunks += is_complete
            if is_complete:
                self._decode_queue.put((batch.number, chunk * self._chunk_images, batch))

    def _next_request(self) -> tuple[_PendingBatch, int] | None:
        """Return the batch and row to fetch next, once memory allows it; None to stop."""
        with self._memory_freed:
            while not self._closed and not self.memory_budget.can_request():
                self._memory_freed.wait(WINDOW_S)
            self.memory_budget.in_flight += 1
        request = self._fetch_queue.get()
        if request is None:
            with self._memory_freed:
                self.memory_budget.in_flight -= 1
                self._memory_freed.notify()
        return request

    def _decode_loop(self) -> None:
        """Decode chunks until told to stop."""
        folder = self._seekable_source.fs.local_root if self._seekable_source else None
        with DecodeWorker(self._arena, folder, self.images.decoder) as decode_worker:
            while not self._closed:
                _, start, batch = self._decode_queue.get()
                if batch is None:
                    return
                rows = range(start, min(start + self._chunk_images, len(batch.out)))
                worker = decode_worker if self.tuner_state.knobs.use_processes else None
                try:
                    cost, encoded_bytes = self._decode_chunk(batch, rows, worker)
                except Exception as error:
                    with self._lock:
                        self.memory_budget.undecoded_chunks -= not self.is_local
                    self._fail(batch, error)
                    continue
                with self._batch_done:
                    self.window_recorder.decode_s += cost.cpu_s
                    self.window_recorder.decoded_images += len(rows)
                    self.window_recorder.fetch_latencies_s += cost.read_s
                    self.memory_budget.encoded_bytes -= encoded_bytes
                    self._last_progress = time.monotonic()
                    batch.remaining -= len(rows)
                    self.memory_budget.undecoded_chunks -= not self.is_local
                    self._memory_freed.notify_all()
                    if not batch.remaining:
                        self._batch_done.notify_all()

    def _decode_chunk(self, batch: _PendingBatch, rows: range, worker: DecodeWorker | None) -> tuple[DecodeCost, int]:
        """Decode rows of a batch, and read replacements for bad ones.

        Returns:
            The time spent, and the bytes of the remote images.
        """
        total_cost = DecodeCost()
        encoded_bytes = 0
        for part, samples in self._split_chunk(batch, rows, worker, total_cost.read_s):
            if not self.is_local:
                encoded_bytes += sum(map(_encoded_bytes, samples))
            part_slice = slice(part.start, part.stop)
            out = batch.out[part_slice]
            variations = batch.selection.variations(part_slice)
            if worker:
                reasons, cost = worker.decode(samples, variations, batch.block, part.start)
            else:
                reasons, cost = decode_batch(samples, variations, out, self.images.decoder)
            for row, variation, reason, decoded in zip(part, variations, reasons, out):
                if reason is not None:
                    self.images.substitute(int(batch.selection.index[row]), reason, decoded, variation)
            total_cost.cpu_s += cost.cpu_s
            total_cost.read_s += cost.read_s
        return total_cost, encoded_bytes

    def _split_chunk(
        self, batch: _PendingBatch, rows: range, worker: DecodeWorker | None, read_s: list[float]
    ) -> Iterator[tuple[range, list[EncodedSample]]]:
        """Yield parts of a chunk with their encoded images.

        A process reads byte ranges of files itself. Other local images are read here, a megabyte at a time: if threads
        alternated between reading and decoding single images, they would wait for each other twice as often.
        """
        if worker and self._seekable_source:
            index = self.images.source_index(batch.selection.index[rows.start : rows.stop])
            yield rows, [*self._seekable_source.byte_ranges(index)]
            return
        samples: list[EncodedSample] = []
        num_bytes = 0
        for row in rows:
            sample = self._read_sample(batch, row, read_s)
            samples.append(sample)
            num_bytes += _encoded_bytes(sample)
            if num_bytes >= CHUNK_BYTES or row == rows[-1]:
                yield range(row + 1 - len(samples), row + 1), samples
                samples = []
                num_bytes = 0

    def _read_sample(self, batch: _PendingBatch, row: int, read_s: list[float]) -> EncodedSample:
        """Return a remote image that was fetched, or read a local one."""
        if not self.is_local:
            fetched = batch.records[row]
            batch.records[row] = None
            assert fetched is not None
            return fetched
        start = time.perf_counter()
        try:
            sample = self.images.read_record(int(batch.selection.index[row]))
        except DecodeError as error:
            sample = error
        read_s.append(time.perf_counter() - start)
        self._is_encoded = isinstance(sample, bytes) or _holds_bytes(sample)
        return sample

    def _fail(self, batch: _PendingBatch, error: Exception) -> None:
        if type(error) is RunError:
            error = RunError(f"{error}; the same command resumes from the last checkpoint")
        with self._batch_done:
            batch.error = batch.error or error
            self._batch_done.notify_all()


def _encoded_bytes(sample: EncodedSample | None) -> int:
    if isinstance(sample, bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(map(_encoded_bytes, sample.values()))
    return sample.nbytes if isinstance(sample, np.ndarray) else 0


def _holds_bytes(sample: EncodedSample) -> bool:
    return isinstance(sample, Mapping) and any(isinstance(value, bytes) for value in sample.values())


def _knob_bounds(
    prefetch: PrefetchOptions, is_local: bool, cores: int, max_batches: int
) -> tuple[PipelineKnobs, PipelineKnobs]:
    """Return the smallest and the largest allowed knobs; both are the value of an option that is set."""
    lower = PipelineKnobs(
        workers=1,
        concurrent_requests=0 if is_local else 4,
        batches=2,
        use_processes=prefetch.worker_type == "processes",
    )
    upper = PipelineKnobs(
        workers=4 * cores if is_local else cores,
        concurrent_requests=0 if is_local else MAX_REQUESTS,
        batches=min(MAX_BATCHES, max_batches),
        use_processes=prefetch.worker_type != "threads",
    )
    options = (prefetch.workers, 0 if is_local else prefetch.concurrent_requests, prefetch.batches, 0)
    lower_values = [value or low for value, low in zip(options, lower.as_tuple())]
    upper_values = [value or high for value, high in zip(options, upper.as_tuple())]
    return PipelineKnobs(*lower_values), PipelineKnobs(*upper_values)
