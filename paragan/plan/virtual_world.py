"""TODO: docstring of paragan/plan/virtual_world.py"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paragan.comm.process_group import Group, Solo, Work
from paragan.comm.traffic import Meter
from paragan.comm.world import Place, World


@dataclass(frozen=True)
class Imagined:
    """A group that is not there: enough for wiring, and for counting what would be sent."""

    size: int
    rank: int = 0

    def metered(self, meter: Meter) -> Group:
        return self

    def sum(self, x: torch.Tensor) -> Work:
        raise NotImplementedError("an imagined group sends nothing")

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Work]:
        raise NotImplementedError("an imagined group sends nothing")

    def transpose(self, x: torch.Tensor, out: torch.Tensor) -> Work:
        raise NotImplementedError("an imagined group sends nothing")

    def swap(self, tell: Mapping[int, torch.Tensor], hear: Mapping[int, torch.Tensor], tag: int = 0) -> Work:
        raise NotImplementedError("an imagined group sends nothing")


class ImaginedWorld(World):
    """A world of so many ranks, seen from one of them, without starting any."""

    def __init__(self, ranks: int, rank: int = 0):
        group = Imagined(ranks, rank) if ranks > 1 else Solo()
        super().__init__(Place(rank, ranks), torch.device("cpu"), World.solo().store, group, 60.0)

    def group(self, ranks: Sequence[int]) -> Group | None:
        return (Imagined(len(ranks)) if len(ranks) > 1 else Solo()) if self.rank in ranks else None

    def link(self, other: int) -> Group:
        return Imagined(2)

    def agree(self, word: str, timeout_s: float | None = None) -> list[str]:
        return [word] * self.size
