"""A loop of two replicas, run as a process of its own: `python replica_loop.py FOLDER MODE`.

It saves after turn 3, and writes a line for every step. In step 5 rank 1 does what MODE says.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import paragan as pg

WIDTH = 1500  # several buckets


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Interrupt(torch.autograd.Function):
    """Do what the mode says in the middle of backward, when some messages are under way."""

    @staticmethod
    def forward(ctx, x, mode):
        ctx.mode = mode
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.mode in ("kill", "kill beside workers"):
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.mode == "raise":
            raise ValueError("the loss of rank 1 failed")
        return grad, None


def main(folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    world = pg.join(device="cpu", timeout_s=60.0)
    net = build()
    replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 1e-3))
    pg.load(folder, replica)
    workers = [iter(DataLoader(range(10**6), num_workers=2)) for _ in range(mode == "kill beside workers")]  # forked
    for loader in workers:
        next(loader)
    while replica.turns < 8:
        bad = mode if world.rank == 1 and replica.turns == 5 else ""
        if bad == "between":
            raise ValueError("the loader of rank 1 failed")
        if mode == "save" and replica.turns == 5:
            if world.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            pg.save(folder, replica)
        with replica.turn():
            h = net[:2](torch.ones(4, 8) * (1 + world.rank))
            net[2:](Interrupt.apply(h, bad) if bad else h).mean().backward()
        sys.stdout.write(f"turn {replica.turns} at {time.time()}\n")
        sys.stdout.flush()
        if replica.turns == 3:
            pg.save(folder, replica, extra={"turns": 3})


if __name__ == "__main__":
    main(*sys.argv[1:])
