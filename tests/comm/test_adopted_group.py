"""Worlds among the ranks of a process group that somebody else has formed."""

from __future__ import annotations

import pytest
import torch

import tiny_run
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import CommunicationError, c10d
from paragan.comm.world import World
from paragan.train.run_dir_selection import RunDirRequest
from paragan.train.trainer import TrainJob

CPU = torch.device("cpu")


def sum_over(group):
    x = torch.tensor([1.0 + c10d.get_rank()])
    group(x)
    return x.item()


def test_a_group_that_exists_is_used_and_left_as_it_is(in_foreign_group):
    def job():
        with World.join(LaunchInfo(), CPU, 20.0) as world:  # no launcher's variables: a notebook, Ray
            sums = sum_over(lambda x: world.all_ranks.all_reduce_sum(x).wait()), sum_over(c10d.all_reduce)
            texts = world.all_gather_str(f"rank {world.rank} of {world.size}")
        return sums, texts, sum_over(c10d.all_reduce), c10d.is_initialized()

    texts = [f"rank {rank} of 3" for rank in range(3)]
    assert in_foreign_group(3, job) == [((6.0, 6.0), texts, 6.0, True)] * 3


def test_a_strategy_that_survives_lost_ranks_uses_it_too(in_foreign_group):
    def job():
        run = tiny_run.make_run("strategy=gossip")
        assert run.strategy.survives_rank_loss
        train_job = TrainJob(run, LaunchInfo(c10d.get_rank(), 2), RunDirRequest())
        with train_job.join_world(CPU) as world:  # at no MASTER_ADDR
            return world.is_elastic, sum_over(lambda x: world.all_ranks.all_reduce_sum(x).wait())

    assert in_foreign_group(2, job) == [(False, 3.0)] * 2


def test_it_is_adopted_again_after_it_was_left(in_foreign_group):
    def job():
        texts = []
        for i in range(2):
            with World.join(LaunchInfo(), CPU, 20.0) as world:
                texts.append(world.all_gather_str(str(i)))
        return texts

    assert in_foreign_group(2, job) == [[["0", "0"], ["1", "1"]]] * 2


def test_it_may_be_left_after_all_groups_were_destroyed(in_foreign_group):
    def job():
        with World.join(LaunchInfo(), CPU, 20.0) as world:
            texts = world.all_gather_str("last")
            c10d.destroy_process_group()
        return texts

    assert in_foreign_group(2, job) == [["last", "last"]] * 2


def test_a_rank_that_does_not_join_is_named_within_the_timeout(in_foreign_group):
    def job():
        if c10d.get_rank():
            return ""
        with pytest.raises(CommunicationError) as error:
            World.join(LaunchInfo(), CPU, 1.0)
        return str(error.value)

    assert in_foreign_group(2, job)[0].startswith("rank 1 did not arrive within 1 s")
