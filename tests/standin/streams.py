"""Streams and events of the stand-in accelerator, with the interface of `torch.cuda`.

Kernels run when they are queued, but each stream remembers how far the others have come that it has waited for. An
operation that uses what another stream wrote, or overwrites what another stream reads, without having waited for it, is
an error. An asynchronous copy arrives as late as a card may deliver it: until then its destination holds garbage, and
what is written to its source is what arrives.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from standin import memory, syncs

Clock = dict[int, int]  # by stream: how many of its operations are known to be complete


class Stream:
    """A queue of operations."""

    def __init__(self, device: object = None, priority: int = 0):
        self.number = next(_numbers)
        self.clock: Clock = {}
        self.launched = 0
        _streams.append(self)

    def launch(self) -> int:
        """Count an operation. Returns its number in this stream."""
        self.launched += 1
        self.clock[self.number] = self.launched
        _join(self.clock, _host_clock)
        return self.launched

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        _join(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _wait(self.clock, "stream.synchronize")


class Event:
    """A moment of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self.clock: Clock = {}
        self.time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current_stream()).clock)
        self.time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait(self.clock, "event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time_s - self.time_s)


@dataclass
class _PendingCopy:
    stream: int
    number: int  # of the operation in its stream
    to_host: bool
    deliver: Callable[[], object]


@dataclass
class _Use:
    """The last operations of all streams on one storage."""

    writer: tuple[int, int] | None  # stream, number of the operation
    readers: Clock


_numbers = itertools.count()
_streams: list[Stream] = []
_host_clock: Clock = {}
_pending: list[_PendingCopy] = []
_uses: dict[int, _Use] = defaultdict(lambda: _Use(None, {}))  # by the address of the storage
_default = Stream()
_of_threads: dict[int, Stream] = {}


def current_stream(device: object = None) -> Stream:
    """Return the stream of this thread; threads of autograd use that of the main thread."""
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        thread = threading.main_thread()
    return _of_threads.get(thread.ident or 0, _default)


@contextlib.contextmanager
def stream(chosen: Stream) -> Generator[None]:
    """Use a stream in this thread inside the context."""
    thread, before = threading.get_ident(), current_stream()
    _of_threads[thread] = chosen
    try:
        yield
    finally:
        _of_threads[thread] = before


def synchronize(device: object = None) -> None:
    """Wait for all streams."""
    clock: Clock = {}
    for each in _streams:
        _join(clock, each.clock)
    _wait(clock, "synchronize")


def host_waits() -> None:
    """Let the host wait for the current stream, because of an operation that is recorded elsewhere."""
    _join(_host_clock, current_stream().clock)
    _deliver(_host_clock, to_host=True)


def on_allocation(x: Tensor) -> None:
    """Forget what was done with the memory of a new storage when it was another one."""
    if _uses:
        _uses.pop(x.untyped_storage().data_ptr(), None)


def before_kernel(reads: Sequence[Tensor], writes: Sequence[Tensor], name: str) -> None:
    """Queue an operation on the current stream.

    Raises:
        RuntimeError: it needs something that another stream may not have finished.
    """
    current = current_stream()
    number = current.launch()
    _deliver(current.clock, to_host=False)
    for x in (*reads, *writes):
        use = _uses[x.untyped_storage().data_ptr()]
        if use.writer and current.clock.get(use.writer[0], 0) < use.writer[1]:
            raise RuntimeError(f"{name} uses what stream {use.writer[0]} writes, and stream {current.number} has not "
                               "waited for it")  # fmt: skip
        use.readers[current.number] = number
    for x in writes:
        use = _uses[x.untyped_storage().data_ptr()]
        if any(current.clock.get(reader, 0) < read for reader, read in use.readers.items()):
            raise RuntimeError(f"{name} overwrites what another stream reads, and stream {current.number} has not "
                               "waited for it")  # fmt: skip
        use.writer = current.number, number


def copy_to_host(destination: Tensor, source: Tensor, source_alias: Tensor, is_asynchronous: bool) -> None:
    """Copy a tensor of the device to one of the host.

    Args:
        destination: of the host.
        source: of the device.
        source_alias: the same memory as a tensor of the host.
        is_asynchronous: whether the host does not wait.
    """
    before_kernel(reads=[source], writes=[], name="copy to the host")
    if not is_asynchronous:
        destination.copy_(source_alias)
        host_waits()
        return
    value = source_alias.clone()  # a later operation of this stream may overwrite it
    fill_with_garbage(destination)
    current = current_stream()
    _pending.append(_PendingCopy(current.number, current.launched, True, lambda: destination.copy_(value)))


def copy_to_device(destination: Tensor, destination_alias: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy a tensor of the host to one of the device; asynchronously if it is pinned."""
    before_kernel(reads=[], writes=[destination], name="copy to the device")
    if non_blocking and memory.is_pinned(source):
        fill_with_garbage(destination_alias)
        current = current_stream()
        _pending.append(_PendingCopy(current.number, current.launched, False, lambda: destination_alias.copy_(source)))
        return
    destination_alias.copy_(source)
    if not non_blocking:
        host_waits()


def _wait(clock: Clock, name: str) -> None:
    if any(_host_clock.get(number, 0) < count for number, count in clock.items()):  # the host has to wait
        syncs.record(name)
    _join(_host_clock, clock)
    _deliver(_host_clock, to_host=True)
    _deliver(_host_clock, to_host=False)


def _deliver(clock: Clock, to_host: bool) -> None:
    """Complete the copies that are known to have arrived."""
    if not _pending:
        return
    for copy in list(_pending):
        if copy.to_host == to_host and copy.number <= clock.get(copy.stream, 0):
            copy.deliver()
            _pending.remove(copy)


def fill_with_garbage(x: Tensor) -> None:
    """Overwrite a tensor of the host with numbers that show."""
    x.fill_(torch.nan if x.is_floating_point() else 85)


def _join(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        clock[number] = max(clock.get(number, 0), count)
