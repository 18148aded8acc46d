"""The simulated world: determinism, deadlocks, code of users, and faults that show."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch as python_dispatch

import fake_profiles
from advice import advises
from own_strategies import DoublingSync, OppositeGossip, RecursiveDoubling
from paragan.comm.bucket import GRAD_READY, Bucket, Exchange, ExchangeEvent
from paragan.comm.flat_params import FlatParams
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict
from paragan.plan.links import Links, parse_links
from paragan.plan.predict import rank_clock
from paragan.plan.predict.event_loop import Deadlock, SimClock, SimEvent, Task
from paragan.plan.predict.predict import Prediction, predict
from paragan.plan.select.candidates import parse_strategy
from paragan.strategies.base import ExchangedPlayer, PlayerExchange
from paragan.strategies.sync import Sync

LINKS = parse_links("4 hosts, 100 Mbit/s, 5 ms")
BYTES_PER_S = 100e6 / 8
PARAMS = 2_000_000


PROFILE = fake_profiles.make_profile(params=PARAMS)


def predicted(strategy: Any, links: Links = LINKS) -> Prediction:
    run = dataclasses.replace(fake_profiles.make_run(lanes=8, batch=64), strategy=strategy)
    return predict(run, PROFILE, links)


# tasks ----------------------------------------------------------------------------------------------------------------


def test_tasks_take_turns_in_simulated_time():
    clock = SimClock()
    seen: list[tuple[str, float]] = []
    event = SimEvent()

    def first(task: Task) -> None:
        task.sleep(1.0)
        seen.append(("first", clock.now_s))
        task.wait(event, "the second")
        seen.append(("first again", clock.now_s))

    def second(task: Task) -> None:
        task.sleep(0.5)
        seen.append(("second", clock.now_s))
        task.sleep(2.0)
        event.trigger()

    clock.start_task("a", first)
    clock.start_task("b", second)
    clock.run()
    assert seen == [("second", 0.5), ("first", 1.0), ("first again", 2.5)]


def test_a_failing_task_ends_the_others():
    clock = SimClock()
    tasks = [clock.start_task("waits", lambda task: task.wait(SimEvent(), "nothing"))]

    def fail(task: Task) -> None:
        task.sleep(1.0)
        raise ZeroDivisionError("of a task")

    tasks.append(clock.start_task("fails", fail))
    with pytest.raises(ZeroDivisionError, match="of a task"):
        clock.run()
    assert all(task.has_ended for task in tasks)


def test_a_deadlock_names_who_waits_for_what():
    clock = SimClock()
    clock.start_task("rank 0", lambda task: task.wait(SimEvent(), "a message of rank 1"))
    clock.start_task("rank 1", lambda task: task.sleep(3.0))
    with pytest.raises(Deadlock, match=r"^rank 0 waits for a message of rank 1$"):
        clock.run()


def test_a_deadlock_of_many_names_the_first():
    clock = SimClock()
    for rank in range(64):
        clock.start_task(f"rank {rank}", lambda task: task.wait(SimEvent(), "a message"))
    with pytest.raises(Deadlock, match=r"^rank 0 waits .*; rank 3 waits for a message; 60 more wait$"):
        clock.run()


def test_an_interrupt_ends_running_and_waiting_tasks():
    """The running task waits between the interrupt and its own end, because that of the waiting one takes longer."""
    clock = SimClock()

    def end_slowly(task: Task) -> None:
        try:
            task.wait(SimEvent(), "nothing")
        finally:
            time.sleep(0.6)

    def be_interrupted(task: Task) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        task.wait(SimEvent(), "nothing")

    tasks = [clock.start_task("waits", end_slowly), clock.start_task("runs", be_interrupted)]
    with pytest.raises(KeyboardInterrupt):
        clock.run()
    assert all(task.has_ended for task in tasks)


# predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("name", ["sync+int8", "gossip", "async+split=1:3", "async-gossip"])
def test_the_same_question_has_the_same_answer_to_the_bit(name: str):
    first = predicted(parse_strategy(name))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        on_one_core = predicted(parse_strategy(name))
    finally:
        os.sched_setaffinity(0, cores)
    assert first == on_one_core
    assert first.breakdown_s == on_one_core.breakdown_s


class _WaitsForSilence(RecursiveDoubling):
    """Waits for one message more than is sent."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield from super().__call__(bucket, step)
        received = bucket.workspace("received", bucket.grads.numel())
        yield self.group.send_recv({}, {(self.group.rank + 1) % self.group.size: received}, tag=7)


class _NeverEnding(Sync):
    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        return PlayerExchange(_WaitsForSilence(world.all_ranks), world.all_ranks, weight)


def test_a_round_that_never_ends_is_refused():
    with pytest.raises(UsageError, match=r"never ends: rank 0 waits for a message of rank 1 \(tag 7\); rank 1 waits"):
        predicted(_NeverEnding())
    with advises("Let every rank send what others wait for"):
        predicted(_NeverEnding())
    assert predicted(DoublingSync()).step_s > 0  # every message is awaited by the rank that it is for


def test_parts_of_users_are_played():
    """Doubling sends all of a vector twice where a ring sends it 1.5 times; with 5 ms a step, a ring waits longer."""
    sent_bytes = 2 * 4 * sum(PROFILE.num_params)
    doubling = predicted(DoublingSync())
    assert doubling.sent_bytes == pytest.approx(sent_bytes, rel=0.01)
    assert 3 * doubling.messages == predicted(Sync()).messages
    assert sent_bytes / BYTES_PER_S < doubling.step_s < 1.15 * (PROFILE.round_s(64 / 4) + sent_bytes / BYTES_PER_S)
    assert predicted(OppositeGossip()).sent_bytes == pytest.approx(sent_bytes, rel=0.01)


@dataclasses.dataclass(frozen=True)
class _GathersWords:
    """Gathers a word of every rank before each step, through the store."""

    inner: Exchange
    world: World

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        if bucket.index == 0:
            assert self.world.all_gather_str(f"step {step}")[-1] == f"step {step}"
        yield from self.inner(bucket, step)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return self.inner.traffic(n, itemsize)


class _GatheringSync(Sync):
    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        inner = super().player_exchange(player, world, weight)
        return dataclasses.replace(inner, exchange=_GathersWords(inner.exchange, world))


@pytest.mark.parametrize("second_host", ["1 Gbit/s", "900 Mbit/s"])  # equal hosts: one is simulated for all
def test_the_store_takes_round_trips_to_rank_0(second_host: str):
    """Each player writes a word, and looks for that of each rank and reads it: 9 round trips of 10 ms."""
    rates = ["1 Gbit/s", second_host, "1 Gbit/s", "1 Gbit/s"]
    links = from_dict(Links, {"hosts": 4, "up": rates, "down": rates, "latency": "5 ms"})
    waited_s = predicted(_GatheringSync(), links).step_s - predicted(Sync(), links).step_s
    assert waited_s == pytest.approx(2 * 9 * 0.010, rel=0.02)


def test_a_bucket_that_leaves_late_shows(monkeypatch: pytest.MonkeyPatch):
    """FlatParams with a fault: nothing is sent before backward is over."""
    fast = parse_links("4 hosts, 1 Gbit/s, 50 us")
    before = predicted(Sync(), fast).step_s
    resume_ready = FlatParams._resume_ready

    def resume_at_the_end(self: FlatParams) -> None:
        if not any(self._pending_grads):
            resume_ready(self)

    monkeypatch.setattr(FlatParams, "_resume_ready", resume_at_the_end)
    assert predicted(Sync(), fast).step_s > 1.05 * before


def test_no_mode_of_torch_stays_behind():
    """Tasks enter and leave modes in turns; torch.compile looks at a flag of the process."""
    predicted(parse_strategy("gossip"))
    assert not python_dispatch.is_in_torch_dispatch_mode()


# code of users --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exchange:
    """Calls a function with its group, world and bucket, once the gradient is ready."""

    group: Group
    world: World
    function: Callable[[Group, World, Bucket], Work | None]

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield GRAD_READY
        work = self.function(self.group, self.world, bucket)
        if work:
            yield work

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return Traffic(0, 0)


def calling(function: Callable[[Group, World, Bucket], Work | None]) -> Sync:
    """Return a strategy whose exchange calls a function."""

    class Calling(Sync):
        def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
            return PlayerExchange(_Exchange(world.all_ranks, world, function), world.all_ranks, weight)

    return Calling()


def _send_too_much(group: Group, world: World, bucket: Bucket) -> Work:
    received = bucket.workspace("received", 10)
    return group.send_recv({(group.rank + 1) % 4: bucket.grads}, {(group.rank - 1) % 4: received})


def _gather_into_too_little(group: Group, world: World, bucket: Bucket) -> Work:
    return group.all_gather(bucket.grads, torch.empty(3, 5))[1]


def _reduce_different_vectors(group: Group, world: World, bucket: Bucket) -> Work:
    return group.all_reduce_sum(torch.empty(10 + 10 * group.rank))


def _call_different_collectives(group: Group, world: World, bucket: Bucket) -> Work:
    return group.all_gather(bucket.grads)[1] if group.rank else group.all_reduce_sum(bucket.grads)


def _send_to_a_missing_rank(group: Group, world: World, bucket: Bucket) -> Work:
    return group.send_recv({-1: bucket.grads}, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_send_too_much, r"sends \d+ bytes to rank 0, which receives into 40"),
        (_gather_into_too_little, r"all_gather of 4 ranks writes \d+ numbers into 15"),
        (_reduce_different_vectors, "rank 0 calls all_reduce with 40 bytes and rank 1 calls all_reduce with 80 bytes"),
        (_call_different_collectives, "rank 0 calls all_reduce with .* and rank 1 calls all_gather with"),
        (_send_to_a_missing_rank, "rank 0 of 4 exchanges a message with rank -1"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(function: Any, message: str):
    with pytest.raises(UsageError, match=message):
        predicted(calling(function))


def test_ranks_that_do_not_agree_read_what_to_do():
    with advises("Let ranks call the same collectives, and send what others receive"):
        predicted(calling(_send_too_much))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_messages_in_a_thread_of_the_exchange_are_refused():
    def send_in_a_thread(group: Group, world: World, bucket: Bucket) -> None:
        thread = threading.Thread(target=lambda: group.all_reduce_sum(bucket.grads).wait())
        thread.start()
        thread.join()

    with advises("Use the thread that calls the exchange"):
        predicted(calling(send_in_a_thread))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_operations_whose_result_depends_on_numbers():
    """Large vectors have no numbers: they are finite, and what picks some of them is refused."""

    def check_finite(group: Group, world: World, bucket: Bucket) -> Work:
        assert bucket.grads.isfinite().all()
        return group.all_reduce_sum(bucket.grads)

    assert predicted(calling(check_finite)).step_s > 0
    with advises("Use an operation whose result always has the same shape"):
        predicted(calling(lambda group, world, bucket: group.all_reduce_sum(bucket.grads.nonzero())))


def test_a_loop_that_polls_ends():
    def poll(group: Group, world: World, bucket: Bucket) -> Work:
        work = world.make_wait_thread().submit(group.all_reduce_sum(bucket.grads))
        while not work.is_done:
            pass
        return work

    def wait(group: Group, world: World, bucket: Bucket) -> Work:
        return group.all_reduce_sum(bucket.grads)

    assert predicted(calling(poll)).sent_bytes == predicted(calling(wait)).sent_bytes


def test_a_loop_that_polls_for_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    def poll(group: Group, world: World, bucket: Bucket) -> None:
        received = bucket.workspace("received", 10)
        work = world.make_wait_thread().submit(group.send_recv({}, {(group.rank + 1) % 4: received}))
        while not work.is_done:
            pass

    monkeypatch.setattr(rank_clock, "MAX_MOMENTS", 100)
    with pytest.raises(UsageError, match=r"never ends: rank 0 looks 100 times for a message of rank 1 \(tag 0\)"):
        predicted(calling(poll))


def test_random_numbers_of_a_user_leave_those_of_training_as_they_are():
    drawn: list[float] = []

    def draw(group: Group, world: World, bucket: Bucket) -> Work:
        drawn.append(torch.rand(1).item())
        return group.all_reduce_sum(bucket.grads)

    before = torch.get_rng_state()
    predicted(calling(draw))
    assert torch.equal(torch.get_rng_state(), before)
    once = list(drawn)
    drawn.clear()
    predicted(calling(draw))
    assert drawn == once


@pytest.mark.slow
def test_a_rank_may_wait_once_all_have_played_their_rounds():
    """Under asynchronous gossip some ranks play further rounds that others wait for, until all have played theirs."""
    profile = fake_profiles.make_profile(params=144_000, g_s=0.003, d_s=0.003)
    run = dataclasses.replace(
        fake_profiles.make_run(lanes=32, batch=128), strategy=parse_strategy("async-gossip+topology=hypercube")
    )
    for latency in ("0 ms", "50 us", "10 ms"):
        links = parse_links(f"4 hosts of 8 ranks, 200 Mbit/s, {latency}")
        assert predict(run, profile, links).step_s > 0
