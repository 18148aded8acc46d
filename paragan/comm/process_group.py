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
from paragan.core.devices import kind_of
from paragan.core.errors import Failed

T = TypeVar("T")
c10d: Any = dist  # torch leaves most of it untyped

POLL_S = 0.02


class Lost(Failed):
    """An exchange failed: another rank died, hangs, or gave up. The step was not applied."""


class Store(Protocol):
    """What is used of torch's key-value stores. Nothing that waits: they are shared by threads."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Work(Protocol):
    """Something on its way; `wait` returns when it has arrived (on CUDA: orders the stream, not the host)."""

    def wait(self) -> None: ...


class Awaitable(Protocol):
    """Work of ours or of torch."""

    def wait(self) -> object: ...


class Group(Protocol):
    """Some ranks that talk."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def metered(self, meter: Meter) -> Group:
        """The same ranks, counting into `meter`."""
        ...

    def sum(self, x: Tensor) -> Work:
        """Sum of everyone's x [...], in place, the same bits on every rank."""
        ...

    def gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        """[k] of everyone -> [size, k], row j from rank j; into `out` where given."""
        ...

    def transpose(self, x: Tensor, out: Tensor) -> Work:
        """[size, k], row j for rank j -> out [size, k], row j from rank j."""
        ...

    def swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int = 0) -> Work:
        """A tensor to each of some ranks, and one from each of some, which may be others. What is told must stay as
        it is until the work is done. Pairs must post what has one tag in one order."""
        ...


class _Arrived:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Solo:
    """A group of one: nothing travels."""

    rank: int = 0
    size: int = 1

    def metered(self, meter: Meter) -> Group:
        return self

    def sum(self, x: Tensor) -> Work:
        return _Arrived()

    def gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        return x[None].clone() if out is None else out.copy_(x[None]), _Arrived()

    def transpose(self, x: Tensor, out: Tensor) -> Work:
        out.copy_(x)
        return _Arrived()

    def swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int = 0) -> Work:
        return _Arrived()


class Pending:
    """Work that a thread waits for, so that one can look whether it is over."""

    def __init__(self, work: Awaitable, waiter: Waiter, meter: Meter | None = None):
        self.work, self.waiter, self.meter = work, waiter, meter
        self.over, self.error = threading.Event(), list[Lost]()

    @property
    def arrived(self) -> bool:
        if self.error:
            raise self.error[0]
        if self.waiter.in_vain and not self.over.is_set():
            raise Lost("this group was given up")
        return self.over.is_set()

    def wait(self) -> None:
        start = time.monotonic()
        while not self.over.wait(POLL_S) and not self.arrived:
            if time.monotonic() > start + self.waiter.timeout_s:
                raise Lost(f"a link was silent for {self.waiter.timeout_s:g} s")
        if self.meter:
            self.meter.wait_s += time.monotonic() - start
        assert self.arrived


def of_one(group: Group, here: Tensor, speaks: bool) -> Tensor:
    """What the one rank that speaks has, on every rank, to the bit; numbers of any kind: they are summed as bytes."""
    data = here.detach().contiguous().flatten().view(torch.uint8)
    total = data.clone() if speaks else torch.zeros_like(data)
    group.sum(total).wait()
    return total.view(here.dtype).view(here.shape)


class Waiter:
    """A thread that does nothing but wait for what it was given, in that order.

    Who gives a group up leaves the thread behind. Gloo tells those who wait for a link that is closed, but not the one
    whose message was half sent or half here (`Pair::signalException`, torch 2.13): that one would wait for the timeout.
    """

    def __init__(self, timeout_s: float, group: object = None):
        self.timeout_s, self.group, self.in_vain = timeout_s, group, False  # whose work this is
        self._under_way = queue.SimpleQueue[Pending | None]()
        threading.Thread(target=self._wait, daemon=True, name="waiter").start()

    def give(self, work: Awaitable) -> Pending:
        travels = isinstance(work, _Travelling)  # the time until somebody wants it is not waited
        pending = Pending(work.work, self, work.meter) if travels else Pending(work, self)
        self._under_way.put(pending)
        return pending

    def end(self) -> None:
        """Go when all that was given is over."""
        self._under_way.put(None)

    def give_up(self) -> None:
        """Whoever still looks is told (Lost). The process group is left where it is, for good: taking it down waits for
        its threads, and one may be waiting in vain."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.in_vain = True
        self.end()

    def _wait(self) -> None:
        while pending := self._under_way.get():
            try:
                or_lost(pending.work.wait)
            except Lost as lost:
                pending.error.append(lost)
            pending.over.set()


@dataclass(frozen=True)
class _All:
    works: Sequence[Awaitable]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _Travelling:
    work: Awaitable
    meter: Meter
    waiter: Waiter | None

    def wait(self) -> None:
        start = time.perf_counter()
        if self.waiter:
            self.waiter.give(self.work).wait()
        else:
            or_lost(self.work.wait)
        self.meter.wait_s += time.perf_counter() - start


@dataclass(frozen=True)
class Ranks:
    """A process group."""

    process_group: Any  # a torch.distributed process group, or one of its backends
    meter: Meter = field(default_factory=Meter)
    waiter: Waiter | None = None  # who waits, where the group may be given up

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()

    def metered(self, meter: Meter) -> Group:
        return replace(self, meter=meter)

    def sum(self, x: Tensor) -> Work:
        start = lambda: self.process_group.allreduce([x])  # noqa: E731
        return self._send(start, ring_all_reduce(x.nbytes, self.size))

    def gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        start = lambda: self.process_group.allgather([list(rows)], [x.contiguous()])  # noqa: E731
        return rows, self._send(start, ring_all_gather(x.nbytes, self.size))

    def transpose(self, x: Tensor, out: Tensor) -> Work:
        start = lambda: self.process_group.alltoall_base(out, x, [], [])  # noqa: E731
        return self._send(start, all_to_all(x.nbytes, self.size))

    def swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int = 0) -> Work:
        self.meter.count(Traffic(sum(x.nbytes for x in tell.values()), len(tell)))
        works = or_lost(lambda: self._swap(tell, hear, tag))
        return _Travelling(_All(works), self.meter, self.waiter)

    def _swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        group = self.process_group
        if not any(kind_of(x.device).at_once for x in (*tell.values(), *hear.values())):
            # gloo sends what the other side has asked for: asked later, our question would wait behind our own message
            heard = [group.recv([x], rank, tag) for rank, x in sorted(hear.items())]
            return heard + [group.send([x], rank, tag) for rank, x in sorted(tell.items())]
        ops = [c10d.P2POp(c10d.isend, x, group=group, group_peer=rank) for rank, x in sorted(tell.items())]
        ops += [c10d.P2POp(c10d.irecv, x, group=group, group_peer=rank) for rank, x in sorted(hear.items())]
        return c10d.batch_isend_irecv(ops)  # NCCL wants them at once

    def _send(self, start: Callable[[], dist.Work | None], traffic: Traffic) -> Work:
        self.meter.count(traffic)
        work = or_lost(start)
        return _Arrived() if work is None else _Travelling(work, self.meter, self.waiter)


class _Meeting(c10d.Store):
    """Words under a name, as torch wants to have them, for a process group to meet."""

    def __init__(self, words: Store, name: str, timeout_s: float):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.words, self.name, self.timeout_s = words, name, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self.words.set(f"{self.name}/{key}", bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=self.timeout_s))
        return self.words.get(f"{self.name}/{key}").decode().encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        return self.words.check([f"{self.name}/{key}" for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else self.timeout_s)
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited for {keys} in vain")
            time.sleep(POLL_S / 10)


def meet(words: Store, name: str, rank: int, size: int, timeout_s: float, waiter: Waiter | None = None) -> Group:
    """A gloo group of its own, beside the default one. Returns when all are there; Lost after `timeout_s`."""
    meeting, timeout = _Meeting(words, name, timeout_s), timedelta(seconds=timeout_s)
    group = or_lost(lambda: c10d.ProcessGroupGloo(meeting, rank, size, timeout))
    if waiter:
        waiter.group = group
    return Ranks(group, waiter=waiter)


def or_lost(action: Callable[[], T]) -> T:
    """Do it; what torch raises for closed pairs, timeouts, aborted communicators and absent stores is Lost."""
    try:
        return action()
    except RuntimeError as error:
        first = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0])  # without gloo's source line,
        raise Lost(first.split(". This is typically")[0]) from error  # and without its advice
