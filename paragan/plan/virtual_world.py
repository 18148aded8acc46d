"""A world of many ranks, seen from one of them, without starting any process.

Enough to build a role and to compute its traffic. plan/predict/exchange_trace.py derives a world that records messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import Group, SingleRankGroup, Work
from paragan.comm.traffic import Meter
from paragan.comm.world import World


@dataclass(frozen=True)
class FakeGroup:
    """A group that has a size and a rank, and cannot send."""

    size: int
    rank: int = 0

    def with_meter(self, meter: Meter) -> Group:
        return self

    def all_reduce_sum(self, x: torch.Tensor) -> Work:
        raise NotImplementedError("a fake group sends nothing")

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        raise NotImplementedError("a fake group sends nothing")

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> Work:
        raise NotImplementedError("a fake group sends nothing")

    def send_recv(self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], tag: int = 0) -> Work:
        raise NotImplementedError("a fake group sends nothing")


class VirtualWorld(World):
    """A world of `ranks` ranks as rank `rank` sees it. Its groups are fake."""

    def __init__(self, ranks: int, rank: int = 0):
        group = FakeGroup(ranks, rank) if ranks > 1 else SingleRankGroup()
        super().__init__(LaunchInfo(rank, ranks), torch.device("cpu"), World.solo().store, group, 60.0)

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        if self.rank not in ranks:
            return None
        return FakeGroup(len(ranks)) if len(ranks) > 1 else SingleRankGroup()

    def pair_group(self, other: int) -> Group:
        return FakeGroup(2)

    def all_gather_str(self, text: str, timeout_s: float | None = None) -> list[str]:
        return [text] * self.size
