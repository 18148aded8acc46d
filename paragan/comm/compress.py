"""Wires: what a float vector becomes while it travels. `Exact` leaves it as it is."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..config import record


@record
class Exact:
    """float32 as it is."""

    name: Literal["exact"] = "exact"
    lossy: ClassVar[bool] = False

    def nbytes(self, n: int) -> int:
        """Bytes that n numbers take on the wire."""
        return 4 * n
