"""A world whose ranks play in simulated time: groups, messages, waits and the store.

Strategies, exchanges and mailboxes work on it unchanged. Messages take the time that plan/predict/network.py says.
Their numbers are not sent, but for vectors of at most MAX_COMPUTED_NUMEL numbers in all-gathers: ranks act on those,
such as numbers of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import Group, PolledWork, SingleRankGroup, WaitThread, Work
from paragan.comm.traffic import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce
from paragan.comm.world import World
from paragan.core.rng import CPU
from paragan.plan.predict import network as collectives
from paragan.plan.predict.event_loop import SimClock, SimEvent, SimThreads, Task
from paragan.plan.predict.network import MAX_IN_FLIGHT, MessageMismatch, Network
from paragan.plan.predict.rank_clock import RankClock, codec_s_per_number
from paragan.plan.predict.simulated_store import SimulatedStore, StoreServer
from paragan.plan.predict.skip_compute import MAX_COMPUTED_NUMEL

MAX_DESCRIBED_RANKS = 8


@dataclass(frozen=True)
class Message:
    """A message, or this rank's part of a collective: recorded to compare ranks.

    members : of the group, as ranks of the world
    sends   : bytes to each rank of the world; for a collective, of this rank's vector to itself
    """

    kind: str
    members: tuple[int, ...]
    sends: Mapping[int, int]
    recvs: Mapping[int, int]
    tag: int = 0

    def shifted(self, offset: int, ranks: int) -> Message:
        """Add `offset` to every rank, modulo `ranks`."""

        def shift(nbytes: Mapping[int, int]) -> dict[int, int]:
            return {(j + offset) % ranks: n for j, n in nbytes.items()}

        members = tuple(sorted((j + offset) % ranks for j in self.members))
        return replace(self, members=members, sends=shift(self.sends), recvs=shift(self.recvs))


@dataclass
class SimulatedLinks:
    """The network of a simulation, and what its ranks have in common.

    network     : None: every message arrives at once, also if nobody sends it (to record what one rank sends)
    num_playing : ranks that have not played their last round
    store       : what ranks have written to the key-value store
    """

    clock: SimClock
    network: Network | None
    num_playing: int = 1
    store: StoreServer = field(default_factory=StoreServer)
    _threads: dict[tuple[int, tuple[int, ...]], SimThreads] = field(default_factory=dict)  # pyright: ignore
    _vectors: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = field(default_factory=dict)  # pyright: ignore
    _first_calls: dict[tuple[tuple[int, ...], int], _Call] = field(default_factory=dict)  # pyright: ignore

    def start_collective(
        self, kind: str, members: tuple[int, ...], index: int, number: int, nbytes: int, reduce_s_per_byte: float
    ) -> SimEvent:
        """Start the `number`-th collective of a group at rank `members[index]`. The event is triggered at its end."""
        if self.network is None:
            return _triggered()
        self._check_same_call((members, number), _Call(kind, nbytes, members[index]))
        threads = self._threads.setdefault((members[index], members), SimThreads(self.clock, MAX_IN_FLIGHT))
        key = (members, number)
        if kind == "all_reduce":
            return threads.submit(collectives.all_reduce(self.network, members, index, key, nbytes, reduce_s_per_byte))
        play = collectives.all_gather if kind == "all_gather" else collectives.all_to_all
        return threads.submit(play(self.network, members, index, key, nbytes))

    def _check_same_call(self, key: tuple[tuple[int, ...], int], call: _Call) -> None:
        first = self._first_calls.setdefault(key, call)
        if (first.kind, first.nbytes) != (call.kind, call.nbytes):
            raise MessageMismatch(f"in collective number {key[1]} of their group, {first} and {call}")

    def start_send_recv(
        self, rank: int, key: tuple[Any, ...], sends: Mapping[int, int], recvs: Mapping[int, int]
    ) -> SimEvent:
        """Exchange messages with other ranks. The event is triggered when all have left and arrived."""
        if self.network is None:
            return _triggered()
        events = [self.network.recv(j, rank, key, nbytes) for j, nbytes in recvs.items()]
        events += [self.network.send(rank, j, key, nbytes) for j, nbytes in sends.items()]
        return self.clock.start_process(event for event in events)

    def share(self, members: tuple[int, ...], number: int, index: int, x: Tensor) -> dict[int, Tensor]:
        """Add a rank's vector to those of a collective, and return all, by index; complete when the collective is."""
        vectors = self._vectors.setdefault((members, number), {})
        vectors[index] = x
        if len(vectors) == len(members):
            del self._vectors[members, number]
        return vectors


@dataclass(frozen=True)
class _Call:
    """Of a collective, by one rank of the world."""

    kind: str
    nbytes: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} calls {self.kind} with {self.nbytes} bytes"


def _triggered() -> SimEvent:
    event = SimEvent()
    event.trigger()
    return event


@dataclass(frozen=True)
class SimulatedWork:
    """A message or collective in flight."""

    event: SimEvent
    rank: RankClock
    awaited: str
    on_arrival: Callable[[], None] | None = None

    def wait(self) -> None:
        self.rank.wait(self.event, self.awaited)
        if self.on_arrival:
            self.on_arrival()


class SimulatedPolledWork(PolledWork):
    """Work whose completion can be polled."""

    def __init__(self, simulated: SimulatedWork, wait_thread: WaitThread):
        super().__init__(simulated, wait_thread)
        self.simulated = simulated
        self._start_step: int | None = simulated.rank.step
        self._last_poll_s = -1.0

    @property
    def is_done(self) -> bool:
        now_s = self.simulated.rank.catch_up()
        if now_s == self._last_poll_s and not self.simulated.event.triggered:
            now_s = self.simulated.rank.wait_a_moment(self.simulated.awaited)  # a loop that polls
        self._last_poll_s = now_s
        if self.simulated.event.triggered and self._start_step is not None:
            self.simulated.rank.link_ages.append(self.simulated.rank.step - self._start_step)
            self._start_step = None
        return self.simulated.event.triggered

    def wait(self) -> None:
        self.simulated.wait()
        assert self.is_done


class SimulatedWaitThread(WaitThread):
    """Waits for work in no thread: simulated work completes by itself."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.group = None
        self.cancelled = False

    def submit(self, work: Work) -> PolledWork:
        assert isinstance(work, SimulatedWork)
        return SimulatedPolledWork(work, self)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SimulatedGroup:
    """A group of simulated ranks.

    members : its ranks of the world
    index   : of this rank in members
    log     : what this rank has sent over all its groups, if it is recorded
    """

    links: SimulatedLinks
    clock: RankClock
    members: tuple[int, ...]
    index: int
    log: list[Message] | None = None
    meter: Meter = field(default_factory=Meter)
    _count: list[int] = field(default_factory=lambda: [0])  # of collectives; the copies of a group share it

    @property
    def rank(self) -> int:
        return self.index

    @property
    def size(self) -> int:
        return len(self.members)

    def with_meter(self, meter: Meter) -> Group:
        return replace(self, meter=meter)

    def all_reduce_sum(self, x: Tensor) -> Work:
        return self._start("all_reduce", x, ring_all_reduce(x.nbytes, self.size))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        self._check_room("all_gather", self.size * x.numel(), rows)
        on_arrival = self._fill_rows(rows, x) if x.numel() <= MAX_COMPUTED_NUMEL else None
        return rows, self._start("all_gather", x, ring_all_gather(x.nbytes, self.size), on_arrival)

    def _fill_rows(self, rows: Tensor, x: Tensor) -> Callable[[], None]:
        """Share x, and return what fills the rows once all ranks have shared theirs."""
        vectors = self.links.share(self.members, self._count[0] + 1, self.index, x.clone())

        def fill() -> None:
            for j in range(self.size):  # ranks that are not simulated do the same as this one
                rows[j] = vectors.get(j, vectors[self.index])

        return fill

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        self._check_room("all_to_all", x.numel(), out)
        return self._start("all_to_all", x, all_to_all(x.nbytes, self.size))

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        self._check_peers({*sends, *recvs})
        self.meter.count(Traffic(sum(x.nbytes for x in sends.values()), len(sends)))
        sent, received = ({self.members[j]: x.nbytes for j, x in some.items()} for some in (sends, recvs))
        self._record(Message("send_recv", self.members, sent, received, tag))
        self.clock.catch_up()
        event = self.links.start_send_recv(self.members[self.index], (self.members, tag), sent, received)
        others = _describe_ranks(received or sent)
        return SimulatedWork(event, self.clock, f"a message {'of' if received else 'to'} {others} (tag {tag})")

    def _check_peers(self, peers: Collection[int]) -> None:
        for peer in peers:
            if peer == self.index or not 0 <= peer < self.size:
                raise MessageMismatch(f"rank {self.index} of {self.size} exchanges a message with rank {peer}")

    def _check_room(self, kind: str, numel: int, out: Tensor) -> None:
        if out.numel() != numel or numel % self.size:
            raise MessageMismatch(f"{kind} of {self.size} ranks writes {numel} numbers into {out.numel()}")

    def _start(
        self, kind: str, x: Tensor, traffic: Traffic, on_arrival: Callable[[], None] | None = None
    ) -> SimulatedWork:
        self.meter.count(traffic)
        self._record(Message(kind, self.members, {self.members[self.index]: x.nbytes}, {}))
        self._count[0] += 1
        self.clock.catch_up()
        reduce_s = codec_s_per_number(self.clock.codec_cost, "pass") / 4
        event = self.links.start_collective(kind, self.members, self.index, self._count[0], x.nbytes, reduce_s)
        awaited = f"{kind} number {self._count[0]} of {_describe_ranks(self.members)}"
        return SimulatedWork(event, self.clock, awaited, on_arrival)

    def _record(self, message: Message) -> None:
        if self.log is not None:
            self.log.append(message)


def _describe_ranks(ranks: Collection[int]) -> str:
    if len(ranks) > MAX_DESCRIBED_RANKS:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    return f"rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))}"


class SimulatedWorld(World):
    """All ranks of a simulation, as one of them sees it.

    log : what this rank has sent, if it is recorded
    """

    def __init__(
        self,
        ranks: int,
        rank: int,
        links: SimulatedLinks,
        clock: RankClock,
        log: list[Message] | None = None,
        device: torch.device = CPU,
    ):
        round_trip_s = 2 * links.network.latency_between(rank, 0) if links.network else 0.0
        self.simulated_store = SimulatedStore(links.store, clock, round_trip_s)
        super().__init__(LaunchInfo(rank, ranks), device, self.simulated_store, SingleRankGroup(), 60.0)
        self.links = links
        self.clock = clock
        self.log = log
        self._counts: dict[tuple[int, ...], list[int]] = {}
        self.all_ranks = self._make_group(range(ranks))

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        return self._make_group(ranks) if self.rank in ranks else None

    def pair_group(self, other: int) -> Group:
        return self._make_group(sorted((self.rank, other)))

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        return SimulatedWaitThread(self.timeout_s)

    def all_gather_str(self, text: str, timeout_s: float | None = None) -> list[str]:
        network = self.links.network
        if network is None or network.symmetric:  # ranks that are not simulated do the same as this one
            round_trip_s = 2 * network.latency_between(0, self.size - 1) if network else 0.0
            self.clock.sleep((1 + 2 * self.size) * round_trip_s)
            return [text] * self.size
        self._gather_count += 1
        keys = [f"gather/{self._gather_count}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], text)
        for key in keys:
            self.simulated_store.wait(key)
        return [self.store.get(key).decode() for key in keys if self.store.check([key])]

    def _make_group(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        if len(members) == 1:
            return SingleRankGroup()
        count = self._counts.setdefault(members, [0])  # messages of equal groups go over one connection
        return SimulatedGroup(self.links, self.clock, members, members.index(self.rank), self.log, _count=count)


def lone_world(ranks: int, rank: int = 0, device: torch.device = CPU) -> SimulatedWorld:
    """Return a world as one of its ranks sees it that is alone there: enough to build a role.

    Its collectives end at once; what other ranks would send stays undefined.
    """
    clock = SimClock()
    task = Task(clock, f"rank {rank}", lambda task: None)
    return SimulatedWorld(ranks, rank, SimulatedLinks(clock, None), RankClock(task, {}), device=device)
