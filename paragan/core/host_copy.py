"""Copies from a device to the host: each makes the host wait, so values are gathered first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def copy_to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of any shape as float64 on the host; those of the device come in one copy."""
    on_device = {name: value for name, value in values.items() if value.device.type != "cpu"}
    host = {name: value.double() for name, value in values.items() if name not in on_device}
    if on_device:
        numbers = torch.cat([value.double().reshape(-1) for value in on_device.values()]).cpu()
        parts = numbers.split([value.numel() for value in on_device.values()])
        host |= {name: part.view(on_device[name].shape) for name, part in zip(on_device, parts)}
    return {name: host[name] for name in values}
