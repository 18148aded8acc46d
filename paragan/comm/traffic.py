"""What an exchange costs: predicted as `Traffic`, counted by a `Meter`, in the same units.

Tests demand that both are equal for every exchange; `paragan train -n` shows the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one step."""

    sent_bytes: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.messages + other.messages)


def mean_traffic(once: Traffic, period: int) -> Traffic:
    """Return the mean over `period` steps of what is sent once in them."""
    return Traffic(round(once.sent_bytes / period), round(once.messages / period))


def ring_all_reduce(nbytes: int, size: int) -> Traffic:
    """Return what a sum of `nbytes` over `size` ranks costs: 2 (size - 1) pieces of 1/size (Patarasuk & Yuan 2009)."""
    return Traffic(2 * (size - 1) * nbytes // size, 2 * (size - 1))


def ring_all_gather(nbytes: int, size: int) -> Traffic:
    """Return what gathering `nbytes` of every rank on all ranks costs: each rank forwards size - 1 pieces."""
    return Traffic((size - 1) * nbytes, size - 1)


def all_to_all(nbytes: int, size: int) -> Traffic:
    """Return what sending one of `size` equal parts of `nbytes` to every other rank costs."""
    return Traffic((size - 1) * (nbytes // size), size - 1)


@dataclass
class Meter:
    """What one rank has sent, and how long it has waited for others.

    sent_bytes, messages : what was handed to torch
    wait_s               : seconds for which the host blocked on messages
    """

    sent_bytes: int = 0
    messages: int = 0
    wait_s: float = 0.0

    def count(self, traffic: Traffic) -> None:
        """Add what is being sent."""
        self.sent_bytes += traffic.sent_bytes
        self.messages += traffic.messages
