"""Messages between stand-in accelerators: copies in host memory, sent by gloo.

As with NCCL, what is sent is what the current stream has computed, and what arrives is there after `wait`, which orders
the stream and is not a wait of the host. Until then its tensors hold garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from standin import streams
from standin.device import NAME as DEVICE
from standin.device import to_host_alias

NAME = "standin"


class StandInWork(dist.Work):
    """Wait for gloo, then write what has arrived to the tensors of the device."""

    def __init__(self, work: dist.Work, arrivals: Sequence[tuple[Tensor, Tensor]]):
        super().__init__()
        self._work = work
        self._arrivals = arrivals

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._work.wait()
        for destination, host in self._arrivals:
            streams.before_kernel(reads=[], writes=[destination], name="message")
            to_host_alias(destination).copy_(host)
        self._arrivals = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class StandInGroup(dist.ProcessGroup):
    """A process group for tensors of the stand-in accelerator and of the host."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - of torch
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def start(host: list[Tensor]) -> dist.Work:
            return self._gloo.allreduce(host, opts) if opts else self._gloo.allreduce(host)

        return _run(start, tensors, writes=tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return _run(lambda host: self._gloo.broadcast(host, opts), tensors, writes=tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        (rows,) = outputs
        return _run(lambda host: self._gloo.allgather([host[1:]], host[:1]), [*inputs, *rows], writes=rows)

    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None) -> Any:
        return _run(lambda host: self._gloo.alltoall_base(host[0], host[1], out_sizes, sizes), [out, x], writes=[out])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return _run(lambda host: self._gloo.send(host, rank, tag), tensors, writes=[])

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return _run(lambda host: self._gloo.recv(host, rank, tag), tensors, writes=tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def register() -> None:
    """Make it known to torch.distributed."""
    dist.Backend.register_backend(NAME, StandInGroup, devices=[DEVICE, "cpu"])


def _run(start: Callable[[list[Tensor]], dist.Work], tensors: Sequence[Tensor], writes: Sequence[Tensor]) -> Any:
    if all(x.device.type == "cpu" for x in tensors):
        return start(list(tensors))
    streams.before_kernel(reads=tensors, writes=writes, name="message")
    host = [to_host_alias(x).clone() for x in tensors]
    work = start(host)
    arrivals = [(x, y) for x, y in zip(tensors, host) if any(x is w for w in writes)]
    for x, _ in arrivals:
        streams.fill_with_garbage(to_host_alias(x))
    return StandInWork(work, arrivals)
