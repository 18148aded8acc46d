"""Ranks and groups of ranks: the only door to torch.distributed, and where bytes are counted."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Failed, Unusable
from .meter import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce

T = TypeVar("T")
c10d: Any = dist  # torch leaves most of it untyped

POLL_S = 0.02
FAULT_WINDOW_S = 4.0  # how long the survivors of a broken exchange listen for the one who knows why


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


@dataclass(frozen=True)
class _Travelling:
    work: dist.Work
    meter: Meter

    def wait(self) -> None:
        start = time.perf_counter()
        or_lost(self.work.wait)
        self.meter.wait_s += time.perf_counter() - start


@dataclass(frozen=True)
class _All:
    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class Ranks:
    """A process group."""

    process_group: Any  # a torch.distributed process group, or one of its backends
    meter: Meter = field(default_factory=Meter)

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()

    def metered(self, meter: Meter) -> Group:
        return Ranks(self.process_group, meter)

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
        return _All([_Travelling(work, self.meter) for work in works])

    def _swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        group = self.process_group
        if not any(x.is_cuda for x in (*tell.values(), *hear.values())):
            sent = [group.send([x], rank, tag) for rank, x in sorted(tell.items())]
            return sent + [group.recv([x], rank, tag) for rank, x in sorted(hear.items())]
        ops = [c10d.P2POp(c10d.isend, x, group=group, group_peer=rank) for rank, x in sorted(tell.items())]
        ops += [c10d.P2POp(c10d.irecv, x, group=group, group_peer=rank) for rank, x in sorted(hear.items())]
        return c10d.batch_isend_irecv(ops)  # NCCL wants them at once

    def _send(self, start: Callable[[], dist.Work | None], traffic: Traffic) -> Work:
        self.meter.count(traffic)
        work = or_lost(start)
        return _Arrived() if work is None else _Travelling(work, self.meter)


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


def meet(words: Store, name: str, rank: int, size: int, timeout_s: float) -> Group:
    """A gloo group of its own, beside the default one. Returns when all are there; Lost after `timeout_s`."""
    timeout = timedelta(seconds=timeout_s)
    return Ranks(or_lost(lambda: c10d.ProcessGroupGloo(_Meeting(words, name, timeout_s), rank, size, timeout)))


def or_lost(action: Callable[[], T]) -> T:
    """Do it; what torch raises for closed pairs, timeouts, aborted communicators and absent stores is Lost."""
    try:
        return action()
    except RuntimeError as error:
        first = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0])  # without gloo's source line,
        raise Lost(first.split(". This is typically")[0]) from error  # and without its advice


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Place:
        """Reads torchrun's variables, else those srun gives its tasks; a single process without either."""
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        elif "RANK" in env or "WORLD_SIZE" in env:
            both = "RANK and WORLD_SIZE belong together: set both, as torchrun does, or neither"
            raise Unusable(both, everywhere=False)
        else:
            return Place()
        rank, size = _number(env, names[0]), _number(env, names[1])
        local_rank = _number(env, names[2], 0)
        local_size = _number(env, names[3], 1)
        if not 0 <= rank < size:
            raise Unusable(f"{names[0]}={rank} must be less than {names[1]}={size}", everywhere=False)
        return Place(rank, size, local_rank, max(local_size, local_rank + 1))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise Unusable(f"{name}={text!r} must be a number, as torchrun and srun set it", everywhere=False)
    return int(digits)


def rendezvous(place: Place, env: Mapping[str, str], timeout_s: float) -> Store:
    """The key-value store all ranks share. Waits at most `timeout_s` for rank 0 to serve it."""
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise Unusable("MASTER_ADDR is not set: start with torchrun, srun or --ranks N")
    job = _number(env, "SLURM_JOB_ID", 0)
    port = _number(env, "MASTER_PORT", 29500 + job % 10000)
    if not 0 < port < 65536:
        raise Unusable(f"MASTER_PORT={port} must be between 1 and 65535", everywhere=False)
    served = place.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not served:
            _await_server(address, port, timeout_s)
        return c10d.TCPStore(address, port, place.size, served, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError and its kin
        reason = str(error).splitlines()[0]
        what = f"rank 0 cannot serve {address}:{port}" if served else f"rank 0 is not at {address}:{port}"
        raise Lost(f"{what} (MASTER_ADDR:MASTER_PORT), says rank {place.rank}: {reason}") from error


def _await_server(address: str, port: int, timeout_s: float) -> None:
    """Return when somebody listens there: torch's own attempts print a stack trace each."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), POLL_S)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of hosts: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


class World:
    """All ranks, this one's place among them, its device and its store; deals out groups.

    `World.solo()` needs no process group, so every strategy also runs in one process.

    elastic : whether it can go on without a rank that was lost (comm/elastic.py)
    began   : how many ranks it was started with
    """

    elastic: ClassVar[bool] = False

    def __init__(self, place: Place, device: torch.device, store: Store, everyone: Group, timeout_s: float):
        self.place, self.device, self.store, self.everyone = place, device, store, everyone
        self.timeout_s, self.began = timeout_s, place.size
        self._agreed = 0
        self._linked: dict[int, int] = {}  # how often this rank asked for a link to another
        self._silent = list[int]()  # ranks that did not say why they left
        self._not_ours = set[int]()  # sockets that are no link between ranks

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> World:
        return World(Place(), torch.device(device), c10d.HashStore(), Solo(), 60.0)

    @staticmethod
    def join(place: Place, device: torch.device, timeout_s: float, env: Mapping[str, str] = os.environ) -> World:
        """Meet the other ranks. Every collective of this world fails after `timeout_s`, none hangs."""
        if place.size == 1:
            return World(place, device, c10d.HashStore(), Solo(), timeout_s)
        store = rendezvous(place, env, timeout_s)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
        world = World(place, device, c10d.PrefixStore(f"paragan/{attempt}", store), Solo(), timeout_s)
        world.agree("")  # all are there; a missing rank is named
        world._not_ours = open_sockets()
        c10d.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=c10d.PrefixStore(f"group/{attempt}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        process_group = c10d.group.WORLD
        world.everyone = Ranks(process_group)
        return world

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def seats(self) -> tuple[int, ...]:
        """The numbers that the ranks of this world were started with, in rank order."""
        return tuple(range(self.size))

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.place.rank == 0

    def group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks, or None where this rank is not among them. Every rank calls this, in the
        same order."""
        if self.size == 1 or len(ranks) == 1:
            return Solo() if self.rank in ranks else None
        process_group = c10d.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return Ranks(process_group) if self.rank in ranks else None

    def link(self, other: int) -> Group:
        """A group of this rank and another one, on gloo, by which nobody else is held up. Both call this; a rank
        calls it for its pairs in rising order."""
        pair = sorted((self.rank, other))
        number = self._linked[other] = self._linked.get(other, 0) + 1
        return self._meet(f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [other])

    def _meet(self, name: str, rank: int, size: int, others: Sequence[int]) -> Group:
        return meet(self.store, name, rank, size, self.timeout_s)

    def agree(self, word: str, timeout_s: float | None = None) -> list[str]:
        """Everyone's word, in rank order, once all have spoken. Costs store round trips: not for steps."""
        self._agreed += 1
        return or_lost(lambda: self._words(f"agree/{self._agreed}", word, timeout_s or self.timeout_s))

    def _words(self, name: str, word: str, timeout_s: float) -> list[str]:
        self.store.set(f"{name}/{self.rank}", word)
        missing, words = list(range(self.size)), dict[int, str]()
        deadline = time.monotonic() + timeout_s
        while True:
            for rank in [r for r in missing if self.store.check([f"{name}/{r}"])]:
                words[rank] = self.store.get(f"{name}/{rank}").decode()
                missing.remove(rank)
            if not missing:
                return [words[rank] for rank in range(self.size)]
            self._look()
            if time.monotonic() > deadline:
                raise Lost(f"rank {', '.join(map(str, missing))} did not arrive within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Lost, where waiting for others makes no sense any more."""

    def explain(self, error: BaseException, step: int) -> str:
        """Tell the others why this rank gives up, and learn who began: one line with rank and step."""
        if self.size == 1:
            return f"step {step}: {error}"
        own, lost = f"rank {self.rank}, step {step}: {error}", isinstance(error, Lost)
        try:
            self.store.set(f"fault/{self.rank}", ("lost " if lost else "") + own)
            told = self._first_fault(own, step) if lost else own
            self.store.set(f"told/{self.rank}", "")
            return told
        except RuntimeError:
            return f"rank 0 was lost at step {step} (it held the store); rank {self.rank} saw: {error}"

    def _first_fault(self, own: str, step: int) -> str:
        deadline = time.monotonic() + FAULT_WINDOW_S
        silent = [r for r in range(self.size) if r != self.rank]
        while silent and time.monotonic() < deadline:
            for rank in [r for r in silent if self.store.check([f"fault/{r}"])]:
                fault = self.store.get(f"fault/{rank}").decode()
                if not fault.startswith("lost "):
                    return fault
                silent.remove(rank)
            time.sleep(POLL_S)
        if not silent:
            return own
        self._silent = silent
        ranks = ", ".join(map(str, silent))
        return f"rank {ranks} was lost at step {step} (killed, or out of reach); {own}"

    def close(self) -> None:
        """Leave in good order: rank 0, which may hold the store, goes last."""
        if self.size == 1:
            return
        if self.first:
            or_lost(lambda: self._words("bye", "", self.timeout_s))
        else:
            or_lost(lambda: self.store.set(f"bye/{self.rank}", ""))
        c10d.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure: hang up, so that the others notice. Rank 0, which may hold the store, then
        lets them read there who began."""
        if isinstance(self.everyone, Ranks):
            self.everyone.process_group.abort()  # means nothing to gloo, whose links live until the process ends
            hang_up(open_sockets() - self._not_ours)
            if self.first:
                self._await_told()

    def _await_told(self) -> None:
        told = [f"told/{rank}" for rank in range(self.size) if rank not in self._silent]
        deadline = time.monotonic() + FAULT_WINDOW_S
        with contextlib.suppress(RuntimeError):  # the store may be torchrun's, and gone
            while not self.store.check(told) and time.monotonic() < deadline:
                time.sleep(POLL_S)


def hang_up(links: Iterable[int]) -> None:
    """Shut these sockets down, so that whoever waits at either end is told; but not those that listen."""
    for descriptor in links:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as link:
            if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo minds for its listener
                link.shutdown(socket.SHUT_RDWR)


def open_sockets() -> set[int]:
    """This process's open sockets (Linux; none where the system does not tell)."""
    found = set[int]()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                found.add(int(entry.name))
    return found
