"""Images that are fetched and decoded ahead of the step that takes them.

    pipeline = Pipeline(images, plan)      # plan: which images each batch holds, without end
    pixels = pipeline.take()               # [N, R, R, C] uint8, in the order of the plan whatever comes first

Threads, since decoders release the interpreter's lock while they decode and hand over memory for nothing. Where images
are so small that they wait for this lock more than they decode, each of them has a process, which decodes into memory
that both see (`decoder`). Near images are read by whoever decodes them. Far
ones are fetched one by one, many at once, and decoded in chunks as soon as these are complete.

Memory: the pixels of batches that were begun and not yet taken, and encoded images that wait to be decoded, stay below
`Feed.memory_gb`; beside it every decoder has one image at its full size, and a megabyte of near records.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from paragan.core.errors import RunError, UsageError
from paragan.core.schema import config_class
from paragan.data.loader.autotune import WINDOW_S, PipelineKnobs, TunerState, WindowStats, tune, workers_to_saturate
from paragan.data.loader.decode_worker import DecodeCost, DecodeWorker, EncodedSample, decode_batch, mirror
from paragan.data.loader.memory_budget import CHUNK_IMAGES, MemoryBudget
from paragan.data.loader.shared_memory import SPARE_BLOCKS, MemoryBlock, SharedArena
from paragan.data.source import DecodeError
from paragan.data.storage.local import LocalFileSystem
from paragan.data.streaming import StreamingImages

Count = Annotated[int, Field(ge=0)]
LOCAL_CHUNK_IMAGES = 64  # near images that are decoded together, where they fit STRETCH
CHUNK_BYTES = 2**20  # bytes of pixels of such a chunk; of near records that are read before they are decoded
MAX_REQUESTS = 128
MAX_BATCHES = 1024
STALL_TIMEOUT_S = 600.0  # without a single image: then something below has hung


@config_class
class PrefetchOptions:
    """How images that are not held in memory are read ahead. 0: found while training runs.

    workers : threads that decode;  fetches : requests at once, far away;  depth : batches ahead
    decoders : whether these threads decode by themselves, or have a process each; auto: processes where the step waits
        for images so small that threads mostly wait for each other
    memory_gb : what all that is ahead may take, on every rank
    """

    workers: Count = 0
    concurrent_requests: Count = 0
    batches: Count = 0
    worker_type: Literal["auto", "threads", "processes"] = "auto"
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True)
class BatchIndices:
    """What one batch holds. index : [N] of the images;  flip : [N] which of them are mirrored, or None"""

    index: np.ndarray
    flip: np.ndarray | None = None


@dataclass(eq=False)
class _PendingBatch:
    """A batch under way. left : images that are not in `out` yet;  missing : of each chunk, those not fetched yet
    error : what became of it, where it cannot be made"""

    number: int
    selection: BatchIndices
    block: MemoryBlock  # [N, R, R, C] uint8
    remaining: int
    records: list[EncodedSample | None] = field(default_factory=list)
    unfetched: list[int] = field(default_factory=list)
    error: Exception | None = None

    @property
    def out(self) -> np.ndarray:
        return self.block.array


class _WindowRecorder:
    """What happened since the last window. Its owner holds a lock."""

    def __init__(self) -> None:
        self.start_s, self.wait_s, self.images, self.batches = time.perf_counter(), 0.0, 0, 0
        self.fetch_latencies_s: list[float] = []
        self.decode_s, self.decoded_images = 0.0, 0

    def to_stats(self, ready: int) -> WindowStats:
        middle, high = np.quantile(self.fetch_latencies_s, (0.5, 0.9)) if self.fetch_latencies_s else (0.0, 0.0)
        seconds = max(time.perf_counter() - self.start_s, 1e-6)
        decode_s = self.decode_s / max(self.decoded_images, 1)
        return WindowStats(
            seconds, min(self.wait_s, seconds), self.images, self.batches, float(middle), float(high), decode_s, ready
        )


class PrefetchPipeline:
    """Batches of a plan, in its order, made ahead by threads whose number follows what is seen (`tuner`).

    pinned : into memory that a CUDA device copies from by itself
    """

    def __init__(
        self,
        images: StreamingImages,
        batch_sampler: Iterator[BatchIndices],
        prefetch: PrefetchOptions | None = None,
        *,
        pinned: bool = False,
        cores: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ):
        prefetch = prefetch or PrefetchOptions()
        self.images, self.batch_sampler = images, batch_sampler
        self.is_local, self.memory_budget = images.source.is_local, MemoryBudget(int(prefetch.memory_gb * 2**30))
        self._seekable_source, self._is_encoded = images.seekable_source, False  # packed: records are encoded images
        small = self.is_local and LOCAL_CHUNK_IMAGES * images.resolution**2 * images.channels <= CHUNK_BYTES
        self._chunk_images = LOCAL_CHUNK_IMAGES if small else CHUNK_IMAGES
        self._next_selection = next(batch_sampler)
        need = (SPARE_BLOCKS + 3) * self._batch_bytes(self._next_selection)  # two ahead, one that the step has
        if need > self.memory_budget.limit_bytes:
            raise UsageError(
                f"data.prefetch.memory_gb={prefetch.memory_gb:g} does not hold two batches ahead: use "
                f"{math.ceil(need / 2**30 * 1000) / 1000:g} or more"
            )
        self._cores = cores = cores or max(1, len(os.sched_getaffinity(0)))
        self._min_knobs, self._max_knobs = _knob_bounds(
            prefetch,
            self.is_local,
            cores,
            self.memory_budget.limit_bytes // self._batch_bytes(self._next_selection) - SPARE_BLOCKS - 1,
        )
        start = PipelineKnobs(max(1, cores // 2), 0 if self.is_local else 16, 4)
        self.tuner_state = TunerState(start.clamp(self._max_knobs, self._min_knobs))
        self._decode_queue: queue.PriorityQueue[tuple[int, int, _PendingBatch | None]] = queue.PriorityQueue()
        self._fetch_queue: queue.SimpleQueue[tuple[_PendingBatch, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._batch_done, self._memory_freed = threading.Condition(self._lock), threading.Condition(self._lock)
        self._pending = deque[_PendingBatch]()
        self._arena = SharedArena(pinned=pinned)
        self._lent_block: MemoryBlock | None = None
        self._next_number, self._closed, self._waiting_since = (
            0,
            False,
            math.inf,
        )  # since when the step waits for its batch
        self._stall_timeout_s = stall_timeout_s
        self._last_progress = time.monotonic()
        self._running, self._stop_counter = PipelineKnobs(0, 0, 0), itertools.count()
        self.window_recorder, self.last_window = _WindowRecorder(), WindowStats(0, 0, 0, 0, 0, 0, 0, 0)
        self.decision_log: list[str] = []
        self.num_decisions, self.start_time = 0, time.monotonic()
        self._start_batches()

    # The step's side ---------------------------------------------------------------------------------------

    def next_batch(self) -> np.ndarray:
        """The next batch, [N, R, R, C] uint8, which is the caller's until the next call. Raises what went wrong."""
        lent, self._lent_block = self._lent_block, None
        if lent is not None:
            self._arena.release(lent)
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
        """Wait until `take` need not, so long at most; whether it is so."""
        batch, start = self._pending[0], time.perf_counter()
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
                if (
                    batch.remaining
                    and time.monotonic() - max(self._last_progress, self._waiting_since) > self._stall_timeout_s
                ):
                    raise RunError(
                        f"data: nothing came of {self.images.source.location} within {self._stall_timeout_s:g} s"
                    )
        return not batch.remaining or batch.error is not None

    def stats(self) -> dict[str, float]:
        """What a line of stats says of it."""
        hands, last = self.tuner_state.knobs, self.last_window
        return {
            "Data/workers": float(hands.workers),
            "Data/processes": float(hands.workers * hands.use_processes),
            "Data/depth": float(hands.batches),
            "Data/fetches": float(hands.concurrent_requests),
            "Data/ready": float(self._num_ready()),
            "Data/ahead_mb": self.memory_budget.used_bytes / 2**20,
            "Data/fetch_ms": 1000 * last.fetch_s,
            "Data/fetch_high_ms": 1000 * last.fetch_p90_s,
            "Data/quiet_ms": 1000 * self.tuner_state.baseline_latency_s,
            "Data/decode_ms": 1000 * last.decode_s,
            "Data/congested": float(self.tuner_state.congested),
            "Data/changes": float(self.num_decisions),
            "Data/bad": float(len(self.images.bad_samples.reasons)),
        }

    def pop_decisions(self) -> list[str]:
        """What the tuner changed since this was last asked for, a line each."""
        changes, self.decision_log = self.decision_log, []
        return changes

    def close(self) -> None:
        """Send the threads away. One that waits for a far place ends when its request does."""
        self._closed = True
        self._resize_threads(PipelineKnobs(0, 0, 0))

    def num_consecutive_ready(self) -> int:
        """How many of the next batches are complete."""
        return sum(
            1 for _ in itertools.takewhile(lambda batch: not batch.remaining and not batch.error, tuple(self._pending))
        )

    @property
    def is_ready(self) -> bool:
        """Whether `take` would not wait."""
        return not self._pending[0].remaining

    # Planning: on the step's thread -------------------------------------------------------------------------

    def _batch_bytes(self, selection: BatchIndices) -> int:
        return len(selection.index) * self.images.resolution**2 * self.images.channels

    def _start_batches(self) -> None:
        """Begin as many batches as depth and memory allow."""
        self._resize_threads(self.tuner_state.knobs)
        while not self._pending or (
            len(self._pending) < self.tuner_state.knobs.batches and self._can_start_batch(self._next_selection)
        ):
            order, self._next_selection = self._next_selection, next(self.batch_sampler)
            batch = _PendingBatch(
                self._next_number,
                order,
                self._arena.allocate((len(order.index), *self.images.shape[1:])),
                len(order.index),
            )
            self._next_number += 1
            self._pending.append(batch)
            with self._lock:
                self.memory_budget.on_batch_started(batch.out.nbytes, 0 if self.is_local else batch.remaining)
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
        """As many threads as asked for: new ones, or word to some to leave."""
        for count, have, work, dismiss in (
            (
                knobs.workers,
                self._running.workers,
                self._decode_loop,
                lambda: self._decode_queue.put((-1, next(self._stop_counter), None)),
            ),
            (
                knobs.concurrent_requests,
                self._running.concurrent_requests,
                self._fetch_loop,
                lambda: self._fetch_queue.put(None),
            ),
        ):
            for _ in range(have, count):
                threading.Thread(target=work, name="paragan data", daemon=True).start()
            for _ in range(count, have):
                dismiss()
        self._running = knobs

    def _num_ready(self) -> int:
        return sum(not batch.remaining for batch in tuple(self._pending))

    def _is_window_over(self) -> bool:
        return time.perf_counter() - self.window_recorder.start_s >= WINDOW_S

    def _tune(self) -> None:
        """One decision; the lock is held. Threads are told at the next batch, or at once where none is ready."""
        self.last_window = self.window_recorder.to_stats(self._num_ready())
        self.window_recorder = _WindowRecorder()
        before = self.tuner_state.knobs
        most = (
            self._max_knobs
            if self._is_encoded
            else replace(self._max_knobs, use_processes=self._min_knobs.use_processes)
        )
        if len(self._pending) + 1 < before.batches:  # there is no room for as many
            most = replace(most, batches=min(most.batches, before.batches))
        if self.is_local:
            busy = (
                workers_to_saturate(self._cores, self.last_window) + before.use_processes
            )  # one more, while others are on their way
            most = replace(most, workers=min(most.workers, max(self._min_knobs.workers, busy)))
        self.tuner_state = tune(self.tuner_state, self.last_window, most, self._min_knobs)
        if self.tuner_state.reason:
            self.decision_log.append(self._format_decision(before))
            self.num_decisions += 1
        self._resize_threads(self.tuner_state.knobs)

    def _format_decision(self, before: PipelineKnobs) -> str:
        pairs = zip(("workers", "fetches", "depth", "processes"), before.as_tuple(), self.tuner_state.knobs.as_tuple())
        moved = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
        last, waited = self.last_window, self.last_window.wait_s / self.last_window.duration_s
        latency = f"fetch {1000 * last.fetch_s:.3g} ms (quiet {1000 * self.tuner_state.baseline_latency_s:.3g}), waited {waited:.0%}"
        return f"{time.monotonic() - self.start_time:.1f} s, {self.tuner_state.reason}: {moved}; {latency}"

    # The threads' side --------------------------------------------------------------------------------------

    def _fetch_loop(self) -> None:
        while (wanted := self._next_request()) and not self._closed:
            batch, row = wanted
            start = time.perf_counter()
            try:
                got: EncodedSample = self.images.read_record(int(batch.selection.index[row]))
            except DecodeError as error:
                got = error
            except Exception as error:  # whatever it is, the step has to hear of it
                with self._lock:
                    self.memory_budget.in_flight -= 1
                self._fail(batch, error)
                continue
            took, size = time.perf_counter() - start, _encoded_bytes(got)
            batch.records[row] = got
            at = row // self._chunk_images
            with self._lock:
                self.window_recorder.fetch_latencies_s.append(took)
                self.memory_budget.on_received(size)
                self._memory_freed.notify()
                self._last_progress = time.monotonic()
                batch.unfetched[at] -= 1
                complete = not batch.unfetched[at]
                self.memory_budget.undecoded_chunks += complete
            if complete:
                self._decode_queue.put((batch.number, at * self._chunk_images, batch))

    def _next_request(self) -> tuple[_PendingBatch, int] | None:
        """What to fetch next, once there is room for it; None: go."""
        with self._memory_freed:
            while not self._closed and not self.memory_budget.can_request():
                self._memory_freed.wait(WINDOW_S)
            self.memory_budget.in_flight += 1
        if (wanted := self._fetch_queue.get()) is None:
            with self._memory_freed:
                self.memory_budget.in_flight -= 1
                self._memory_freed.notify()
        return wanted

    def _decode_loop(self) -> None:
        here = self._seekable_source.fs if self._seekable_source else None
        with DecodeWorker(self._arena, here.root if isinstance(here, LocalFileSystem) else None) as decoder:
            while not self._closed:
                _, start, batch = self._decode_queue.get()
                if batch is None:
                    return
                rows = range(start, min(start + self._chunk_images, len(batch.out)))
                try:
                    spent, size = self._decode_chunk(
                        batch, rows, decoder if self.tuner_state.knobs.use_processes else None
                    )
                except Exception as error:
                    with self._lock:
                        self.memory_budget.undecoded_chunks -= not self.is_local
                    self._fail(batch, error)
                    continue
                with self._batch_done:
                    self.window_recorder.decode_s += spent.cpu_s
                    self.window_recorder.decoded_images += len(rows)
                    self.window_recorder.fetch_latencies_s += spent.read_s
                    self.memory_budget.encoded_bytes -= size
                    self._last_progress = time.monotonic()
                    batch.remaining -= len(rows)
                    self.memory_budget.undecoded_chunks -= not self.is_local
                    self._memory_freed.notify_all()
                    if not batch.remaining:
                        self._batch_done.notify_all()

    def _decode_chunk(self, batch: _PendingBatch, rows: range, decoder: DecodeWorker | None) -> tuple[DecodeCost, int]:
        """Images of a batch to their places; what they took, and the bytes that far ones were encoded in."""
        all_of, size = DecodeCost(), 0
        for some, gots in self._split_chunk(batch, rows, decoder, all_of.read_s):
            size += 0 if self.is_local else sum(map(_encoded_bytes, gots))
            where, mirrored = slice(some.start, some.stop), batch.selection.flip
            flips = [False] * len(some) if mirrored is None else mirrored[where].tolist()
            out = batch.out[where]
            reasons, spent = (
                decoder.decode(gots, flips, batch.block, some.start) if decoder else decode_batch(gots, flips, out)
            )
            for at, reason in enumerate(reasons):
                if reason is not None:
                    self.images.substitute(int(batch.selection.index[some[at]]), reason, out[at])
                    if flips[at]:
                        mirror(out[at])
            all_of.cpu_s += spent.cpu_s
            all_of.read_s += spent.read_s
        return all_of, size

    def _split_chunk(
        self, batch: _PendingBatch, rows: range, decoder: DecodeWorker | None, read_s: list[float]
    ) -> Iterator[tuple[range, list[EncodedSample]]]:
        """What there is of a chunk's images. A process reads what lies in files as it is by itself. Other near ones are
        read here, a megabyte at a stretch: reading and decoding in turns would have threads wait for each other twice
        as often."""
        if decoder and self._seekable_source:
            yield (
                rows,
                [
                    *self._seekable_source.byte_ranges(
                        self.images.source_index(batch.selection.index[rows.start : rows.stop])
                    )
                ],
            )
            return
        gots, size, first = [], 0, rows.start
        for row in rows:
            gots.append(self._read_sample(batch, row, read_s))
            size += _encoded_bytes(gots[-1])
            if size >= CHUNK_BYTES or row == rows[-1]:
                yield range(first, row + 1), gots
                gots, size, first = [], 0, row + 1

    def _read_sample(self, batch: _PendingBatch, row: int, read_s: list[float]) -> EncodedSample:
        if not self.is_local:
            got, batch.records[row] = batch.records[row], None
            assert got is not None
            return got
        start = time.perf_counter()
        try:
            got = self.images.read_record(int(batch.selection.index[row]))
        except DecodeError as error:
            got = error
        read_s.append(time.perf_counter() - start)
        self._is_encoded = isinstance(got, bytes)
        return got

    def _fail(self, batch: _PendingBatch, error: Exception) -> None:
        if type(error) is RunError:
            error = RunError(f"{error}; the same command goes on from the last checkpoint")
        with self._batch_done:
            batch.error = batch.error or error
            self._batch_done.notify_all()


def _encoded_bytes(sample: EncodedSample | None) -> int:
    return len(sample) if isinstance(sample, bytes) else sample.nbytes if isinstance(sample, np.ndarray) else 0


def _knob_bounds(
    prefetch: PrefetchOptions, is_local: bool, cores: int, max_batches: int
) -> tuple[PipelineKnobs, PipelineKnobs]:
    """The fewest and the most hands there may be."""
    depth, apart = min(MAX_BATCHES, max_batches), prefetch.worker_type != "threads"
    most = PipelineKnobs(4 * cores if is_local else cores, 0 if is_local else MAX_REQUESTS, depth, apart)
    least = PipelineKnobs(1, 0 if is_local else 4, 2, prefetch.worker_type == "processes")
    given = (prefetch.workers, 0 if is_local else prefetch.concurrent_requests, prefetch.batches, 0)
    pick = [(value or low, value or high) for value, low, high in zip(given, least.as_tuple(), most.as_tuple())]
    return PipelineKnobs(*(low for low, _ in pick)), PipelineKnobs(*(high for _, high in pick))
