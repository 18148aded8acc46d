"""Copies between host and device: the host does not wait, or once for many values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paragan.core.devices import backend_of


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, from page-locked memory. Returns x itself if the device is the CPU."""
    return backend_of(device).pinned_copy(x).to(device, non_blocking=True)


def copy_to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of any shape as float64 on the host; those of the device come in one copy."""
    on_device = {name: value for name, value in values.items() if value.device.type != "cpu"}
    host = {name: value.double() for name, value in values.items() if name not in on_device}
    if on_device:
        numbers = torch.cat([value.double().reshape(-1) for value in on_device.values()]).cpu()
        parts = numbers.split([value.numel() for value in on_device.values()])
        host |= {name: part.view(on_device[name].shape) for name, part in zip(on_device, parts)}
    return {name: host[name] for name in values}


class HostCopy:
    """A copy of a tensor of a device that is on its way to the host. Of a tensor of the host it is that tensor."""

    def __init__(self, x: Tensor):
        backend = backend_of(x.device)
        self._copy = x.detach()
        if backend.has_streams:
            self._copy = backend.pinned_copy(torch.empty(x.shape, dtype=x.dtype))
            self._copy.copy_(x.detach(), non_blocking=True)
        elif x.device.type != "cpu":
            self._copy = self._copy.cpu()
        self._event = backend.record_event(x.device)

    def wait(self) -> Tensor:
        """Return the copy. Blocks the host until it has arrived."""
        self._event.synchronize()
        return self._copy
