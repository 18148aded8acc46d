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

from paragan.core.errors import Failed, Unusable
from paragan.core.schema import record
from paragan.data.loader.autotune import WINDOW_S, Hands, Tuning, Window, readers, tune
from paragan.data.loader.decode_worker import Decoder, Got, Spent, decoded, mirror
from paragan.data.loader.memory_budget import CHUNK, Room
from paragan.data.loader.shared_memory import SPARE, Piece, Shared
from paragan.data.source import DecodeError
from paragan.data.storage.local import Here
from paragan.data.streaming import Streamed

Count = Annotated[int, Field(ge=0)]
SMALL_CHUNK = 64  # near images that are decoded together, where they fit STRETCH
STRETCH = 2**20  # bytes of pixels of such a chunk; of near records that are read before they are decoded
MOST_FETCHES = 128
DEEPEST = 1024
STALLED_S = 600.0  # without a single image: then something below has hung


@record
class Feed:
    """How images that are not held in memory are read ahead. 0: found while training runs.

    workers : threads that decode;  fetches : requests at once, far away;  depth : batches ahead
    decoders : whether these threads decode by themselves, or have a process each; auto: processes where the step waits
        for images so small that threads mostly wait for each other
    memory_gb : what all that is ahead may take, on every rank
    """

    workers: Count = 0
    fetches: Count = 0
    depth: Count = 0
    decoders: Literal["auto", "threads", "processes"] = "auto"
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True)
class Order:
    """What one batch holds. index : [N] of the images;  flip : [N] which of them are mirrored, or None"""

    index: np.ndarray
    flip: np.ndarray | None = None


@dataclass(eq=False)
class _Batch:
    """A batch under way. left : images that are not in `out` yet;  missing : of each chunk, those not fetched yet
    error : what became of it, where it cannot be made"""

    number: int
    order: Order
    piece: Piece  # [N, R, R, C] uint8
    left: int
    records: list[Got | None] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    error: Exception | None = None

    @property
    def out(self) -> np.ndarray:
        return self.piece.array


class _Watch:
    """What happened since the last window. Its owner holds a lock."""

    def __init__(self) -> None:
        self.began, self.wait_s, self.taken, self.batches = time.perf_counter(), 0.0, 0, 0
        self.fetches: list[float] = []
        self.decode_s, self.decoded = 0.0, 0

    def window(self, ready: int) -> Window:
        middle, high = np.quantile(self.fetches, (0.5, 0.9)) if self.fetches else (0.0, 0.0)
        seconds = max(time.perf_counter() - self.began, 1e-6)
        decode_s = self.decode_s / max(self.decoded, 1)
        return Window(
            seconds, min(self.wait_s, seconds), self.taken, self.batches, float(middle), float(high), decode_s, ready
        )


class Pipeline:
    """Batches of a plan, in its order, made ahead by threads whose number follows what is seen (`tuner`).

    pinned : into memory that a CUDA device copies from by itself
    """

    def __init__(
        self,
        images: Streamed,
        plan: Iterator[Order],
        feed: Feed | None = None,
        *,
        pinned: bool = False,
        cores: int | None = None,
        stalled_s: float = STALLED_S,
    ):
        feed = feed or Feed()
        self.images, self.plan = images, plan
        self.near, self.room = images.source.near, Room(int(feed.memory_gb * 2**30))
        self._plain, self._packed = images.plain, False  # packed: records are encoded images
        small = self.near and SMALL_CHUNK * images.resolution**2 * images.channels <= STRETCH
        self._together = SMALL_CHUNK if small else CHUNK
        self._next = next(plan)
        need = (SPARE + 3) * self._pixels(self._next)  # two ahead, one that the step has
        if need > self.room.cap:
            raise Unusable(
                f"data.feed.memory_gb={feed.memory_gb:g} does not hold two batches ahead: use "
                f"{math.ceil(need / 2**30 * 1000) / 1000:g} or more"
            )
        self._cores = cores = cores or max(1, len(os.sched_getaffinity(0)))
        self._least, self._most = _bounds(feed, self.near, cores, self.room.cap // self._pixels(self._next) - SPARE - 1)
        start = Hands(max(1, cores // 2), 0 if self.near else 16, 4)
        self.tuning = Tuning(start.within(self._most, self._least))
        self._chunks: queue.PriorityQueue[tuple[int, int, _Batch | None]] = queue.PriorityQueue()
        self._wanted: queue.SimpleQueue[tuple[_Batch, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done, self._freed = threading.Condition(self._lock), threading.Condition(self._lock)
        self._ahead = deque[_Batch]()
        self._shared = Shared(pinned=pinned)
        self._lent: Piece | None = None
        self._numbers, self._closed, self._asked = 0, False, math.inf  # since when the step waits for its batch
        self._stalled_s = stalled_s
        self._moved = time.monotonic()
        self._threads, self._dismissed = Hands(0, 0, 0), itertools.count()
        self.watch, self.last = _Watch(), Window(0, 0, 0, 0, 0, 0, 0, 0)
        self.changes: list[str] = []
        self.changed, self.opened = 0, time.monotonic()
        self._begin()

    # The step's side ---------------------------------------------------------------------------------------

    def take(self) -> np.ndarray:
        """The next batch, [N, R, R, C] uint8, which is the caller's until the next call. Raises what went wrong."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._shared.release(lent)
        self.wait()
        batch = self._ahead[0]
        with self._done:
            self._asked = math.inf
            if batch.error:
                raise batch.error
            self.watch.taken += len(batch.out)
            self.watch.batches += 1
            self._ahead.popleft()
            self.room.pixels -= batch.out.nbytes
            if self._due():
                self._tune()
        self._begin()
        self._lent = batch.piece
        return batch.out

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until `take` need not, so long at most; whether it is so."""
        batch, start = self._ahead[0], time.perf_counter()
        end = start + timeout_s
        with self._done:
            self._asked = min(self._asked, time.monotonic())
            while batch.left and not batch.error and start < end:
                self._done.wait(min(WINDOW_S, end - start))
                now = time.perf_counter()
                self.watch.wait_s += now - start
                start = now
                if batch.left and self._due():
                    self._tune()
                if batch.left and time.monotonic() - max(self._moved, self._asked) > self._stalled_s:
                    raise Failed(f"data: nothing came of {self.images.source.where} within {self._stalled_s:g} s")
        return not batch.left or batch.error is not None

    def told(self) -> dict[str, float]:
        """What a line of stats says of it."""
        hands, last = self.tuning.hands, self.last
        return {
            "Data/workers": float(hands.workers),
            "Data/processes": float(hands.workers * hands.apart),
            "Data/depth": float(hands.depth),
            "Data/fetches": float(hands.fetches),
            "Data/ready": float(self._ready()),
            "Data/ahead_mb": self.room.ahead / 2**20,
            "Data/fetch_ms": 1000 * last.fetch_s,
            "Data/fetch_high_ms": 1000 * last.high_s,
            "Data/quiet_ms": 1000 * self.tuning.quiet_s,
            "Data/decode_ms": 1000 * last.decode_s,
            "Data/congested": float(self.tuning.congested),
            "Data/changes": float(self.changed),
            "Data/bad": float(len(self.images.bad.reasons)),
        }

    def decisions(self) -> list[str]:
        """What the tuner changed since this was last asked for, a line each."""
        changes, self.changes = self.changes, []
        return changes

    def close(self) -> None:
        """Send the threads away. One that waits for a far place ends when its request does."""
        self._closed = True
        self._man(Hands(0, 0, 0))

    def complete(self) -> int:
        """How many of the next batches are complete."""
        return sum(1 for _ in itertools.takewhile(lambda batch: not batch.left and not batch.error, tuple(self._ahead)))

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return not self._ahead[0].left

    # Planning: on the step's thread -------------------------------------------------------------------------

    def _pixels(self, order: Order) -> int:
        return len(order.index) * self.images.resolution**2 * self.images.channels

    def _begin(self) -> None:
        """Begin as many batches as depth and memory allow."""
        self._man(self.tuning.hands)
        while not self._ahead or (len(self._ahead) < self.tuning.hands.depth and self._fits(self._next)):
            order, self._next = self._next, next(self.plan)
            batch = _Batch(
                self._numbers, order, self._shared.piece((len(order.index), *self.images.shape[1:])), len(order.index)
            )
            self._numbers += 1
            self._ahead.append(batch)
            with self._lock:
                self.room.begin(batch.out.nbytes, 0 if self.near else batch.left)
            self._deal(batch)

    def _fits(self, order: Order) -> bool:
        with self._lock:
            return self.room.fits(len(order.index), self._pixels(order))

    def _deal(self, batch: _Batch) -> None:
        starts = range(0, batch.left, self._together)
        if self.near:
            for start in starts:
                self._chunks.put((batch.number, start, batch))
            return
        batch.records = [None] * batch.left
        batch.missing = [min(self._together, batch.left - start) for start in starts]
        for row in range(batch.left):
            self._wanted.put((batch, row))

    def _man(self, hands: Hands) -> None:
        """As many threads as asked for: new ones, or word to some to leave."""
        for count, have, work, dismiss in (
            (
                hands.workers,
                self._threads.workers,
                self._decode,
                lambda: self._chunks.put((-1, next(self._dismissed), None)),
            ),
            (hands.fetches, self._threads.fetches, self._fetch, lambda: self._wanted.put(None)),
        ):
            for _ in range(have, count):
                threading.Thread(target=work, name="paragan data", daemon=True).start()
            for _ in range(count, have):
                dismiss()
        self._threads = hands

    def _ready(self) -> int:
        return sum(not batch.left for batch in tuple(self._ahead))

    def _due(self) -> bool:
        return time.perf_counter() - self.watch.began >= WINDOW_S

    def _tune(self) -> None:
        """One decision; the lock is held. Threads are told at the next batch, or at once where none is ready."""
        self.last = self.watch.window(self._ready())
        self.watch = _Watch()
        before = self.tuning.hands
        most = self._most if self._packed else replace(self._most, apart=self._least.apart)
        if len(self._ahead) + 1 < before.depth:  # there is no room for as many
            most = replace(most, depth=min(most.depth, before.depth))
        if self.near:
            busy = readers(self._cores, self.last) + before.apart  # one more, while others are on their way
            most = replace(most, workers=min(most.workers, max(self._least.workers, busy)))
        self.tuning = tune(self.tuning, self.last, most, self._least)
        if self.tuning.why:
            self.changes.append(self._change(before))
            self.changed += 1
        self._man(self.tuning.hands)

    def _change(self, before: Hands) -> str:
        pairs = zip(("workers", "fetches", "depth", "processes"), before.values(), self.tuning.hands.values())
        moved = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
        last, waited = self.last, self.last.wait_s / self.last.seconds
        latency = f"fetch {1000 * last.fetch_s:.3g} ms (quiet {1000 * self.tuning.quiet_s:.3g}), waited {waited:.0%}"
        return f"{time.monotonic() - self.opened:.1f} s, {self.tuning.why}: {moved}; {latency}"

    # The threads' side --------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        while (wanted := self._await_room()) and not self._closed:
            batch, row = wanted
            start = time.perf_counter()
            try:
                got: Got = self.images.fetch(int(batch.order.index[row]))
            except DecodeError as error:
                got = error
            except Exception as error:  # whatever it is, the step has to hear of it
                with self._lock:
                    self.room.under_way -= 1
                self._fail(batch, error)
                continue
            took, size = time.perf_counter() - start, _size(got)
            batch.records[row] = got
            at = row // self._together
            with self._lock:
                self.watch.fetches.append(took)
                self.room.came(size)
                self._freed.notify()
                self._moved = time.monotonic()
                batch.missing[at] -= 1
                complete = not batch.missing[at]
                self.room.undecoded += complete
            if complete:
                self._chunks.put((batch.number, at * self._together, batch))

    def _await_room(self) -> tuple[_Batch, int] | None:
        """What to fetch next, once there is room for it; None: go."""
        with self._freed:
            while not self._closed and not self.room.may_ask():
                self._freed.wait(WINDOW_S)
            self.room.under_way += 1
        if (wanted := self._wanted.get()) is None:
            with self._freed:
                self.room.under_way -= 1
                self._freed.notify()
        return wanted

    def _decode(self) -> None:
        here = self._plain.place if self._plain else None
        with Decoder(self._shared, here.path if isinstance(here, Here) else None) as decoder:
            while not self._closed:
                _, start, batch = self._chunks.get()
                if batch is None:
                    return
                rows = range(start, min(start + self._together, len(batch.out)))
                try:
                    spent, size = self._chunk(batch, rows, decoder if self.tuning.hands.apart else None)
                except Exception as error:
                    with self._lock:
                        self.room.undecoded -= not self.near
                    self._fail(batch, error)
                    continue
                with self._done:
                    self.watch.decode_s += spent.cpu_s
                    self.watch.decoded += len(rows)
                    self.watch.fetches += spent.read_s
                    self.room.encoded -= size
                    self._moved = time.monotonic()
                    batch.left -= len(rows)
                    self.room.undecoded -= not self.near
                    self._freed.notify_all()
                    if not batch.left:
                        self._done.notify_all()

    def _chunk(self, batch: _Batch, rows: range, decoder: Decoder | None) -> tuple[Spent, int]:
        """Images of a batch to their places; what they took, and the bytes that far ones were encoded in."""
        all_of, size = Spent(), 0
        for some, gots in self._stretches(batch, rows, decoder, all_of.read_s):
            size += 0 if self.near else sum(map(_size, gots))
            where, mirrored = slice(some.start, some.stop), batch.order.flip
            flips = [False] * len(some) if mirrored is None else mirrored[where].tolist()
            out = batch.out[where]
            reasons, spent = (
                decoder.decode(gots, flips, batch.piece, some.start) if decoder else decoded(gots, flips, out)
            )
            for at, reason in enumerate(reasons):
                if reason is not None:
                    self.images.stand_in(int(batch.order.index[some[at]]), reason, out[at])
                    if flips[at]:
                        mirror(out[at])
            all_of.cpu_s += spent.cpu_s
            all_of.read_s += spent.read_s
        return all_of, size

    def _stretches(
        self, batch: _Batch, rows: range, decoder: Decoder | None, read_s: list[float]
    ) -> Iterator[tuple[range, list[Got]]]:
        """What there is of a chunk's images. A process reads what lies in files as it is by itself. Other near ones are
        read here, a megabyte at a stretch: reading and decoding in turns would have threads wait for each other twice
        as often."""
        if decoder and self._plain:
            yield rows, [*self._plain.spots(self.images.at(batch.order.index[rows.start : rows.stop]))]
            return
        gots, size, first = [], 0, rows.start
        for row in rows:
            gots.append(self._got(batch, row, read_s))
            size += _size(gots[-1])
            if size >= STRETCH or row == rows[-1]:
                yield range(first, row + 1), gots
                gots, size, first = [], 0, row + 1

    def _got(self, batch: _Batch, row: int, read_s: list[float]) -> Got:
        if not self.near:
            got, batch.records[row] = batch.records[row], None
            assert got is not None
            return got
        start = time.perf_counter()
        try:
            got = self.images.fetch(int(batch.order.index[row]))
        except DecodeError as error:
            got = error
        read_s.append(time.perf_counter() - start)
        self._packed = isinstance(got, bytes)
        return got

    def _fail(self, batch: _Batch, error: Exception) -> None:
        if type(error) is Failed:
            error = Failed(f"{error}; the same command goes on from the last checkpoint")
        with self._done:
            batch.error = batch.error or error
            self._done.notify_all()


def _size(got: Got | None) -> int:
    return len(got) if isinstance(got, bytes) else got.nbytes if isinstance(got, np.ndarray) else 0


def _bounds(feed: Feed, near: bool, cores: int, fitting: int) -> tuple[Hands, Hands]:
    """The fewest and the most hands there may be."""
    depth, apart = min(DEEPEST, fitting), feed.decoders != "threads"
    most = Hands(4 * cores if near else cores, 0 if near else MOST_FETCHES, depth, apart)
    least = Hands(1, 0 if near else 4, 2, feed.decoders == "processes")
    given = (feed.workers, 0 if near else feed.fetches, feed.depth, 0)
    pick = [(value or low, value or high) for value, low, high in zip(given, least.values(), most.values())]
    return Hands(*(low for low, _ in pick)), Hands(*(high for _, high in pick))
