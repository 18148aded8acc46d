"""Groups agree, count what they send, and fail with names."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from paragan.comm.process_group import CommunicationError
from paragan.comm.sockets import duplicate_socket, open_sockets
from paragan.comm.world import World


def test_sum_and_gather(pool):
    def job(world):
        x = torch.arange(5.0) * (world.rank + 1)
        world.all_ranks.all_reduce_sum(x).wait()
        rows, work = world.all_ranks.all_gather(torch.tensor([world.rank, 7]))
        work.wait()
        return x, rows

    for x, rows in pool(3, job):
        assert torch.equal(x, torch.arange(5.0) * 6)
        assert rows.tolist() == [[0, 7], [1, 7], [2, 7]]


def test_solo_needs_no_process_group():
    world = World.solo()
    x = torch.ones(3)
    world.all_ranks.all_reduce_sum(x).wait()
    rows, work = world.all_ranks.all_gather(x)
    work.wait()
    assert rows.shape == (1, 3)
    assert world.all_gather_str("word") == ["word"]
    world.close()


def test_groups_of_some_ranks(pool):
    def job(world):
        groups = [world.new_group([0, 2]), world.new_group([1])]
        mine = next(g for g in groups if g)
        x = torch.tensor([float(world.rank)])
        mine.all_reduce_sum(x).wait()
        return mine.size, mine.rank, x.item()

    assert pool(3, job) == [(2, 0, 2.0), (1, 0, 1.0), (2, 1, 2.0)]


def test_agree_tells_everyone_every_word(pool):
    assert pool(3, lambda world: world.all_gather_str(f"from {world.rank}")) == [["from 0", "from 1", "from 2"]] * 3


def test_a_rank_that_does_not_speak_is_named(pool):
    def job(world):
        if world.rank == 1:
            time.sleep(1)
            return "late"
        with pytest.raises(CommunicationError, match=r"rank 1 did not arrive within 0\.3 s"):
            world.all_gather_str("here", timeout_s=0.3)
        return "named"

    assert pool(3, job) == ["named", "late", "named"]


def test_the_fault_of_one_rank_reaches_the_others_with_rank_and_step(pool):
    def job(world):
        if world.rank == 2:
            return world.report_failure(ValueError("bad pixel"), 41)
        return world.report_failure(CommunicationError("connection closed"), 41)

    answers = pool(3, job)
    assert all(answer == "rank 2, step 41: bad pixel" for answer in answers)


def test_pipes_that_are_not_of_the_world_are_left_alone(pool):
    def job(world):
        world.report_failure(ValueError("bad pixel"), 41)
        handles = filter(None, map(duplicate_socket, open_sockets()))
        pipes = [handle for handle in handles if handle.family == socket.AF_UNIX]  # the pool's
        return [pipe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16) for pipe in pipes]

    for untouched in pool(2, job):
        assert untouched
        assert all(untouched)
