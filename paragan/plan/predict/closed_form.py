"""What collectives take on links that are all alike, by formula: for those who ask for a hundred thousand ranks.

Each is what plan/foreseen/network.py plays, to a fifth, where nothing else is under way. link: between any two hosts.
"""

from __future__ import annotations

from paragan.plan.links import Link
from paragan.plan.predict.network import UNDER_WAY


def swap_s(nbytes: float, link: Link) -> float:
    """A message each way: a question, then the answer."""
    return 2 * link.latency + nbytes / link.bandwidth


def sum_s(nbytes: float, size: int, link: Link) -> float:
    """A ring sum: 2 (size - 1) steps, in each of which a chunk passes in segments that wait for the step before."""
    return 2 * (size - 1) * _step_s(nbytes / size, link)


def gather_s(nbytes: float, size: int, link: Link) -> float:
    """Everyone's `nbytes`, round a ring."""
    return (size - 1) * _step_s(nbytes, link)


def transpose_s(nbytes: float, size: int, link: Link) -> float:
    """A part of `nbytes` to everyone, at once."""
    return swap_s((size - 1) / size * nbytes, link) if size > 1 else 0.0


def _step_s(chunk: float, link: Link) -> float:
    """A segment is asked for when the one two before is here; the question waits behind the other one in the port, or
    for the answer."""
    segment = chunk / UNDER_WAY / link.bandwidth
    return max(UNDER_WAY * segment + link.latency, segment + 2 * link.latency)
