"""How many bytes a connection may have under way: TCP's slow start, and again after a rest (RFC 6928, RFC 2861).

It begins with ten packets, and every answer adds what it answers to. A rest halves it for each timeout that it lasts (a
round trip and 200 ms, as Linux counts), down to the ten packets. Losses are not played: it grows until it fills the
way, and what waits before it, and no further.

    opening = Opening(first=14_600, most=1e6, round_trip=0.1)
    opening.room(now); opening.leaves(nbytes, now); opening.answered(nbytes)
"""

from __future__ import annotations

import math

TIMEOUT = 0.2  # seconds beyond a round trip


class Opening:
    """Of one connection, one way. first, most: bytes; inf is a connection that is open at once."""

    def __init__(self, first: float, most: float, round_trip: float):
        self.first, self.most, self.round_trip = first, max(first, most), round_trip
        self._open, self._under_way, self._last = first, 0, 0.0

    def room(self, now: float) -> float:
        """Bytes that may leave."""
        rests = math.floor((now - self._last) / (self.round_trip + TIMEOUT))
        if rests and not self._under_way and self._open > self.first:
            self._open, self._last = max(self.first, self._open / 2 ** min(rests, 60)), now
        return self._open - self._under_way

    def leaves(self, nbytes: int, now: float) -> None:
        self._under_way, self._last = self._under_way + nbytes, now

    def answered(self, nbytes: int) -> None:
        self._under_way -= nbytes
        self._open = min(self.most, self._open + nbytes)
