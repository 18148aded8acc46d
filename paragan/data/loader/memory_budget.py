"""The memory of what is ahead of the step, counted."""

from __future__ import annotations

from paragan.data.loader.shared_memory import SPARE_BLOCKS

CHUNK_IMAGES = 32  # far images that are decoded together
INITIAL_REQUESTS = 4  # requests at once before the size of any image is known
MAX_SIZE_DECAY = 0.999  # of the largest size, with every image that came


class MemoryBudget:
    """What is ahead, in bytes, and whether more of it stays below the cap. Its owner holds a lock.

    pixels    : of the batches that were begun and not yet taken;  peak : the most that was ahead
    encoded   : of far images that came, and are not decoded yet
    to_fetch  : far images that did not come yet;  under_way : those of them that are asked for
    undecoded : far chunks that are complete, and not decoded yet
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.pixel_bytes, self.encoded_bytes, self.peak_bytes = limit_bytes, 0, 0, 0
        self.to_fetch = self.in_flight = self.undecoded_chunks = 0
        self._max_encoded_bytes = 0.0

    @property
    def used_bytes(self) -> int:
        return self.pixel_bytes + self.encoded_bytes

    def can_start_batch(self, num_images: int, pixel_bytes: int) -> bool:
        """Whether one more batch does, when all far images that were asked for arrive at the size of the largest."""
        coming = (self.to_fetch + num_images) * self._max_encoded_bytes
        return self.used_bytes + coming + (SPARE_BLOCKS + 2) * pixel_bytes <= self.limit_bytes

    def on_batch_started(self, pixel_bytes: int, to_fetch: int) -> None:
        """A batch is begun."""
        self.pixel_bytes += pixel_bytes
        self.to_fetch += to_fetch
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def can_request(self) -> bool:
        """Whether another far image may be asked for.

        Encoded images stay below the cap and a chunk, whatever their size turns out to be. Where nothing is left to
        decode a chunk comes all the same: requests are in the plan's order, so no chunk waits for one behind it.
        """
        if not self._max_encoded_bytes:
            return self.in_flight < INITIAL_REQUESTS
        coming = self.encoded_bytes + (self.in_flight + 1) * self._max_encoded_bytes
        if self.pixel_bytes + coming <= self.limit_bytes:
            return True
        return not self.undecoded_chunks and (coming <= CHUNK_IMAGES * self._max_encoded_bytes or not self.in_flight)

    def on_received(self, nbytes: int) -> None:
        """A far image did."""
        self.encoded_bytes += nbytes
        self._max_encoded_bytes = max(nbytes, MAX_SIZE_DECAY * self._max_encoded_bytes)
        self.to_fetch -= 1
        self.in_flight -= 1
