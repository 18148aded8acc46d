"""A request to stop, on any rank at any time, ends all ranks at the same step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

from paragan.comm.process_group import CommunicationError
from paragan.comm.world import World
from paragan.train import shutdown as module
from paragan.train.shutdown import SIGNALS, StopCoordinator, exit_on_signal

REPETITIONS = 30


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("coupled", [True, False], ids=["in step", "each at its own pace"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_stop_at_the_same_step(pool, ranks, coupled):
    def job(world):
        import torch.distributed as dist

        module.POLL_S = 0.01
        stopped = []
        for repetition in range(REPETITIONS):
            store = dist.PrefixStore(f"repetition {repetition}", world.store)
            new_world = World(world.launch_info, world.device, store, world.all_ranks, 20.0)
            rng = random.Random(f"{repetition} {world.rank}")
            with StopCoordinator(new_world) as stop:
                requests = world.rank == repetition % world.size or rng.random() < 0.3  # sometimes several ask
                timer = threading.Timer(rng.uniform(0, 0.05), stop.request, ["the test"])
                if requests:
                    timer.start()
                step = 0
                while not stop.is_due(step):
                    if coupled:
                        world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
                    else:
                        time.sleep(rng.uniform(0, 0.005))
                    step += 1
                stopped.append((step, stop.reason.startswith("the test on rank ")))
                if requests:
                    timer.join()
        return stopped

    first, *others = pool(ranks, job)
    assert others == [first] * (ranks - 1)
    assert all(has_reason for _, has_reason in first)
    assert len({step for step, _ in first}) > 1


def test_one_rank_stops_before_the_next_round():
    with StopCoordinator(World.solo()) as stop:
        assert not stop.is_due(0)
        stop.request("enough")
        assert stop.is_due(1)
        assert stop.reason == "enough"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_signal_handlers_request_a_stop_and_are_restored(number):
    before = signal.getsignal(number)
    with StopCoordinator(World.solo()) as stop:
        signal.raise_signal(number)
        assert stop.is_due(0)
        assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_stops_at_once():
    with StopCoordinator(World.solo()):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def end_timers() -> None:
    """Wait until every timer of this process has run, or was cancelled."""
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(60)
        assert not timer.is_alive()


def test_a_stop_that_waits_for_a_long_round_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(module, "ROUND_NOTICE_S", 0.05)
    with StopCoordinator(World.solo()):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            end_timers()
    notice = "paragan: SIGTERM: this round ends first, then a checkpoint is written; Ctrl-C stops at once\n"
    assert capsys.readouterr().err == notice


def test_a_stop_after_a_short_round_needs_no_notice(monkeypatch, capsys):
    monkeypatch.setattr(module, "ROUND_NOTICE_S", 3600)
    with StopCoordinator(World.solo()):
        signal.raise_signal(signal.SIGINT)
    end_timers()
    assert capsys.readouterr().err == ""


def test_a_rank_that_does_not_answer_times_out(pool):
    def job(world):
        module.POLL_S = 0.01
        world.timeout_s = 0.5
        if world.rank == 1:
            return "silent"
        with StopCoordinator(world) as stop:
            stop.request("enough")
            with pytest.raises(CommunicationError, match="did not answer"):
                play(stop)
        return "gave up"

    def play(stop):
        for step in range(500):
            if stop.is_due(step):
                return
            time.sleep(0.01)

    assert pool(2, job) == ["gave up", "silent"]


def killed_inside(number):
    with exit_on_signal():
        os.kill(os.getpid(), number)
        time.sleep(5)


def test_a_signal_outside_of_training_exits_at_once():
    before = [signal.getsignal(s) for s in SIGNALS]
    for number in SIGNALS:
        with pytest.raises(KeyboardInterrupt, match=f"{number.name} while nothing was being trained"):
            killed_inside(number)
    assert [signal.getsignal(s) for s in SIGNALS] == before
