"""A world whose ranks play in simulated time: groups, messages and waits.

Strategies, exchanges and mailboxes work on it unchanged. Messages take the time that plan/predict/network.py says.
Their numbers are not sent, but for vectors of at most MAX_COMPUTED_NUMEL numbers in all-gathers: ranks act on those,
such as numbers of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import Group, PolledWork, SingleRankGroup, WaitThread, Work
from paragan.comm.traffic import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce
from paragan.comm.world import World
from paragan.plan.predict import network as collectives
from paragan.plan.predict.event_loop import SimClock, SimEvent, SimThreads, Task
from paragan.plan.predict.network import MAX_IN_FLIGHT, Network
from paragan.plan.predict.skip_compute import MAX_COMPUTED_NUMEL

COMPUTE, CODEC = "compute", "codec"


def codec_s_per_number(codec_cost: Mapping[str, float], op: str) -> float:
    """Return the seconds per number of an operation: of "int8/encode", else of "encode", else 0."""
    return codec_cost.get(op, codec_cost.get(op.rpartition("/")[2], 0.0))


class RankClock:
    """The time of one rank, as its task spends it.

    Time is spent at once only where it matters to others: before a message, and before a look at what has arrived.

    step      : the round that the rank plays
    slowdown  : factor on the time of computing in this round
    spent_s   : so far, by COMPUTE and CODEC
    link_ages : of the messages that arrived over links that may lag, in rounds
    """

    def __init__(self, task: Task, codec_cost: Mapping[str, float]):
        self.task = task
        self.codec_cost = codec_cost
        self.step = 0
        self.slowdown = 1.0
        self.spent_s = {COMPUTE: 0.0, CODEC: 0.0}
        self.link_ages: list[int] = []
        self._due_s = 0.0

    def compute(self, seconds: float) -> None:
        """Spend time that the networks compute."""
        self._spend(COMPUTE, self.slowdown * seconds)

    def run_codec(self, op: str, numel: int) -> None:
        """Spend the time of an operation of an exchange on `numel` numbers: "pass", "int8/encode"."""
        self._spend(CODEC, numel * codec_s_per_number(self.codec_cost, op))

    def _spend(self, kind: str, seconds: float) -> None:
        self.spent_s[kind] += seconds
        self._due_s += seconds

    def catch_up(self) -> float:
        """Let the spent time pass. Returns the time that it is then."""
        due_s = self._due_s
        self._due_s = 0.0
        self.task.sleep(due_s)
        return self.task.clock.now_s

    def wait(self, event: SimEvent, awaited: str) -> None:
        """Wait for an event."""
        self.catch_up()
        self.task.wait(event, awaited)


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
    """

    clock: SimClock
    network: Network | None
    num_playing: int = 1
    _threads: dict[tuple[int, tuple[int, ...]], SimThreads] = field(default_factory=dict)  # pyright: ignore
    _vectors: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = field(default_factory=dict)  # pyright: ignore

    def start_collective(
        self, kind: str, members: tuple[int, ...], index: int, number: int, nbytes: int, reduce_s_per_byte: float
    ) -> SimEvent:
        """Start the `number`-th collective of a group at rank `members[index]`. The event is triggered at its end."""
        if self.network is None:
            return _triggered()
        threads = self._threads.setdefault((members[index], members), SimThreads(self.clock, MAX_IN_FLIGHT))
        key = (members, number)
        if kind == "all_reduce":
            return threads.submit(collectives.all_reduce(self.network, members, index, key, nbytes, reduce_s_per_byte))
        play = collectives.all_gather if kind == "all_gather" else collectives.all_to_all
        return threads.submit(play(self.network, members, index, key, nbytes))

    def start_send_recv(
        self, rank: int, key: tuple[Any, ...], sends: Mapping[int, int], recvs: Mapping[int, int]
    ) -> SimEvent:
        """Exchange messages with other ranks. The event is triggered when all have left and arrived."""
        if self.network is None:
            return _triggered()
        events = [self.network.recv(j, rank, key) for j in recvs]
        events += [self.network.send(rank, j, key, nbytes) for j, nbytes in sends.items()]
        return self.clock.start_process(event for event in events)

    def share(self, members: tuple[int, ...], number: int, index: int, x: Tensor) -> dict[int, Tensor]:
        """Add a rank's vector to those of a collective, and return all, by index; complete when the collective is."""
        vectors = self._vectors.setdefault((members, number), {})
        vectors[index] = x
        if len(vectors) == len(members):
            del self._vectors[members, number]
        return vectors


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

    @property
    def is_done(self) -> bool:
        self.simulated.rank.catch_up()
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
        return self._start("all_to_all", x, all_to_all(x.nbytes, self.size))

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        self.meter.count(Traffic(sum(x.nbytes for x in sends.values()), len(sends)))
        sent, received = ({self.members[j]: x.nbytes for j, x in some.items()} for some in (sends, recvs))
        self._record(Message("send_recv", self.members, sent, received, tag))
        self.clock.catch_up()
        event = self.links.start_send_recv(self.members[self.index], (self.members, tag), sent, received)
        others = ", ".join(map(str, received or sent))
        return SimulatedWork(event, self.clock, f"a message {'of' if received else 'to'} rank {others} (tag {tag})")

    def _start(
        self, kind: str, x: Tensor, traffic: Traffic, on_arrival: Callable[[], None] | None = None
    ) -> SimulatedWork:
        self.meter.count(traffic)
        self._record(Message(kind, self.members, {self.members[self.index]: x.nbytes}, {}))
        self._count[0] += 1
        self.clock.catch_up()
        reduce_s = codec_s_per_number(self.clock.codec_cost, "pass") / 4
        event = self.links.start_collective(kind, self.members, self.index, self._count[0], x.nbytes, reduce_s)
        ranks = ", ".join(map(str, self.members))
        return SimulatedWork(event, self.clock, f"{kind} number {self._count[0]} of ranks {ranks}", on_arrival)

    def _record(self, message: Message) -> None:
        if self.log is not None:
            self.log.append(message)


class SimulatedWorld(World):
    """All ranks of a simulation, as one of them sees it.

    log : what this rank has sent, if it is recorded
    """

    def __init__(
        self, ranks: int, rank: int, links: SimulatedLinks, clock: RankClock, log: list[Message] | None = None
    ):
        super().__init__(LaunchInfo(rank, ranks), torch.device("cpu"), World.solo().store, SingleRankGroup(), 60.0)
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
        return [text] * self.size

    def _make_group(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        if len(members) == 1:
            return SingleRankGroup()
        count = self._counts.setdefault(members, [0])  # messages of equal groups go over one connection
        return SimulatedGroup(self.links, self.clock, members, members.index(self.rank), self.log, _count=count)


def lone_world(ranks: int, rank: int = 0) -> SimulatedWorld:
    """Return a world as one of its ranks sees it that is alone there: enough to build a role."""
    clock = SimClock()
    task = Task(clock, f"rank {rank}", lambda task: None)
    return SimulatedWorld(ranks, rank, SimulatedLinks(clock, None), RankClock(task, {}))
