"""A run of some rounds in counted time: every rank plays its turns, its exchanges send, and ports are shared.

What is played follows game/turn.py, comm/flat.py, game/posted.py and comm/late.py line by line; what is sent, the
exchanges' own scripts (plan/foreseen/script.py). Nothing is random unless `pace` is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, ExchangeEvent
from paragan.plan.links import Links
from paragan.plan.predict.event_loop import Process, SimClock, SimEvent, SimThreads
from paragan.plan.predict.exchange_trace import Compute, Message, TraceOps, WaitEvent, WaitMessage
from paragan.plan.predict.network import MAX_IN_FLIGHT, MessageKey, Network, all_gather, all_reduce, all_to_all
from paragan.plan.predict.rank_schedule import AsyncLinks, PlayerName, RankSchedule, TeamMessages, TurnTiming

Slowdown = Callable[[int, int], float]  # (rank, round) -> the factor on its computing
COUNTER_BYTES = 8  # bytes of a round's number
MAX_MESSAGES, MIN_SEGMENTS = 60_000, 8  # of collectives that are played one by one; segments of each, at least


@dataclass(frozen=True)
class YieldedWait:
    """What an exchange waits for."""

    awaited: ExchangeEvent | SimEvent


ExchangeProcess = Generator[float | SimEvent | YieldedWait]


@dataclass(frozen=True)
class RankTimeline:
    """Of one rank, in the rounds that counted: seconds since the beginning when they began and ended; seconds spent;
    bytes sent; the mean age of what it saw, in rounds."""

    start_s: float
    end_s: float
    rounds_s: tuple[float, ...]
    compute_s: float
    codec_s: float
    sent_bytes: int
    staleness_rounds: tuple[int, ...]


def no_jitter(rank: int, step: int) -> float:
    return 1.0


def simulate_rounds(
    schedules: Sequence[RankSchedule],
    links: Links,
    ranks: int,
    rounds: range,
    codec_cost: Mapping[str, float],
    *,
    warm_up_rounds: int = 2,
    slowdown: Slowdown = no_jitter,
) -> list[RankTimeline]:
    """Play the rounds on every seat; the first `warm_up` do not count. Where only the first host is seated, the others
    are taken to do the same (`network.folded`)."""
    clock = SimClock()
    network = Network(
        clock, links, ranks, symmetric=len(schedules) < ranks, max_segments=_max_segments(schedules, len(rounds))
    )
    players = [SimRank(seat, clock, network, codec_cost, slowdown) for seat in schedules]
    under_way = {seat.rank for seat in schedules}
    for player in players:
        clock.start_process(player.play(rounds, under_way))
    clock.run()
    assert not under_way, "ranks wait for what never comes"
    return [player.timeline(warm_up_rounds) for player in players]


def _max_segments(schedules: Sequence[RankSchedule], num_rounds: int) -> int:
    """As many segments of a collective as leave a bounded number of messages in all."""
    buckets = sum(len(part.buckets_ready_s) for beat in schedules[0].turn_groups for part in beat)
    return max(MIN_SEGMENTS, MAX_MESSAGES // (2 * num_rounds * buckets * len(schedules)))


class SimRank:
    """One rank, playing."""

    def __init__(
        self,
        schedule: RankSchedule,
        clock: SimClock,
        network: Network,
        codec_cost: Mapping[str, float],
        slowdown: Slowdown,
    ):
        self.schedule, self.clock, self.network, self.codec_cost, self.slowdown = (
            schedule,
            clock,
            network,
            codec_cost,
            slowdown,
        )
        self.exchanges: dict[PlayerName, SimExchanges] = {}
        for part in (part for beat in schedule.turn_groups for part in beat):
            self.exchanges.setdefault(part.player, SimExchanges(self, part.player, len(part.buckets_ready_s)))
        self.team_links = SimTeamLinks(self, schedule.team_messages) if schedule.team_messages else None
        self.compute_s = self.codec_s = 0.0
        self.marks: list[tuple[float, float, float, int]] = []
        self.staleness_rounds: list[int] = []
        self._threads: dict[tuple[int, ...], SimThreads] = {}
        self._counts: dict[tuple[int, ...], int] = {}

    def play(self, rounds: range, unfinished: set[int]) -> Process:
        """under_way: the ranks whose rounds are not over. Where links lag others may still wait for what this one sends
        in rounds to come."""
        self._mark()
        for step in rounds:
            yield from self._play_round(step)
            self._mark()
        unfinished.discard(self.schedule.rank)
        step = rounds.stop
        while self.schedule.async_links and unfinished:
            yield from self._play_round(step)
            step += 1

    def _mark(self) -> None:
        sent = self.network.sent_bytes.get(self.schedule.rank, 0)
        self.marks.append((self.clock.now_s, self.compute_s, self.codec_s, sent))

    def timeline(self, warm_up_rounds: int) -> RankTimeline:
        first, last = self.marks[warm_up_rounds], self.marks[-1]
        began, computing, handling, sent = first
        ends = [mark[0] for mark in self.marks[warm_up_rounds:]]
        return RankTimeline(
            began,
            last[0],
            tuple(b - a for a, b in itertools.pairwise(ends)),
            last[1] - computing,
            last[2] - handling,
            last[3] - sent,
            tuple(self.staleness_rounds[warm_up_rounds:]),
        )

    # time -------------------------------------------------------------------------------------------------------------

    def compute(self, seconds: float, factor: float) -> Iterator[float]:
        self.compute_s += factor * seconds
        yield factor * seconds

    def run_codec(self, numel_by_op: Mapping[str, int]) -> Iterator[float]:
        seconds = sum(count * codec_s_per_number(self.codec_cost, what) for what, count in numel_by_op.items())
        self.codec_s += seconds
        yield seconds

    # messages ---------------------------------------------------------------------------------------------------------

    def start_message(self, message: Message) -> SimEvent:
        if message.kind == "send_recv":
            return self.send_recv((message.members, message.tag), message.send_bytes, message.recv_bytes)
        threads = self._threads.setdefault(message.members, SimThreads(self.clock, MAX_IN_FLIGHT))
        number = self._counts[message.members] = self._counts.get(message.members, 0) + 1
        me, key = message.members.index(self.schedule.rank), (message.members, number)
        if message.kind == "all_reduce":
            return threads.submit(
                all_reduce(
                    self.network,
                    message.members,
                    me,
                    key,
                    message.nbytes,
                    codec_s_per_number(self.codec_cost, "pass") / 4,
                )
            )
        play = all_gather if message.kind == "all_gather" else all_to_all
        return threads.submit(play(self.network, message.members, me, key, message.nbytes))

    def send_recv(self, key: MessageKey, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]) -> SimEvent:
        own = self.schedule.rank
        under_way = [self.network.recv(rank, own, key) for rank in recv_bytes]
        under_way += [self.network.send(own, rank, key, nbytes) for rank, nbytes in send_bytes.items()]
        return self.clock.start_process(_wait_all(under_way))

    # the round (game/turn.py) -----------------------------------------------------------------------------------------

    def _play_round(self, step: int) -> Process:
        factor = self.slowdown(self.schedule.rank, step)
        parts = [part for beat in self.schedule.turn_groups for part in beat]
        first: dict[PlayerName, TurnTiming] = {part.player: part for part in reversed(parts)}
        for player in reversed(first):
            yield from self.exchanges[player].start(step)
        for beat in self.schedule.turn_groups:
            yield from self._play_turn_group(beat, step, factor)
        if self.team_links:
            yield from self.team_links.send_snapshot(step)

    def _play_turn_group(self, turn_group: Sequence[TurnTiming], step: int, factor: float) -> Process:
        sums = list[SimEvent]()
        for part in turn_group:
            yield from self.exchanges[part.player].start_turn(step)
        for part in turn_group:
            sums += yield from self._play_turn(part, step, factor)
        for part in reversed(turn_group):
            yield from self.exchanges[part.player].receive()
        for part in turn_group:
            yield from self.exchanges[part.player].finish()
            yield from self.compute(part.total_s - part.backward_s, factor)
        yield from sums

    def _play_turn(
        self, timing: TurnTiming, step: int, factor: float
    ) -> Generator[float | SimEvent, None, list[SimEvent]]:
        """Forward and backward. Returns the sum of moments that is under way."""
        done, sums = 0.0, list[SimEvent]()
        if self.team_links and timing.player == "D":
            yield from self.team_links.receive_fakes(step)
        if self.team_links and timing.player == "G":
            yield from self.compute(timing.fakes_ready_s, factor)
            done = timing.fakes_ready_s
            yield from self.team_links.send_fakes_receive_snapshot(step)
        if timing.moments_bytes:
            yield from self.compute(timing.forward_s - done, factor)
            done = timing.forward_s
            sums.append(self.start_message(Message(0, "all_reduce", timing.team, nbytes=timing.moments_bytes)))
        for bucket, at in enumerate(timing.buckets_ready_s):
            yield from self.compute(max(0.0, at - done), factor)
            done = max(at, done)
            yield from self.exchanges[timing.player].mark_grad_ready(bucket)
        yield from self.compute(timing.backward_s - done, factor)
        return sums


class SimExchanges:
    """One player's exchanges (comm/flat.py)."""

    def __init__(self, rank: SimRank, player: PlayerName, buckets: int):
        self.rank = rank
        self.player: PlayerName = player
        lagging = rank.schedule.async_links.get(player)
        self.async_buckets = [SimAsyncBucket(rank, lagging, i) for i in range(buckets)] if lagging else None
        self._running: list[ExchangeProcess] = []
        self._awaited: list[ExchangeEvent | SimEvent | None] = []

    def start(self, step: int) -> Process:
        if self.async_buckets:
            self._running = [late.exchange(step) for late in self.async_buckets]
        else:
            self._running = [self._run_ops(script) for script in self.rank.schedule.exchange_ops(self.player, step)]
        self._awaited = [None] * len(self._running)
        for i in range(len(self._running)):
            yield from self._advance(i)

    def _run_ops(self, ops: TraceOps) -> ExchangeProcess:
        works: dict[int, SimEvent] = {}
        for act in ops:
            if isinstance(act, Compute):
                yield from self.rank.run_codec(act.numel_by_op)
            elif isinstance(act, Message):
                works[act.message_id] = self.rank.start_message(act)
            elif isinstance(act, WaitEvent):
                yield YieldedWait(act.event)
            elif isinstance(act, WaitMessage):
                yield works[act.message_id] if act.blocking else YieldedWait(works[act.message_id])

    def _advance(self, i: int) -> Process:
        """Until it waits for something, or has ended."""
        for awaited in self._running[i]:
            if isinstance(awaited, YieldedWait):
                self._awaited[i] = awaited.awaited
                return
            yield awaited
        self._awaited[i] = None

    def _advance_past(self, i: int, event: ExchangeEvent) -> Process:
        while self._awaited[i] is event:
            yield from self._advance(i)

    def start_turn(self, step: int) -> Process:
        if not self._running:
            yield from self.start(step)
        for i in range(len(self._running)):
            yield from self._advance_past(i, TURN_STARTED)

    def mark_grad_ready(self, i: int) -> Process:
        yield from self._advance_past(i, GRAD_READY)

    def receive(self) -> Process:
        under_way = deque(range(len(self._running)))
        while under_way:
            i = under_way.popleft()
            awaited = self._awaited[i]
            if awaited is None or awaited is ALL_RECEIVED:
                continue
            if isinstance(awaited, SimEvent):
                yield awaited
            yield from self._advance(i)
            under_way.append(i)

    def finish(self) -> Process:
        for i in range(len(self._running)):
            while self._awaited[i] is not None:
                yield from self._advance(i)
        self._running = []


class SimAsyncBucket:
    """One bucket's swaps with neighbours that may lag (comm/late.py)."""

    def __init__(self, rank: SimRank, links: AsyncLinks, bucket: int):
        self.rank, self.links, self.bucket = rank, links, bucket
        self._swaps: dict[int, tuple[int, SimEvent]] = {}  # when begun, and whether it is over

    def exchange(self, step: int) -> ExchangeProcess:
        if (step + 1) % self.links.sync_period:
            return
        n, age = self.links.bucket_numels[self.bucket], step // self.links.sync_period
        for j in self.links.neighbors:
            if j not in self._swaps:
                yield from self.rank.run_codec({"pass": n})
                key = (tuple(sorted((j, self.rank.schedule.rank))), self.links.tag + self.bucket)
                self._swaps[j] = age, self.rank.send_recv(key, {j: 4 * n}, {j: 4 * n})
        for j in self.links.neighbors:
            begun, over = self._swaps[j]
            if age - begun >= self.links.max_staleness:
                yield YieldedWait(over)
        yield YieldedWait(ALL_RECEIVED)
        for j in self.links.neighbors:
            begun, over = self._swaps[j]
            if over.triggered:
                del self._swaps[j]
                self.rank.staleness_rounds.append(age - begun)
                yield from self.rank.run_codec({"pass": 2 * n})


class SimTeamLinks:
    """What the other team posts (game/posted.py)."""

    def __init__(self, rank: SimRank, messages: TeamMessages):
        self.rank, self.messages = rank, messages
        self._recv_queues = {(sender, what): SimRecvQueue(rank, sender, what) for sender, what in self._list_senders()}
        self._snapshot_version: int | None = None
        self._newest_snapshot = 0
        self._newest_images = -1
        self._last_d_step = -1

    def _list_senders(self) -> list[tuple[int, str]]:
        images = [(sender, "images") for sender in self.messages.image_bytes_from]
        return images + [(sender, "snapshots") for sender in self.messages.snapshot_sources]

    def receive_fakes(self, step: int) -> Process:
        """D's turn begins: the newest images that all of the team have."""
        if step == self._last_d_step:
            return
        self._last_d_step = step
        needed = step - self.messages.max_lead_rounds + 1 if self._newest_images >= 0 else step
        newest = list[int]()
        for inbox in self._recv_queues.values():
            yield from inbox.receive(step, needed)
            newest.append(min(step, inbox.newest))
        yield from self._gather_counter()
        self._newest_images = min(newest)
        self.rank.staleness_rounds.append(step - self._newest_images)

    def send_fakes_receive_snapshot(self, step: int) -> Process:
        """G has made its images: they leave; then the newest D that all of the team have."""
        for rank, nbytes in self.messages.image_bytes_to.items():
            self.rank.network.send(self.rank.schedule.rank, rank, self._message_key(rank, "images"), nbytes)
        for inbox in self._recv_queues.values():
            yield from inbox.receive(step, step - self.messages.max_lead_rounds)
            self._newest_snapshot = (inbox.newest + 1) // self.messages.snapshot_period * self.messages.snapshot_period
        if self._snapshot_version is None:
            self._snapshot_version = step
        newer = max(self._snapshot_version, min(self._newest_snapshot, step))
        yield from self._gather_counter()
        if newer > self._snapshot_version:
            yield from self.rank.run_codec(self.messages.load_numel_by_op)
            self._snapshot_version = newer
        self.rank.staleness_rounds.append(step - self._snapshot_version)

    def _gather_counter(self) -> Process:
        if len(self.messages.team) > 1:
            yield self.rank.start_message(Message(0, "all_gather", self.messages.team, nbytes=COUNTER_BYTES))

    def send_snapshot(self, step: int) -> Process:
        """D has moved: its snapshot leaves, where one is due, or a word that none is."""
        due = (step + 1) % self.messages.snapshot_period == 0
        if self.messages.snapshot_targets and due:
            yield from self.rank.run_codec(self.messages.pack_numel_by_op)
        for rank in self.messages.snapshot_targets:
            nbytes = self.messages.snapshot_bytes if due else 1
            self.rank.network.send(self.rank.schedule.rank, rank, self._message_key(rank, "snapshots"), nbytes)

    def _message_key(self, other: int, what: str) -> MessageKey:
        return tuple(sorted((other, self.rank.schedule.rank))), what


class SimRecvQueue:
    """Numbered messages of another rank (comm/mail.py)."""

    def __init__(self, rank: SimRank, sender: int, what: str):
        self.rank, self.sender = rank, sender
        self.key = tuple(sorted((sender, rank.schedule.rank))), what
        self.newest = -1
        self._pending = deque[tuple[int, SimEvent]]()
        self._next_number: int | None = None

    def receive(self, until: int, wait_until: int) -> Process:
        first = until if self._next_number is None else self._next_number
        for number in range(first, until + 1):
            self._pending.append((number, self.rank.network.recv(self.sender, self.rank.schedule.rank, self.key)))
        self._next_number = max(first, until + 1)
        while self._pending and (self._pending[0][0] <= wait_until or self._pending[0][1].triggered):
            number, here = self._pending.popleft()
            yield here
            self.newest = number


def _wait_all(events: Sequence[SimEvent]) -> Process:
    yield from events


def codec_s_per_number(codec_cost: Mapping[str, float], op: str) -> float:
    """Seconds for a number: of this wire, or of any."""
    return codec_cost.get(op, codec_cost.get(op.rpartition("/")[2], 0.0))
