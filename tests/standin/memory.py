"""Allocated bytes of the stand-in accelerator, and pinned memory of the host.

An allocation beyond `limit_bytes`, which tests may set, raises torch.OutOfMemoryError.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by address
_sum_bytes = 0  # of `_storages`, of which some may be freed by now
_peak_bytes = 0
limit_bytes = 8 << 30
_pinned: set[tuple[int, int]] = set()  # (address, bytes)


def on_allocation(x: Tensor) -> None:
    """Count the storage of a new tensor."""
    global _sum_bytes, _peak_bytes
    storage = x.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    _sum_bytes += size - (_storages[address][1] if address in _storages else 0)
    _storages[address] = StorageWeakRef(storage), size
    if _sum_bytes > min(_peak_bytes, limit_bytes):
        allocated = allocated_bytes()
        if allocated > limit_bytes:
            raise torch.OutOfMemoryError(f"stand-in out of memory. Tried to allocate {size} bytes")
        _peak_bytes = max(_peak_bytes, allocated)


def allocated_bytes() -> int:
    """Return the bytes of all storages that exist."""
    global _sum_bytes
    for address, (reference, size) in list(_storages.items()):
        if reference.expired():
            del _storages[address]
            _sum_bytes -= size
    return _sum_bytes


def peak_bytes() -> int:
    """Return the largest sum of bytes since `reset_peak`."""
    return _peak_bytes


def reset_peak() -> None:
    """Let the peak be what is allocated now."""
    global _peak_bytes
    _peak_bytes = allocated_bytes()


def forget_all() -> None:
    """Count no storage that exists now: it belongs to the tests before."""
    global _sum_bytes, _peak_bytes
    _storages.clear()
    _sum_bytes = _peak_bytes = 0


def pin(address: int, size: int) -> None:
    """Page-lock memory of the host."""
    _pinned.add((address, size))


def unpin(address: int) -> None:
    """Undo `pin`."""
    _pinned.difference_update([block for block in _pinned if block[0] == address])


def is_pinned(x: Tensor) -> bool:
    """Return whether a tensor of the host lies in page-locked memory."""
    return any(start <= x.data_ptr() and x.data_ptr() + x.nbytes <= start + size for start, size in _pinned)
