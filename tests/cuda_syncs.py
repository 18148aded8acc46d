"""Find what makes the host wait for a CUDA device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Let every operation that makes the host wait raise RuntimeError inside this context."""
    with warnings.catch_warnings(action="ignore"):  # torch says that it does not find all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
