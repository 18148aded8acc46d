"""Run the ranks of a benchmark as processes on this machine, with one thread each."""

from __future__ import annotations

import multiprocessing as mp
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.lib.session_fixture import CPU
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World

TIMEOUT_S = 120.0
SendFn = Callable[[Any], None]


def run_ranks(ranks: int, job: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run `job(world, send, *arguments)` on every rank, and yield what rank 0 sends."""
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = [
        context.Process(target=_rank_main, args=(rank, ranks, port, sender, job, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    sender.close()
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            break
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed, see above")


def _rank_main(
    rank: int, ranks: int, port: int, sender: Any, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World.join(LaunchInfo(rank, ranks, rank, ranks), CPU, TIMEOUT_S, env)
    job(world, sender.send if world.is_main else _discard, *arguments)
    world.close()


def _discard(result: Any) -> None:
    pass


def barrier(world: World) -> None:
    """Wait until all ranks have called this."""
    world.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
