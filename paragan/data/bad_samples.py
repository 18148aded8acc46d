"""Images (or other records) that cannot be decoded, and those that replace them.

A replacement depends on the data alone, so it needs no saved state: all ranks and every resume use the same one, and no
label is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from paragan.core.errors import RunError

MAX_BAD_FRACTION = 0.01  # of the images, unless the user allows more


class BadSamples:
    """The images known to be damaged or missing; safe to use from many threads.

    A bad image is replaced by the next good one of its class, in the order of the data set and around its end.

    Args:
        labels: [N] int64, or None without classes.
        count: N.
        sample_name: returns what messages call an image.
        max_fraction: of all images may be bad before the run ends.
        noun: what messages call one.
    """

    def __init__(
        self,
        labels: np.ndarray | None,
        count: int,
        sample_name: Callable[[int], str],
        max_fraction: float,
        noun: str = "image",
    ):
        self.labels = labels
        self.count = count
        self.sample_name = sample_name
        self.max_fraction = max_fraction
        self.noun = noun
        self.reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def report(self, index: int, reason: str) -> None:
        """Add an image.

        Raises:
            RunError: too many are bad.
        """
        with self._lock:
            self.reasons[index] = reason
        self.check_limit()

    def check_limit(self) -> None:
        """Raise RunError if too many images are bad."""
        if len(self.reasons) > self.max_fraction * self.count:
            raise RunError(self.error_message())

    def error_message(self) -> str:
        """Return the message for a data set with too many bad images."""
        first, reason = next(iter(self.reasons.items()))
        message = f"data: {self.sample_name(first)} cannot be decoded: {reason}"
        others = len(self.reasons) - 1
        if others:
            return (
                f"{message} (and {others:,} more of {self.count:,} {self.noun}s): replace or remove them, "
                "or allow more with --data.max_bad_fraction"
            )
        return f"{message}: replace or remove it, or allow more with --data.max_bad_fraction"

    def replacements(self, index: int) -> Iterator[int]:
        """Yield the images that may replace image `index`, in order of preference."""
        candidates = np.arange(self.count)
        if self.labels is not None:
            candidates = np.flatnonzero(self.labels == self.labels[index])
        position = int(np.searchsorted(candidates, index))
        yield from (int(other) for other in np.roll(candidates, -position)[1:] if other not in self.reasons)

    def to_lines(self) -> list[str]:
        """Return "name<tab>reason" of each bad image, in the order of the data set."""
        with self._lock:
            return [f"{self.sample_name(index)}\t{reason}" for index, reason in sorted(self.reasons.items())]
