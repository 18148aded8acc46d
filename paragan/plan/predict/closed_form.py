"""What collectives take on links that are all alike, by formula: for those who ask for a hundred thousand ranks.

Each is what plan/foreseen/network.py plays, to a fifth, where nothing else is under way. link: between any two hosts.
"""

from __future__ import annotations

from paragan.plan.links import Link
from paragan.plan.predict.network import MAX_IN_FLIGHT


def send_recv_s(nbytes: float, link: Link) -> float:
    """A message each way: a question, then the answer."""
    return 2 * link.latency + nbytes / link.bandwidth


def all_reduce_s(nbytes: float, size: int, link: Link) -> float:
    """A ring sum: 2 (size - 1) steps, in each of which a chunk passes in segments that wait for the step before."""
    return 2 * (size - 1) * _ring_step_s(nbytes / size, link)


def all_gather_s(nbytes: float, size: int, link: Link) -> float:
    """Everyone's `nbytes`, round a ring."""
    return (size - 1) * _ring_step_s(nbytes, link)


def all_to_all_s(nbytes: float, size: int, link: Link) -> float:
    """A part of `nbytes` to everyone, at once."""
    return send_recv_s((size - 1) / size * nbytes, link) if size > 1 else 0.0


def _ring_step_s(chunk_bytes: float, link: Link) -> float:
    """A segment is asked for when the one two before is here; the question waits behind the other one in the port, or
    for the answer."""
    segment = chunk_bytes / MAX_IN_FLIGHT / link.bandwidth
    return max(MAX_IN_FLIGHT * segment + link.latency, segment + 2 * link.latency)
