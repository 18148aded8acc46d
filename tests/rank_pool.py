"""Ranks for tests: gloo processes that are started once and reused."""

from __future__ import annotations

import gc
import multiprocessing as mp
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from processes import PRELOADED_MODULES, free_port

ANSWER_TIMEOUT_S = 240
TIMEOUT_S = 60.0  # of an exchange: other tests may use the processors for seconds
READY = "ready"


def _rank_main(connection: Any, device_name: str) -> None:
    import pytest  # noqa: F401 - jobs use it, and importing it may take seconds
    import torch

    from paragan.comm.launch_info import LaunchInfo
    from paragan.comm.world import World
    from processes import reduce_bn_recalibration

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    reduce_bn_recalibration()
    device = _get_device(device_name)
    gc.freeze()
    connection.send(READY)
    while (task := connection.recv()) is not None:
        rank, size, port, call = task
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            world = World.join(LaunchInfo(rank, size, rank, size), device, TIMEOUT_S, env)
            result = cloudpickle.loads(call)(world)
            world.close()
            connection.send((True, cloudpickle.dumps(result)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        world = result = None
        gc.collect()  # process groups of the job, whose threads poll a hundred times a second each


def _get_device(name: str) -> Any:
    import torch

    import standin

    return standin.install() if name == standin.NAME else torch.device(name)


class RankPool:
    """`pool(4, job)` runs job(world) on four ranks and returns their results. It grows as needed.

    With `device=standin.NAME` each rank has a stand-in accelerator, in processes of their own: autograd starts a thread
    for each device at the first backward pass of a process, and none for devices that come later.
    """

    def __init__(self, initial_size: int = 4):
        self._ranks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)  # by device: connections and processes
        self._grow(initial_size, "cpu")

    def _grow(self, size: int, device: str) -> None:
        """Start ranks and wait until they are ready: imports may take longer than the others wait for a rank."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
        first_new = len(self._ranks[device])
        for _ in range(first_new, size):
            connection, child_connection = context.Pipe()
            process = context.Process(target=_rank_main, args=(child_connection, device), daemon=True)
            process.start()
            self._ranks[device].append((connection, process))
        for rank, (connection, _) in enumerate(self._ranks[device][first_new:], start=first_new):
            assert connection.poll(ANSWER_TIMEOUT_S), f"rank {rank} did not start"
            assert connection.recv() == READY

    def __call__(self, size: int, job: Callable[[Any], Any], device: str = "cpu") -> list[Any]:
        self._grow(size, device)
        port = free_port()
        call = cloudpickle.dumps(job)
        for rank in range(size):
            self._ranks[device][rank][0].send((rank, size, port, call))
        try:
            return self._collect_results([connection for connection, _ in self._ranks[device][:size]])
        except AssertionError:
            self._restart(device)  # a rank that failed may still have a process group, with which the next job fails
            raise

    def _collect_results(self, connections: Sequence[Any]) -> list[Any]:
        results = []
        for rank, connection in enumerate(connections):
            assert connection.poll(ANSWER_TIMEOUT_S), f"rank {rank} did not answer"
            results.append(connection.recv())
        errors = [f"rank {rank}:\n{result}" for rank, (succeeded, result) in enumerate(results) if not succeeded]
        assert not errors, "\n".join(errors)  # of all: the first to fail makes the others fail
        return [cloudpickle.loads(result) for _, result in results]

    def _restart(self, device: str) -> None:
        for connection, process in self._ranks.pop(device):
            process.kill()
            process.join(10)
            connection.close()

    def close(self) -> None:
        ranks = [rank for ranks in self._ranks.values() for rank in ranks]
        for connection, _ in ranks:
            connection.send(None)
        for _, process in ranks:
            process.join(10)
