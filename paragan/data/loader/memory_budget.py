"""The memory of what is ahead of the step, counted."""

from __future__ import annotations

from paragan.data.loader.shared_memory import SPARE

CHUNK = 32  # far images that are decoded together
BLIND = 4  # requests at once before the size of any image is known
FORGETS = 0.999  # of the largest size, with every image that came


class Room:
    """What is ahead, in bytes, and whether more of it stays below the cap. Its owner holds a lock.

    pixels    : of the batches that were begun and not yet taken;  peak : the most that was ahead
    encoded   : of far images that came, and are not decoded yet
    to_fetch  : far images that did not come yet;  under_way : those of them that are asked for
    undecoded : far chunks that are complete, and not decoded yet
    """

    def __init__(self, cap: int):
        self.cap, self.pixels, self.encoded, self.peak = cap, 0, 0, 0
        self.to_fetch = self.under_way = self.undecoded = 0
        self._largest = 0.0

    @property
    def ahead(self) -> int:
        return self.pixels + self.encoded

    def fits(self, images: int, pixels: int) -> bool:
        """Whether one more batch does, when all far images that were asked for arrive at the size of the largest."""
        coming = (self.to_fetch + images) * self._largest
        return self.ahead + coming + (SPARE + 2) * pixels <= self.cap

    def begin(self, pixels: int, to_fetch: int) -> None:
        """A batch is begun."""
        self.pixels += pixels
        self.to_fetch += to_fetch
        self.peak = max(self.peak, self.ahead)

    def may_ask(self) -> bool:
        """Whether another far image may be asked for.

        Encoded images stay below the cap and a chunk, whatever their size turns out to be. Where nothing is left to
        decode a chunk comes all the same: requests are in the plan's order, so no chunk waits for one behind it.
        """
        if not self._largest:
            return self.under_way < BLIND
        coming = self.encoded + (self.under_way + 1) * self._largest
        if self.pixels + coming <= self.cap:
            return True
        return not self.undecoded and (coming <= CHUNK * self._largest or not self.under_way)

    def came(self, size: int) -> None:
        """A far image did."""
        self.encoded += size
        self._largest = max(size, FORGETS * self._largest)
        self.to_fetch -= 1
        self.under_way -= 1
