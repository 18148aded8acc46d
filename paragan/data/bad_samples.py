"""The images of a set that cannot be used, and which others stand in for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from paragan.core.errors import RunError


class BadSamples:
    """What was found to be damaged or gone; safe to use from many threads.

    For a bad image stands the next one of its class that is good, in the order of the set and around its end. This
    depends on the data alone, so every rank and every resume sees the same; and no label is wrong.

    name  : what messages call an image
    share : of all images may be bad; where more are, the run ends (`Failed`)
    """

    def __init__(self, labels: np.ndarray | None, count: int, sample_name: Callable[[int], str], max_fraction: float):
        self.labels, self.count, self.sample_name, self.max_fraction = labels, count, sample_name, max_fraction
        self.reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def report(self, index: int, reason: str) -> None:
        with self._lock:
            self.reasons[index] = reason
        self.check_limit()

    def check_limit(self) -> None:
        """`Failed` where more is bad than may be."""
        if len(self.reasons) > self.max_fraction * self.count:
            raise RunError(self.error_message())

    def error_message(self) -> str:
        """One line for a set of which too much is bad."""
        first, reason = next(iter(self.reasons.items()))
        more = len(self.reasons) - 1
        others = f" (and {more:,} more of {self.count:,} images)" if more else ""
        remedy = f"replace or remove {'them' if more else 'it'}, or allow more with --data.max_bad_fraction"
        return f"data: {self.sample_name(first)} cannot be decoded: {reason}{others}: {remedy}"

    def replacements(self, index: int) -> Iterator[int]:
        """Who may stand in for image `index`, in this order; not itself."""
        same = np.arange(self.count) if self.labels is None else np.flatnonzero(self.labels == self.labels[index])
        at = int(np.searchsorted(same, index))
        yield from (int(other) for other in np.roll(same, -at)[1:] if other not in self.reasons)

    def to_lines(self) -> list[str]:
        """name, tab, reason: of each, in the order of the set."""
        with self._lock:
            return [f"{self.sample_name(index)}\t{reason}" for index, reason in sorted(self.reasons.items())]
