"""Groups of gloo for tensors of an accelerator: messages leave from and arrive in page-locked memory of the host.

For groups that must outlive a lost rank, which those of NCCL do not, and for the pairs of asynchronous ranks. The host
waits for the device before it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Meter
from paragan.core.devices import backend_of
from paragan.core.host_copies import HostCopy


def staged_on_host(group: Group, device: torch.device) -> Group:
    """Return a group of gloo that takes tensors of the device, too."""
    return group if device.type == "cpu" else HostStagedGroup(group)


@dataclass(frozen=True)
class HostStagedGroup:
    """Sends tensors of a device through copies of them in the memory of the host.

    group : of gloo
    """

    group: Group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def with_meter(self, meter: Meter) -> Group:
        return HostStagedGroup(self.group.with_meter(meter))

    def all_reduce_sum(self, x: Tensor) -> Work:
        (host,) = _copies_to_send([x])
        return _copy_on_arrival(self.group.all_reduce_sum(host), [(x, host)])

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        (host,) = _copies_to_send([x])
        host_rows, work = self.group.all_gather(host, _buffer_for(rows))
        return rows, _copy_on_arrival(work, [(rows, host_rows)])

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        (host,) = _copies_to_send([x])
        host_out = _buffer_for(out)
        return _copy_on_arrival(self.group.all_to_all(host, host_out), [(out, host_out)])

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        host_sends = dict(zip(sends, _copies_to_send(list(sends.values()))))
        host_recvs = {rank: _buffer_for(x) for rank, x in recvs.items()}
        arrivals = [(x, host_recvs[rank]) for rank, x in recvs.items()]
        return _copy_on_arrival(self.group.send_recv(host_sends, host_recvs, tag), arrivals)


@dataclass
class _StagedWork:
    """A message, and what it brings: (tensor, its copy on the host)."""

    work: Work
    arrivals: Sequence[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        self.work.wait()
        for x, host in self.arrivals:
            x.copy_(host, non_blocking=True)
        self.arrivals = ()


def _copy_on_arrival(work: Work, arrivals: Sequence[tuple[Tensor, Tensor]]) -> Work:
    staged = [(x, host) for x, host in arrivals if x is not host]
    return _StagedWork(work, staged) if staged else work


def _copies_to_send(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the host. Those that are there already are sent as they are."""
    copies = [HostCopy(x) for x in tensors]
    return [copy.wait() for copy in copies]


def _buffer_for(x: Tensor) -> Tensor:
    """Return memory of the host to receive what belongs into x."""
    return x if x.device.type == "cpu" else backend_of(x.device).pinned_copy(torch.empty(x.shape, dtype=x.dtype))
