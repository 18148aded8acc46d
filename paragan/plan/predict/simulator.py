"""Simulate some rounds of all ranks: turns take time, exchanges send messages, and ports are shared.

The order of work follows game/turn.py, comm/flat_params.py, game/remote_opponents.py and comm/async_gossip.py line by
line. What is sent comes from the recorded exchanges (plan/predict/exchange_trace.py). Nothing is random unless
`slowdown` is.
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

Slowdown = Callable[[int, int], float]  # (rank, round) -> factor on its computing time
COUNTER_BYTES = 8  # of a round's number
MAX_MESSAGES = 60_000  # bound on the simulated messages of all collectives
MIN_SEGMENTS = 8  # of each collective


@dataclass(frozen=True)
class YieldedWait:
    """What an exchange yields to wait for."""

    awaited: ExchangeEvent | SimEvent


ExchangeProcess = Generator[float | SimEvent | YieldedWait]


@dataclass(frozen=True)
class RankTimeline:
    """What one rank did in the timed rounds."""

    start_s: float  # since the beginning of the simulation
    end_s: float
    rounds_s: tuple[float, ...]
    compute_s: float
    codec_s: float
    sent_bytes: int
    staleness_rounds: tuple[int, ...]  # ages of the states of others that it used


def no_jitter(rank: int, step: int) -> float:
    """Default slowdown: none."""
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
    """Simulate rounds of all ranks.

    Args:
        schedules: of all ranks, or of those of the first host if all hosts do the same (`Network.symmetric`).
        links: between hosts.
        ranks: of the run.
        rounds: numbers of the rounds.
        codec_cost: seconds per number, by operation (plan/profile/codec_cost.py).
        warm_up_rounds: rounds at the beginning that are not timed.
        slowdown: (rank, round) -> factor on the computing time.
    """
    clock = SimClock()
    max_segments = _max_segments(schedules, len(rounds))
    network = Network(clock, links, ranks, symmetric=len(schedules) < ranks, max_segments=max_segments)
    sim_ranks = [SimRank(schedule, clock, network, codec_cost, slowdown) for schedule in schedules]
    unfinished = {schedule.rank for schedule in schedules}
    for sim_rank in sim_ranks:
        clock.start_process(sim_rank.play(rounds, unfinished))
    clock.run()
    assert not unfinished, "deadlock: ranks wait for messages that are never sent"
    return [sim_rank.timeline(warm_up_rounds) for sim_rank in sim_ranks]


def _max_segments(schedules: Sequence[RankSchedule], num_rounds: int) -> int:
    """Return the segments per collective that keep the number of messages in bounds."""
    buckets = sum(len(turn.buckets_ready_s) for group in schedules[0].turn_groups for turn in group)
    return max(MIN_SEGMENTS, MAX_MESSAGES // (2 * num_rounds * buckets * len(schedules)))


class SimRank:
    """One simulated rank."""

    def __init__(
        self,
        schedule: RankSchedule,
        clock: SimClock,
        network: Network,
        codec_cost: Mapping[str, float],
        slowdown: Slowdown,
    ):
        self.schedule = schedule
        self.clock = clock
        self.network = network
        self.codec_cost = codec_cost
        self.slowdown = slowdown
        self.exchanges: dict[PlayerName, SimExchanges] = {}
        for group in schedule.turn_groups:
            for turn in group:
                self.exchanges.setdefault(turn.player, SimExchanges(self, turn.player, len(turn.buckets_ready_s)))
        self.team_links = SimTeamLinks(self, schedule.team_messages) if schedule.team_messages else None
        self.compute_s = 0.0
        self.codec_s = 0.0
        self._marks: list[tuple[float, float, float, int]] = []  # time, compute, codec, sent bytes after each round
        self.staleness_rounds: list[int] = []
        self._threads: dict[tuple[int, ...], SimThreads] = {}
        self._counts: dict[tuple[int, ...], int] = {}

    def play(self, rounds: range, unfinished: set[int]) -> Process:
        """Play rounds. With asynchronous links, play more of them until all `unfinished` ranks are done.

        Others may wait for what this rank sends in later rounds.
        """
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
        self._marks.append((self.clock.now_s, self.compute_s, self.codec_s, sent))

    def timeline(self, warm_up_rounds: int) -> RankTimeline:
        """Return what the rank did after the first `warm_up_rounds` rounds."""
        start_s, start_compute_s, start_codec_s, start_bytes = self._marks[warm_up_rounds]
        end_s, end_compute_s, end_codec_s, end_bytes = self._marks[-1]
        ends = [mark[0] for mark in self._marks[warm_up_rounds:]]
        return RankTimeline(
            start_s=start_s,
            end_s=end_s,
            rounds_s=tuple(b - a for a, b in itertools.pairwise(ends)),
            compute_s=end_compute_s - start_compute_s,
            codec_s=end_codec_s - start_codec_s,
            sent_bytes=end_bytes - start_bytes,
            staleness_rounds=tuple(self.staleness_rounds[warm_up_rounds:]),
        )

    # Time -------------------------------------------------------------------------------------------------------------

    def compute(self, seconds: float, factor: float) -> Iterator[float]:
        """Compute for `factor` times `seconds`."""
        self.compute_s += factor * seconds
        yield factor * seconds

    def run_codec(self, numel_by_op: Mapping[str, int]) -> Iterator[float]:
        """Spend the time that exchanges compute, by operation and numbers."""
        seconds = sum(numel * codec_s_per_number(self.codec_cost, op) for op, numel in numel_by_op.items())
        self.codec_s += seconds
        yield seconds

    # Messages ---------------------------------------------------------------------------------------------------------

    def start_message(self, message: Message) -> SimEvent:
        """Start a message or collective. The returned event is triggered when it is done."""
        if message.kind == "send_recv":
            return self.send_recv((message.members, message.tag), message.send_bytes, message.recv_bytes)
        threads = self._threads.setdefault(message.members, SimThreads(self.clock, MAX_IN_FLIGHT))
        number = self._counts.get(message.members, 0) + 1
        self._counts[message.members] = number
        key = (message.members, number)
        index = message.members.index(self.schedule.rank)
        if message.kind == "all_reduce":
            reduce_s = codec_s_per_number(self.codec_cost, "pass") / 4
            return threads.submit(all_reduce(self.network, message.members, index, key, message.nbytes, reduce_s))
        collective = all_gather if message.kind == "all_gather" else all_to_all
        return threads.submit(collective(self.network, message.members, index, key, message.nbytes))

    def send_recv(self, key: MessageKey, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]) -> SimEvent:
        """Exchange messages with other ranks. The returned event is triggered when all are done."""
        own_rank = self.schedule.rank
        events = [self.network.recv(rank, own_rank, key) for rank in recv_bytes]
        events += [self.network.send(own_rank, rank, key, nbytes) for rank, nbytes in send_bytes.items()]
        return self.clock.start_process(_wait_all(events))

    # The round (game/turn.py) -----------------------------------------------------------------------------------------

    def _play_round(self, step: int) -> Process:
        factor = self.slowdown(self.schedule.rank, step)
        turns = [turn for group in self.schedule.turn_groups for turn in group]
        players: dict[PlayerName, None] = dict.fromkeys(turn.player for turn in reversed(turns))
        for player in reversed(players):
            yield from self.exchanges[player].start(step)
        for group in self.schedule.turn_groups:
            yield from self._play_turn_group(group, step, factor)
        if self.team_links:
            yield from self.team_links.send_snapshot(step)

    def _play_turn_group(self, turn_group: Sequence[TurnTiming], step: int, factor: float) -> Process:
        moments_sums = list[SimEvent]()
        for turn in turn_group:
            yield from self.exchanges[turn.player].start_turn(step)
        for turn in turn_group:
            moments_sums += yield from self._play_turn(turn, step, factor)
        for turn in reversed(turn_group):
            yield from self.exchanges[turn.player].receive()
        for turn in turn_group:
            yield from self.exchanges[turn.player].finish()
            yield from self.compute(turn.total_s - turn.backward_s, factor)
        yield from moments_sums

    def _play_turn(
        self, timing: TurnTiming, step: int, factor: float
    ) -> Generator[float | SimEvent, None, list[SimEvent]]:
        """Play the forward and backward pass. Returns the sum of batch moments that is in flight."""
        done_s = 0.0
        moments_sums = list[SimEvent]()
        if self.team_links and timing.player == "D":
            yield from self.team_links.receive_fakes(step)
        if self.team_links and timing.player == "G":
            yield from self.compute(timing.fakes_ready_s, factor)
            done_s = timing.fakes_ready_s
            yield from self.team_links.send_fakes_receive_snapshot(step)
        if timing.moments_bytes:
            yield from self.compute(timing.forward_s - done_s, factor)
            done_s = timing.forward_s
            moments_sums.append(self.start_message(Message(0, "all_reduce", timing.team, nbytes=timing.moments_bytes)))
        for bucket, ready_s in enumerate(timing.buckets_ready_s):
            yield from self.compute(max(0.0, ready_s - done_s), factor)
            done_s = max(ready_s, done_s)
            yield from self.exchanges[timing.player].mark_grad_ready(bucket)
        yield from self.compute(timing.backward_s - done_s, factor)
        return moments_sums


class SimExchanges:
    """The exchanges of one player on its buckets (comm/flat_params.py)."""

    def __init__(self, rank: SimRank, player: PlayerName, buckets: int):
        self.rank = rank
        self.player: PlayerName = player
        links = rank.schedule.async_links.get(player)
        self.async_buckets = [SimAsyncBucket(rank, links, i) for i in range(buckets)] if links else None
        self._running: list[ExchangeProcess] = []
        self._awaited: list[ExchangeEvent | SimEvent | None] = []

    def start(self, step: int, *, is_first_turn: bool = True) -> Process:
        """Start the exchanges at the beginning of a round, or of a later turn."""
        if self.async_buckets:
            self._running = [bucket.exchange(step) for bucket in self.async_buckets]
        else:
            bucket_ops = self.rank.schedule.exchange_ops(self.player, step, is_first_turn)
            self._running = [self._run_ops(ops) for ops in bucket_ops]
        self._awaited = [None] * len(self._running)
        for i in range(len(self._running)):
            yield from self._advance(i)

    def _run_ops(self, ops: TraceOps) -> ExchangeProcess:
        messages: dict[int, SimEvent] = {}
        for op in ops:
            match op:
                case Compute():
                    yield from self.rank.run_codec(op.numel_by_op)
                case Message():
                    messages[op.message_id] = self.rank.start_message(op)
                case WaitEvent():
                    yield YieldedWait(op.event)
                case WaitMessage():
                    done = messages[op.message_id]
                    yield done if op.blocking else YieldedWait(done)

    def _advance(self, i: int) -> Process:
        """Run one exchange until it waits for something, or has ended."""
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
        """Continue the exchanges that wait for the beginning of the turn."""
        if not self._running:
            yield from self.start(step, is_first_turn=False)
        for i in range(len(self._running)):
            yield from self._advance_past(i, TURN_STARTED)

    def mark_grad_ready(self, i: int) -> Process:
        """Continue the exchange of bucket `i`, whose gradient is ready."""
        yield from self._advance_past(i, GRAD_READY)

    def receive(self) -> Process:
        """Continue the exchanges in turns until each waits for ALL_RECEIVED, or has ended."""
        queue = deque(range(len(self._running)))
        while queue:
            i = queue.popleft()
            awaited = self._awaited[i]
            if awaited is None or awaited is ALL_RECEIVED:
                continue
            if isinstance(awaited, SimEvent):
                yield awaited
            yield from self._advance(i)
            queue.append(i)

    def finish(self) -> Process:
        """Run the exchanges to their end."""
        for i in range(len(self._running)):
            while self._awaited[i] is not None:
                yield from self._advance(i)
        self._running = []


class SimAsyncBucket:
    """One bucket's asynchronous swaps with neighbors (comm/async_gossip.py)."""

    def __init__(self, rank: SimRank, links: AsyncLinks, bucket: int):
        self.rank = rank
        self.links = links
        self.bucket = bucket
        self._swaps: dict[int, tuple[int, SimEvent]] = {}  # by neighbor: the step of its start, and its end

    def exchange(self, step: int) -> ExchangeProcess:
        """Start swaps, wait for those that are too old, and mix those that are done."""
        if (step + 1) % self.links.sync_period:
            return
        numel = self.links.bucket_numels[self.bucket]
        now = step // self.links.sync_period
        for j in self.links.neighbors:
            if j not in self._swaps:
                yield from self.rank.run_codec({"pass": numel})
                key = (tuple(sorted((j, self.rank.schedule.rank))), self.links.tag + self.bucket)
                self._swaps[j] = now, self.rank.send_recv(key, {j: 4 * numel}, {j: 4 * numel})
        for j in self.links.neighbors:
            started, done = self._swaps[j]
            if now - started >= self.links.max_staleness:
                yield YieldedWait(done)
        yield YieldedWait(ALL_RECEIVED)
        for j in self.links.neighbors:
            started, done = self._swaps[j]
            if done.triggered:
                del self._swaps[j]
                self.rank.staleness_rounds.append(now - started)
                yield from self.rank.run_codec({"pass": 2 * numel})


class SimTeamLinks:
    """Messages between the teams of G and D (game/remote_opponents.py)."""

    def __init__(self, rank: SimRank, messages: TeamMessages):
        self.rank = rank
        self.messages = messages
        self._recv_queues = [SimRecvQueue(rank, sender, "images") for sender in messages.image_bytes_from]
        self._recv_queues += [SimRecvQueue(rank, sender, "snapshots") for sender in messages.snapshot_sources]
        self._snapshot_version: int | None = None
        self._newest_snapshot = 0
        self._newest_images = -1
        self._last_d_step = -1

    def receive_fakes(self, step: int) -> Process:
        """At the beginning of D's turn: receive the newest images that all ranks of the team have."""
        if step == self._last_d_step:
            return
        self._last_d_step = step
        needed = step - self.messages.max_lead_rounds + 1 if self._newest_images >= 0 else step
        newest = list[int]()
        for queue in self._recv_queues:
            yield from queue.receive(step, needed)
            newest.append(min(step, queue.newest))
        yield from self._gather_counter()
        self._newest_images = min(newest)
        self.rank.staleness_rounds.append(step - self._newest_images)

    def send_fakes_receive_snapshot(self, step: int) -> Process:
        """When G has made its images: send them, and receive the newest D that all ranks of the team have."""
        for rank, nbytes in self.messages.image_bytes_to.items():
            self.rank.network.send(self.rank.schedule.rank, rank, self._message_key(rank, "images"), nbytes)
        period = self.messages.snapshot_period
        for queue in self._recv_queues:
            yield from queue.receive(step, step - self.messages.max_lead_rounds)
            self._newest_snapshot = (queue.newest + 1) // period * period
        if self._snapshot_version is None:
            self._snapshot_version = step
        version = max(self._snapshot_version, min(self._newest_snapshot, step))
        yield from self._gather_counter()
        if version > self._snapshot_version:
            yield from self.rank.run_codec(self.messages.load_numel_by_op)
            self._snapshot_version = version
        self.rank.staleness_rounds.append(step - self._snapshot_version)

    def _gather_counter(self) -> Process:
        if len(self.messages.team) > 1:
            yield self.rank.start_message(Message(0, "all_gather", self.messages.team, nbytes=COUNTER_BYTES))

    def send_snapshot(self, step: int) -> Process:
        """After D's step: send its snapshot if one is due, else a byte that says that there is none."""
        is_due = (step + 1) % self.messages.snapshot_period == 0
        if self.messages.snapshot_targets and is_due:
            yield from self.rank.run_codec(self.messages.pack_numel_by_op)
        for rank in self.messages.snapshot_targets:
            nbytes = self.messages.snapshot_bytes if is_due else 1
            self.rank.network.send(self.rank.schedule.rank, rank, self._message_key(rank, "snapshots"), nbytes)

    def _message_key(self, other: int, content: str) -> MessageKey:
        return tuple(sorted((other, self.rank.schedule.rank))), content


class SimRecvQueue:
    """Numbered messages of another rank (comm/mailbox.py)."""

    def __init__(self, rank: SimRank, sender: int, content: str):
        self.rank = rank
        self.sender = sender
        self.key = tuple(sorted((sender, rank.schedule.rank))), content
        self.newest = -1
        self._pending = deque[tuple[int, SimEvent]]()
        self._next_number: int | None = None

    def receive(self, until: int, wait_until: int) -> Process:
        """Request messages up to number `until`. Wait for those up to `wait_until`; take later ones that are here."""
        first = until if self._next_number is None else self._next_number
        for number in range(first, until + 1):
            self._pending.append((number, self.rank.network.recv(self.sender, self.rank.schedule.rank, self.key)))
        self._next_number = max(first, until + 1)
        while self._pending and (self._pending[0][0] <= wait_until or self._pending[0][1].triggered):
            number, received = self._pending.popleft()
            yield received
            self.newest = number


def _wait_all(events: Sequence[SimEvent]) -> Process:
    yield from events


def codec_s_per_number(codec_cost: Mapping[str, float], op: str) -> float:
    """Return the seconds per number of an operation: of "int8/encode", else of "encode", else 0."""
    return codec_cost.get(op, codec_cost.get(op.rpartition("/")[2], 0.0))
