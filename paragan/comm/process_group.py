"""Process groups: collectives and point-to-point messages between ranks, with every byte counted.

torch.distributed is imported here only; comm/world.py and comm/rendezvous.py use it as `c10d` of this module. Bytes are
counted by a `Meter` when a message is handed to torch, by the formulas of comm/traffic.py, which also predict them
(`Exchange.traffic`).

Gloo does not notify a rank whose message was half sent or half received when its connection closes; it would wait for
the timeout. Groups that must survive the loss of a rank therefore wait in a separate thread (`WaitThread`), which is
abandoned together with the group; collectives of all ranks look at the connections meanwhile (`_WatchedCollective`).
"""

from __future__ import annotations

import gc
import itertools
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paragan.comm.traffic import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce
from paragan.core.devices import backend_of
from paragan.core.errors import RunError

T = TypeVar("T")
c10d: Any = dist  # torch leaves most of it untyped

POLL_S = 0.02
MAX_CLEANUP_PAUSE_S = 60.0  # between attempts to destroy a process group that is still referenced
PEER_CHECK_S = 1.0  # between looks at the connections, while a collective waits


class CommunicationError(RunError):
    """An exchange failed: another rank died, hangs or aborted. The step was not applied."""


class Store(Protocol):
    """The operations of torch's key-value stores that are used here. None of them blocks: threads share the store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value. The key must exist: call `check` first."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        ...


class Work(Protocol):
    """A message or collective in flight, ours or torch's."""

    def wait(self) -> object:
        """Block until it is complete. On CUDA this orders the stream and does not block the host."""
        ...


class Group(Protocol):
    """A group of ranks. All its ranks call the same collectives in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def with_meter(self, meter: Meter) -> Group:
        """Return the same group, counting into `meter`."""
        ...

    def all_reduce_sum(self, x: Tensor) -> Work:
        """Sum x [...] over ranks, in place. Every rank gets the same bits."""
        ...

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        """Gather x [k] of every rank into [size, k], row j from rank j; into `out` if it is given."""
        ...

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        """Send row j of x [size, k] to rank j; row j of out [size, k] comes from rank j."""
        ...

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        """Send one tensor to each rank in `sends`, and receive one from each rank in `recvs`.

        The tensors in `sends` must not change until the work is complete. Both ends of a pair must post the messages of
        one tag in the same order.
        """
        ...


class _CompletedWork:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class SingleRankGroup:
    """A group of one rank: nothing is sent."""

    rank: int = 0
    size: int = 1

    def with_meter(self, meter: Meter) -> Group:
        return self

    def all_reduce_sum(self, x: Tensor) -> Work:
        return _CompletedWork()

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        return x[None].clone() if out is None else out.copy_(x[None]), _CompletedWork()

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        out.copy_(x)
        return _CompletedWork()

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        return _CompletedWork()


class PolledWork:
    """Work that a `WaitThread` waits for, so that its completion can be polled.

    meter : counts the time spent in `wait`
    """

    def __init__(self, work: Work, wait_thread: WaitThread, meter: Meter | None = None):
        self.work, self.wait_thread, self.meter = work, wait_thread, meter
        self.done = threading.Event()
        self.error: CommunicationError | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is complete. Raises CommunicationError if it failed or its group was aborted."""
        if self.error:
            raise self.error
        if self.wait_thread.cancelled and not self.done.is_set():
            raise CommunicationError("process group aborted: a peer was lost")
        return self.done.is_set()

    def wait(self) -> None:
        """Block until it is complete, at most for the timeout of the thread."""
        start = time.monotonic()
        while not self.done.wait(POLL_S) and not self.is_done:
            if time.monotonic() > start + self.wait_thread.timeout_s:
                raise CommunicationError(f"no message arrived from a peer for {self.wait_thread.timeout_s:g} s")
        if self.meter:
            self.meter.wait_s += time.monotonic() - start
        assert self.is_done


def broadcast_bits(group: Group, x: Tensor, is_source: bool) -> Tensor:
    """Return the source rank's x on every rank, bit for bit. Any dtype: the bytes are summed.

    Args:
        group: the ranks that call this.
        x: [...], of the same shape and dtype on all ranks.
        is_source: whether this rank's x is the one that all get; true on exactly one rank.
    """
    data = x.detach().contiguous().flatten().view(torch.uint8)
    total = data.clone() if is_source else torch.zeros_like(data)
    group.all_reduce_sum(total).wait()
    return total.view(x.dtype).view(x.shape)


def broadcast_tensors(group: Group, tensors: Sequence[Tensor], is_source: bool) -> list[Tensor]:
    """Return the source rank's tensors on every rank, as `broadcast_bits` does, in one message: each costs a latency.

    Args:
        group: the ranks that call this.
        tensors: of any shapes and dtypes, which are the same on all ranks; on one device.
        is_source: whether this rank's tensors are those that all get; true on exactly one rank.
    """
    if not tensors:
        return []
    parts = [x.detach().contiguous().flatten().view(torch.uint8) for x in tensors]
    received = broadcast_bits(group, torch.cat(parts), is_source)
    starts = itertools.accumulate((len(part) for part in parts), initial=0)
    # copies, which are aligned for every dtype
    return [received[start : start + x.nbytes].clone().view(x.dtype).view(x.shape) for start, x in zip(starts, tensors)]


class WaitThread:
    """A thread that waits for the submitted work, in order of submission.

    When a group is aborted, the thread is abandoned with it. Gloo notifies those who wait on a closed connection, but
    not the one whose message was half sent or half received (`Pair::signalException`, torch 2.13), which would wait for
    the timeout.

    timeout_s : how long `PolledWork.wait` blocks at most
    group     : the process group that the work belongs to
    """

    def __init__(self, timeout_s: float, group: object = None):
        self.timeout_s, self.group = timeout_s, group
        self.cancelled = False
        self._queue = queue.SimpleQueue[PolledWork | None]()
        threading.Thread(target=self._run, daemon=True, name="wait-thread").start()

    def submit(self, work: Work) -> PolledWork:
        """Wait for this work in the thread. Only the time in `PolledWork.wait` counts as waiting."""
        if isinstance(work, _MeteredWork):
            pending = PolledWork(work.work, self, work.meter)
        else:
            pending = PolledWork(work, self)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """End the thread when all submitted work is complete."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Fail all pending work with CommunicationError."""
        if self.group:
            _destroy_in_thread(getattr(self.group, "process_group", self.group))
        self.group = None
        self.cancelled = True
        self.close()

    def _run(self) -> None:
        while pending := self._queue.get():
            try:
                as_comm_error(pending.work.wait)
            except CommunicationError as error:
                pending.error = error
            pending.done.set()


_abandoned_ids = set[int]()  # of process groups that wait to be destroyed


def _destroy_in_thread(process_group: object) -> None:
    """Destroy a process group in a thread, once nothing else refers to it.

    The destructor joins the threads of the group, of which one may be blocked until its timeout. A group that is not
    destroyed costs processor time: its gloo thread polls a hundred times a second.
    """
    if id(process_group) not in _abandoned_ids:
        _abandoned_ids.add(id(process_group))
        threading.Thread(target=_destroy_unreferenced, args=([process_group],), daemon=True, name="destroy").start()


def _destroy_unreferenced(holder: list[object]) -> None:
    number = id(holder[0])
    pause_s = PEER_CHECK_S
    while sys.getrefcount(holder[0]) > 2:  # those of the list and of this call
        time.sleep(pause_s)
        gc.collect()  # what the group was part of may have references to itself
        pause_s = min(2 * pause_s, MAX_CLEANUP_PAUSE_S)
    _abandoned_ids.discard(number)  # before another group may have this number
    holder.clear()


@dataclass(frozen=True)
class _WatchedCollective:
    """A collective of gloo whose wait ends soon after a rank was lost, also where gloo does not notice.

    has_lost_peer : whether a connection to another rank was closed
    """

    work: dist.Work
    process_group: Any
    has_lost_peer: Callable[[], bool]

    def wait(self) -> None:
        num_closed = 0  # how often in a row a closed connection was seen: what had arrived before may complete it
        while num_closed < 2:
            if self._wait_for(PEER_CHECK_S):
                return
            num_closed = num_closed + 1 if self.has_lost_peer() else 0
        _destroy_in_thread(self.process_group)
        raise RuntimeError("Connection closed by peer")

    def _wait_for(self, timeout_s: float) -> bool:
        """Wait for at most this long; unlike a timeout of gloo, this one breaks nothing. Returns whether it is done."""
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:
            if not self.work.is_completed():
                return False
            self.work.wait()  # raises, unless it has just completed
        return True


@dataclass(frozen=True)
class _WorkList:
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _MeteredWork:
    work: Work
    meter: Meter
    wait_thread: WaitThread | None

    def wait(self) -> None:
        start = time.perf_counter()
        if self.wait_thread:
            self.wait_thread.submit(self.work).wait()
        else:
            as_comm_error(self.work.wait)
        self.meter.wait_s += time.perf_counter() - start


@dataclass(frozen=True)
class TorchGroup:
    """A group of torch.distributed.

    process_group : a torch.distributed process group, or one of its backends
    meter         : counts what this rank sends
    wait_thread   : waits for the messages of a group that may be aborted
    has_lost_peer : whether a connection to another of its ranks was closed; None: unknown
    """

    process_group: Any
    meter: Meter = field(default_factory=Meter)
    wait_thread: WaitThread | None = None
    has_lost_peer: Callable[[], bool] | None = None

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()

    def with_meter(self, meter: Meter) -> Group:
        return replace(self, meter=meter)

    def all_reduce_sum(self, x: Tensor) -> Work:
        return self._launch(lambda: self.process_group.allreduce([x]), x, ring_all_reduce(x.nbytes, self.size))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        work = self._launch(
            lambda: self.process_group.allgather([list(rows)], [x.contiguous()]),
            x,
            ring_all_gather(x.nbytes, self.size),
        )
        return rows, work

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        return self._launch(
            lambda: self.process_group.alltoall_base(out, x, [], []), x, all_to_all(x.nbytes, self.size)
        )

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        self.meter.count(Traffic(sum(x.nbytes for x in sends.values()), len(sends)))
        works = as_comm_error(lambda: self._send_recv(sends, recvs, tag))
        return _MeteredWork(_WorkList(works), self.meter, self.wait_thread)

    def _send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        group = self.process_group
        if not any(backend_of(x.device).batch_p2p for x in (*sends.values(), *recvs.values())):
            # Gloo sends once the other side has posted its receive. If receives were posted last, our own messages
            # would delay them.
            received = [group.recv([x], rank, tag) for rank, x in sorted(recvs.items())]
            return received + [group.send([x], rank, tag) for rank, x in sorted(sends.items())]
        ops = [c10d.P2POp(c10d.isend, x, group=group, group_peer=rank) for rank, x in sorted(sends.items())]
        ops += [c10d.P2POp(c10d.irecv, x, group=group, group_peer=rank) for rank, x in sorted(recvs.items())]
        return c10d.batch_isend_irecv(ops)  # NCCL needs them in one batch; it ignores the tag

    def _launch(self, start: Callable[[], dist.Work | None], x: Tensor, traffic: Traffic) -> Work:
        self.meter.count(traffic)
        started = as_comm_error(start)
        if started is None:
            return _CompletedWork()
        work: Work = started
        if self.has_lost_peer and x.device.type == "cpu":
            work = _WatchedCollective(started, self.process_group, self.has_lost_peer)
        return _MeteredWork(work, self.meter, self.wait_thread)


class _StoreAdapter(c10d.Store):
    """A prefix of our store as a store of torch, for the rendezvous of a process group."""

    def __init__(self, store: Store, prefix: str, timeout_s: float):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.store, self.prefix, self.timeout_s = store, prefix, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self.store.set(f"{self.prefix}/{key}", bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self.timeout_s))
        return self.store.get(f"{self.prefix}/{key}").decode().encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        return self.store.check([f"{self.prefix}/{key}" for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else self.timeout_s)
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(POLL_S / 10)


def new_gloo_group(
    store: Store, prefix: str, rank: int, size: int, timeout_s: float, wait_thread: WaitThread | None = None
) -> Group:
    """Form a gloo group that is independent of the default one.

    Args:
        store: where the ranks find each other.
        prefix: of its keys; another one for every group.
        rank: this rank's number in the group.
        size: its number of ranks.
        timeout_s: of the rendezvous and of each message.
        wait_thread: waits for its messages.

    Raises:
        CommunicationError: not all ranks arrived within `timeout_s`.
    """
    adapter = _StoreAdapter(store, prefix, timeout_s)
    group = as_comm_error(lambda: c10d.ProcessGroupGloo(adapter, rank, size, timedelta(seconds=timeout_s)))
    if wait_thread:
        wait_thread.group = group
    return TorchGroup(group, wait_thread=wait_thread)


def as_comm_error(action: Callable[[], T]) -> T:
    """Run `action`, and raise CommunicationError for any RuntimeError of it.

    torch raises RuntimeError for closed connections, timeouts, aborted communicators and unreachable stores.
    """
    try:
        return action()
    except RuntimeError as error:
        raise CommunicationError(describe_torch_error(error)) from error


def describe_torch_error(error: Exception) -> str:
    """Return the first line of an error of torch or gloo, without the place in the source and without advice."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    first_line = re.sub(r"^\[[^]]*:\d+\] ", "", first_line)
    first_line = re.sub(r"^\[enforce fail at [^]]*\] ", "", first_line)
    return first_line.split(". This is typically")[0].rstrip(".")
