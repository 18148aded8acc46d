"""Groups of ranks, and what travels in them: torch's process groups, with every byte counted."""

from __future__ import annotations

import ctypes
import queue
import re
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


class CommunicationError(RunError):
    """An exchange failed: another rank died, hangs, or gave up. The step was not applied."""


class Store(Protocol):
    """What is used of torch's key-value stores. Nothing that waits: they are shared by threads."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Work(Protocol):
    """Something on its way; `wait` returns when it has arrived (on CUDA: orders the stream, not the host)."""

    def wait(self) -> None: ...


class Waitable(Protocol):
    """Work of ours or of torch."""

    def wait(self) -> object: ...


class Group(Protocol):
    """Some ranks that talk."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def with_meter(self, meter: Meter) -> Group:
        """The same ranks, counting into `meter`."""
        ...

    def all_reduce_sum(self, x: Tensor) -> Work:
        """Sum of everyone's x [...], in place, the same bits on every rank."""
        ...

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        """[k] of everyone -> [size, k], row j from rank j; into `out` where given."""
        ...

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        """[size, k], row j for rank j -> out [size, k], row j from rank j."""
        ...

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        """A tensor to each of some ranks, and one from each of some, which may be others. What is told must stay as
        it is until the work is done. Pairs must post what has one tag in one order."""
        ...


class _CompletedWork:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class SingleRankGroup:
    """A group of one: nothing travels."""

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
    """Work that a thread waits for, so that one can look whether it is over."""

    def __init__(self, work: Waitable, wait_thread: WaitThread, meter: Meter | None = None):
        self.work, self.wait_thread, self.meter = work, wait_thread, meter
        self.done, self.error = threading.Event(), list[CommunicationError]()

    @property
    def is_done(self) -> bool:
        if self.error:
            raise self.error[0]
        if self.wait_thread.cancelled and not self.done.is_set():
            raise CommunicationError("this group was given up")
        return self.done.is_set()

    def wait(self) -> None:
        start = time.monotonic()
        while not self.done.wait(POLL_S) and not self.is_done:
            if time.monotonic() > start + self.wait_thread.timeout_s:
                raise CommunicationError(f"a link was silent for {self.wait_thread.timeout_s:g} s")
        if self.meter:
            self.meter.wait_s += time.monotonic() - start
        assert self.is_done


def broadcast_bits(group: Group, x: Tensor, is_source: bool) -> Tensor:
    """What the one rank that speaks has, on every rank, to the bit; numbers of any kind: they are summed as bytes."""
    data = x.detach().contiguous().flatten().view(torch.uint8)
    total = data.clone() if is_source else torch.zeros_like(data)
    group.all_reduce_sum(total).wait()
    return total.view(x.dtype).view(x.shape)


class WaitThread:
    """A thread that does nothing but wait for what it was given, in that order.

    Who gives a group up leaves the thread behind. Gloo tells those who wait for a link that is closed, but not the one
    whose message was half sent or half here (`Pair::signalException`, torch 2.13): that one would wait for the timeout.
    """

    def __init__(self, timeout_s: float, group: object = None):
        self.timeout_s, self.group, self.cancelled = timeout_s, group, False  # whose work this is
        self._queue = queue.SimpleQueue[PolledWork | None]()
        threading.Thread(target=self._run, daemon=True, name="waiter").start()

    def submit(self, work: Waitable) -> PolledWork:
        travels = isinstance(work, _MeteredWork)  # the time until somebody wants it is not waited
        pending = PolledWork(work.work, self, work.meter) if travels else PolledWork(work, self)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Go when all that was given is over."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Whoever still looks is told (Lost). The process group is left where it is, for good: taking it down waits for
        its threads, and one may be waiting in vain."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.cancelled = True
        self.close()

    def _run(self) -> None:
        while pending := self._queue.get():
            try:
                as_comm_error(pending.work.wait)
            except CommunicationError as lost:
                pending.error.append(lost)
            pending.done.set()


@dataclass(frozen=True)
class _WorkList:
    works: Sequence[Waitable]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _MeteredWork:
    work: Waitable
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
    """A process group."""

    process_group: Any  # a torch.distributed process group, or one of its backends
    meter: Meter = field(default_factory=Meter)
    wait_thread: WaitThread | None = None  # who waits, where the group may be given up

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()

    def with_meter(self, meter: Meter) -> Group:
        return replace(self, meter=meter)

    def all_reduce_sum(self, x: Tensor) -> Work:
        start = lambda: self.process_group.allreduce([x])  # noqa: E731
        return self._launch(start, ring_all_reduce(x.nbytes, self.size))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        start = lambda: self.process_group.allgather([list(rows)], [x.contiguous()])  # noqa: E731
        return rows, self._launch(start, ring_all_gather(x.nbytes, self.size))

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        start = lambda: self.process_group.alltoall_base(out, x, [], [])  # noqa: E731
        return self._launch(start, all_to_all(x.nbytes, self.size))

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        self.meter.count(Traffic(sum(x.nbytes for x in sends.values()), len(sends)))
        works = as_comm_error(lambda: self._send_recv(sends, recvs, tag))
        return _MeteredWork(_WorkList(works), self.meter, self.wait_thread)

    def _send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        group = self.process_group
        if not any(backend_of(x.device).batch_p2p for x in (*sends.values(), *recvs.values())):
            # gloo sends what the other side has asked for: asked later, our question would wait behind our own message
            heard = [group.recv([x], rank, tag) for rank, x in sorted(recvs.items())]
            return heard + [group.send([x], rank, tag) for rank, x in sorted(sends.items())]
        ops = [c10d.P2POp(c10d.isend, x, group=group, group_peer=rank) for rank, x in sorted(sends.items())]
        ops += [c10d.P2POp(c10d.irecv, x, group=group, group_peer=rank) for rank, x in sorted(recvs.items())]
        return c10d.batch_isend_irecv(ops)  # NCCL wants them at once

    def _launch(self, start: Callable[[], dist.Work | None], traffic: Traffic) -> Work:
        self.meter.count(traffic)
        work = as_comm_error(start)
        return _CompletedWork() if work is None else _MeteredWork(work, self.meter, self.wait_thread)


class _StoreAdapter(c10d.Store):
    """Words under a name, as torch wants to have them, for a process group to meet."""

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
                raise RuntimeError(f"waited for {keys} in vain")
            time.sleep(POLL_S / 10)


def new_gloo_group(
    store: Store, prefix: str, rank: int, size: int, timeout_s: float, wait_thread: WaitThread | None = None
) -> Group:
    """A gloo group of its own, beside the default one. Returns when all are there; Lost after `timeout_s`."""
    meeting, timeout = _StoreAdapter(store, prefix, timeout_s), timedelta(seconds=timeout_s)
    group = as_comm_error(lambda: c10d.ProcessGroupGloo(meeting, rank, size, timeout))
    if wait_thread:
        wait_thread.group = group
    return TorchGroup(group, wait_thread=wait_thread)


def as_comm_error(action: Callable[[], T]) -> T:
    """Do it; what torch raises for closed pairs, timeouts, aborted communicators and absent stores is Lost."""
    try:
        return action()
    except RuntimeError as error:
        first = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0])  # without gloo's source line,
        raise CommunicationError(first.split(". This is typically")[0]) from error  # and without its advice
