"""Ranks that their launcher knows to have died.

A rank that dies before all have met leaves no connection that could break. Whoever started it (`paragan --ranks`)
reports its death to the other ranks, which may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterable

_reasons: dict[int, str] = {}  # the rank's number as it was started -> why it is gone


def report_lost_rank(rank: int, reason: str) -> None:
    """Record that a rank is gone. Any thread may call this."""
    _reasons[rank] = reason


def describe_lost(ranks: Iterable[int]) -> str:
    """Return which of these ranks are known to be gone, and why; empty if none is."""
    return ", ".join(f"rank {rank} {_reasons[rank]}" for rank in ranks if rank in _reasons)


def raise_if_lost(ranks: Iterable[int]) -> None:
    """Raise CommunicationError if one of these ranks is known to be gone; it says which, and why."""
    from paragan.comm.process_group import CommunicationError  # imports torch, which launchers do not need

    if lost := describe_lost(ranks):
        raise CommunicationError(lost)
