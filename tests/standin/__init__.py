"""A stand-in accelerator for tests: `device = standin.install()` (see device.py)."""

from __future__ import annotations

from standin.backend import install, replace_cuda
from standin.device import NAME
from standin.syncs import recording

__all__ = ["NAME", "install", "recording", "replace_cuda"]
