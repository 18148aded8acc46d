"""The ranks that training loops of the user run on: joined once, and left when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType
from typing import Any

import torch

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import CommunicationError, c10d
from paragan.comm.world import World
from paragan.core.devices import BACKENDS, device_of_group, pick_device
from paragan.core.errors import RunError, UsageError

LEAVE_TIMEOUT_S = 5.0  # how long a process that ends waits for the other ranks to end
_world: World | None = None


def join(*, device: str | torch.device = "auto", timeout_s: float = 600.0) -> World:
    """Join the other ranks, wherever this process was started, and return the world: `rank`, `size`, `device`.

    Started by torchrun, srun, mpirun or `paragan --ranks`, ranks find each other through the environment. A process
    group that exists (of Ray Train, Lightning, accelerate, a notebook) is used and stays as it is. Otherwise this
    process is alone. Further calls return the same world.

    Args:
        device: of the modules: it decides how ranks communicate. "auto": a GPU if there is one, else the CPU; "cpu".
        timeout_s: how long a message may take. A rank that dies is noticed at once, one that hangs after this.

    Raises:
        UsageError: the variables of a launcher contradict each other.
        RunError: a rank is missing; it is named.
    """
    global _world
    if _world is None:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s:g}: must be positive. Use 600")
        launch_info = LaunchInfo() if c10d.is_initialized() else LaunchInfo.from_environment()
        try:
            _world = World.join(launch_info, _choose_device(device, launch_info), timeout_s)
        except CommunicationError as error:
            raise RunError(str(error)) from error
        if _world.size > 1:
            atexit.register(_leave)
            _report_uncaught_errors()
            os.register_at_fork(after_in_child=_forget_connections)
    return _world


def _choose_device(device: str | torch.device, launch_info: LaunchInfo) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto" and c10d.is_initialized():
        return device_of_group(c10d.get_backend_config())
    if device != "auto" and device not in BACKENDS:
        raise UsageError(
            f"device={device}: unknown. Use auto, cpu or cuda, or torch.device('cuda:1') for a certain one"
        )
    return pick_device(device, launch_info.local_rank)


def leave_after_failure(world: World) -> None:
    """Close the connections of a rank that cannot go on, so that the others notice."""
    global _world
    world.abandon()
    if world is _world:
        atexit.unregister(_leave)
        _world = None


def _leave() -> None:
    """Leave in good order when the process ends. Whoever serves the store of all ranks leaves last."""
    if _world:
        _world.timeout_s = LEAVE_TIMEOUT_S
        with contextlib.suppress(RunError, RuntimeError):
            _world.close()


def _forget_connections() -> None:
    """Let a forked process, such as a worker of a DataLoader, hold no connection: it would outlive this rank."""
    global _world
    if _world:
        _world.close_inherited_sockets()
        _world = None


def _report_uncaught_errors() -> None:
    """Tell the other ranks of an error that ends this process between turns."""
    show = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if _world:
            with contextlib.suppress(RunError, RuntimeError):
                _world.report_failure(RunError(f"{kind.__name__}: {error}"))
                leave_after_failure(_world)
        show(kind, error, trace)

    sys.excepthook = report_and_show
