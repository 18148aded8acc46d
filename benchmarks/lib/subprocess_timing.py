"""Ranks of a benchmark: processes of their own on this machine, one thread each."""

from __future__ import annotations

import multiprocessing as mp
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.lib.session_fixture import CPU
from paragan.comm.world import Place, World

TIMEOUT_S = 120.0
Tell = Callable[[Any], None]


def told(ranks: int, job: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run `job(world, tell, *arguments)` on every rank; what rank 0 tells, as it comes."""
    context = mp.get_context("spawn")
    answers, ranks_end = context.Pipe(duplex=False)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    about = [(rank, ranks, port, ranks_end, job, arguments) for rank in range(ranks)]
    processes = [context.Process(target=_work, args=args, daemon=True) for args in about]
    for process in processes:
        process.start()
    ranks_end.close()
    while True:
        try:
            yield answers.recv()
        except EOFError:
            break
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed, see above")


def _work(rank: int, ranks: int, port: int, answers: Any, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = World.join(Place(rank, ranks, rank, ranks), CPU, TIMEOUT_S, env)
    job(world, answers.send if world.first else _nothing, *arguments)
    world.close()


def _nothing(answer: Any) -> None:
    pass


def meet(world: World) -> None:
    """A barrier."""
    world.everyone.sum(torch.zeros(1)).wait()
