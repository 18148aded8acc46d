"""The stand-in accelerator as a backend of paragan."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paragan.core.backends import Backend, StreamBackend
from paragan.core.devices import BACKENDS
from standin import memory, process_group
from standin.device import NAME, is_installed, register


class StandInBackend(StreamBackend):
    """Behaves like CUDA but for what only CUDA has: graphs and compiled kernels.

    id : of the device of this process; "": it has none
    """

    id = ""
    kind = NAME
    visible_with: Sequence[str] = ("MOCK_VISIBLE_DEVICES",)
    dist_backend = process_group.NAME
    prefers_compile = False

    def _is_one_of_this_rank(self) -> bool:
        return True  # every process has its own

    def device_id(self, device: torch.device) -> str:
        return self.id

    def supports_bf16(self) -> bool:
        return Backend.supports_bf16(self)

    def page_lock(self, array: np.ndarray) -> None:
        address = array.ctypes.data
        memory.pin(address, array.nbytes)
        weakref.finalize(array, memory.unpin, address)

    def pinned_copy(self, x: Tensor) -> Tensor:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(
            x
        )  # an expanded tensor is an error, as in torch
        address = copy.untyped_storage().data_ptr()
        memory.pin(address, copy.untyped_storage().nbytes())
        weakref.finalize(copy.untyped_storage(), memory.unpin, address)
        return copy


def replace_cuda() -> None:
    """Let `--device.kind=cuda` name the stand-in in this process, for good."""
    install()
    BACKENDS["cuda"] = BACKENDS[NAME]


def install() -> torch.device:
    """Give this process the device, once. Returns it."""
    if not is_installed():
        register()
        process_group.register()
        BACKENDS[NAME] = StandInBackend()
    return torch.device(NAME, 0)
