"""Ranks for tests: gloo processes that are started once and reused."""

from __future__ import annotations

import multiprocessing as mp
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle

TIMEOUT_S = 240


def _rank_main(connection: Any) -> None:
    import pytest  # noqa: F401 - jobs use it, and importing it may take seconds
    import torch

    from paragan.comm.launch_info import LaunchInfo
    from paragan.comm.world import World
    from processes import reduce_bn_recalibration

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    reduce_bn_recalibration()
    while (task := connection.recv()) is not None:
        rank, size, port, device, call = task
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            world = World.join(LaunchInfo(rank, size, rank, size), _get_device(device), 20.0, env)
            result = cloudpickle.loads(call)(world)
            world.close()
            connection.send((True, cloudpickle.dumps(result)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _get_device(name: str) -> Any:
    import torch

    import standin

    return standin.install() if name == standin.NAME else torch.device(name)


class RankPool:
    """`pool(4, job)` runs job(world) on four ranks and returns their results. It grows as needed.

    With `device=standin.NAME` each rank has a stand-in accelerator.
    """

    def __init__(self, initial_size: int = 4):
        self._connections, self._processes = [], []
        self._grow(initial_size)

    def _grow(self, size: int) -> None:
        context = mp.get_context("spawn")
        while len(self._connections) < size:
            connection, child_connection = context.Pipe()
            process = context.Process(target=_rank_main, args=(child_connection,), daemon=True)
            process.start()
            self._connections.append(connection)
            self._processes.append(process)

    def __call__(self, size: int, job: Callable[[Any], Any], device: str = "cpu") -> list[Any]:
        self._grow(size)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        call = cloudpickle.dumps(job)
        for rank in range(size):
            self._connections[rank].send((rank, size, port, device, call))
        try:
            return self._collect_results(size)
        except AssertionError:
            self._restart()  # a rank that failed may still have a process group, with which the next job would fail
            raise

    def _collect_results(self, size: int) -> list[Any]:
        results = []
        for rank in range(size):
            assert self._connections[rank].poll(TIMEOUT_S), f"rank {rank} did not answer"
            results.append(self._connections[rank].recv())
        for rank, (succeeded, result) in enumerate(results):
            assert succeeded, f"rank {rank}:\n{result}"
        return [cloudpickle.loads(result) for _, result in results]

    def _restart(self) -> None:
        for connection, process in zip(self._connections, self._processes):
            process.kill()
            process.join(10)
            connection.close()
        self._connections, self._processes = [], []

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(10)
