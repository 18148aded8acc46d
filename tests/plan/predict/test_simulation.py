"""The simulated world: determinism, deadlocks, code of users, and faults that show."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from typing import Any

import pytest
from torch.utils import _python_dispatch as python_dispatch

import fake_profiles
from advice import advises
from own_strategies import DoublingSync, OppositeGossip, RecursiveDoubling
from paragan.comm.bucket import Bucket, ExchangeEvent
from paragan.comm.flat_params import FlatParams
from paragan.comm.process_group import Work
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.plan.links import Links, parse_links
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


# predictions ----------------------------------------------------------------------------------------------------------


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
