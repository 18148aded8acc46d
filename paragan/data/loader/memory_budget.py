"""Accounting of the memory that the prefetch pipeline uses."""

from __future__ import annotations

from paragan.data.loader.shared_memory import SPARE_BLOCKS

CHUNK_IMAGES = 32  # remote images that are decoded together
INITIAL_REQUESTS = 4  # at the same time, before the size of any image is known
MAX_SIZE_DECAY = 0.999  # of the largest size, with every image received


class MemoryBudget:
    """Counts the bytes ahead of the step, and decides whether more stays below the limit. Its owner holds a lock.

    limit_bytes      : the limit
    pixel_bytes      : pixels of batches started and not yet taken
    encoded_bytes    : remote images received and not yet decoded
    peak_bytes       : largest sum of the two so far
    to_fetch         : remote images not yet received
    in_flight        : those of them that are requested
    undecoded_chunks : remote chunks that are complete and not yet decoded
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.pixel_bytes = 0
        self.encoded_bytes = 0
        self.peak_bytes = 0
        self.to_fetch = 0
        self.in_flight = 0
        self.undecoded_chunks = 0
        self._max_encoded_bytes = 0.0

    @property
    def used_bytes(self) -> int:
        """Pixels and encoded images."""
        return self.pixel_bytes + self.encoded_bytes

    def can_start_batch(self, num_images: int, pixel_bytes: int) -> bool:
        """Return whether another batch fits, if all remote images arrive at the size of the largest."""
        expected = (self.to_fetch + num_images) * self._max_encoded_bytes
        return self.used_bytes + expected + (SPARE_BLOCKS + 2) * pixel_bytes <= self.limit_bytes

    def on_batch_started(self, pixel_bytes: int, to_fetch: int) -> None:
        """Count a new batch."""
        self.pixel_bytes += pixel_bytes
        self.to_fetch += to_fetch
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def can_request(self) -> bool:
        """Return whether another remote image may be requested.

        Encoded images stay below the limit and one chunk, whatever their sizes. If no complete chunk waits to be
        decoded, the next chunk is requested in any case: requests are in the order of the batches, so no chunk waits
        for a later one.
        """
        if not self._max_encoded_bytes:
            return self.in_flight < INITIAL_REQUESTS
        expected = self.encoded_bytes + (self.in_flight + 1) * self._max_encoded_bytes
        if self.pixel_bytes + expected <= self.limit_bytes:
            return True
        return not self.undecoded_chunks and (expected <= CHUNK_IMAGES * self._max_encoded_bytes or not self.in_flight)

    def on_received(self, nbytes: int) -> None:
        """Count a remote image that was received."""
        self.encoded_bytes += nbytes
        self._max_encoded_bytes = max(nbytes, MAX_SIZE_DECAY * self._max_encoded_bytes)
        self.to_fetch -= 1
        self.in_flight -= 1
