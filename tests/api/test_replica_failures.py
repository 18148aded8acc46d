"""A rank that fails ends the others within seconds, with rank, turn and reason; what was saved is intact."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paragan as pg
import replica_loop
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World
from processes import free_port

SECONDS = 10


def start_loop(folder, mode, ranks=2):
    """Start a process for each rank, without a launcher that would end the others."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | where | {"PYTHONPATH": str(Path(pg.__file__).parent.parent)}
        processes.append(
            subprocess.Popen(
                [sys.executable, replica_loop.__file__, str(folder), mode],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def run_loop(folder, mode):
    """Return (status, output, errors) of both ranks, and how long rank 0 took to end after rank 1."""
    main, other = start_loop(folder, mode)
    out, err = other.communicate(timeout=200)
    ended = time.monotonic()
    main_out, main_err = main.communicate(timeout=100)
    return (main.returncode, main_out, main_err), (other.returncode, out, err), time.monotonic() - ended


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("kill", "rank 1 was lost"),
        ("kill beside workers", "rank 1 was lost"),
        ("save", "rank 1 was lost (killed, or out of reach); rank 0: a save after turn 5 of Sequential"),
        ("raise", "rank 1: turn 5 of Sequential: ValueError: the loss of rank 1 failed"),
        ("between", "rank 1: ValueError: the loader of rank 1 failed"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_the_last_save_is_loaded(tmp_path, mode, reason):
    (status, out, err), (other_status, _, _), seconds = run_loop(tmp_path, mode)
    assert status != 0
    assert other_status != 0
    assert seconds < SECONDS
    assert "turn 5" in out
    assert "turn 6" not in out
    last_line = err.strip().splitlines()[-1]
    assert reason in last_line
    if "kill" in mode:
        assert "turn 5 of Sequential" in last_line
    again = replica_loop.build()
    replica = pg.Replica(again, torch.optim.SGD(again.parameters(), 1e-3))
    assert pg.load(tmp_path, replica) == {"turns": 3}
    assert replica.turns == 3
    for p, expected in zip(again.parameters(), parameters_after_three_turns()):
        torch.testing.assert_close(p, expected)


def parameters_after_three_turns():
    """Return what plain PyTorch computes."""
    net = replica_loop.build()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (net(torch.ones(4, 8) * (1 + rank)).mean() / 2).backward()
        optimizer.step()
    return list(net.parameters())


@pytest.mark.slow
def test_a_loop_that_ends_leaves_in_good_order(tmp_path):
    processes = start_loop(tmp_path, "")
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "turn 8" in out
        assert "Error" not in err


def test_an_error_in_one_process_leaves_the_replica_usable():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1))
    before = net.weight.detach().clone()

    def fail():
        with replica.turn():
            net(torch.ones(1, 2)).sum().backward()
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fail()
    assert torch.equal(net.weight, before)
    assert replica.turns == 0
    with replica.turn():
        net(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(net.weight, before - 0.1)


def test_a_replica_in_a_group_that_exists(in_foreign_group):
    def job():
        with World.join(LaunchInfo(), torch.device("cpu"), 20.0) as world:
            net = nn.Linear(2, 1)
            replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world)
            with replica.turn():
                (net(torch.ones(1, 2)) * (1 + world.rank)).sum().backward()
            return net.weight.tolist()

    first, second = in_foreign_group(2, job)
    assert first == second
