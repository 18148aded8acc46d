"""What a player plays against where it is not the other as it now is: images that G made before, and D as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Net
from .buffer import Ages, Policy
from .player import Player

Lag = Callable[[int], int]  # step -> how many rounds back
Lanes = tuple[int, ...]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Made:
    """Images of some lanes, one lane after the other: [N, C, H, W], and their labels [N] or None."""

    images: Tensor
    labels: Tensor | None

    def part(self, start: int, end: int) -> Made:
        return Made(self.images[start:end], None if self.labels is None else self.labels[start:end])

    @staticmethod
    def joined(parts: Iterable[Made]) -> Made:
        some = list(parts)
        labels = [part.labels for part in some if part.labels is not None]
        return Made(torch.cat([part.images for part in some]), torch.cat(labels) if labels else None)


class PastFakes:
    """The images that G made in its turns, and D draws from: a bounded buffer.

    live : makes images where there are none yet, and where the lag is 0
    lag  : how many rounds ago the newest that may be drawn were made (at the beginning: the oldest there are)
    most : the largest lag
    """

    def __init__(self, policy: Policy, live: Callable[[Batch, int], Batch], lag: Lag, most: int):
        self.policy, self.live, self.lag, self.kept = policy, live, lag, most + policy.last
        self.rounds: dict[int, dict[Lanes, Made]] = {}  # by step, then by the lanes of a pass

    def post(self, fake: Batch, step: int) -> None:
        """G made these in this step."""
        self.rounds.setdefault(step, {})[fake.draw.lanes] = Made(fake.images.detach(), fake.labels)
        for old in [s for s in self.rounds if s <= step - self.kept]:
            del self.rounds[old]

    def __call__(self, hand: Batch, step: int) -> Batch:
        """As many as the hand has, for D to judge."""
        lag = self.lag(step)
        if not lag or not self.rounds:
            return self.live(hand, step)
        newest = max((s for s in self.rounds if s <= step - lag), default=min(self.rounds))
        there = sorted((s for s in self.rounds if s <= newest), reverse=True)[: self.policy.last]
        ages = self.policy.ages(hand.draw, len(there))
        made = self._of(there[0], hand) if ages is None else self._mixed(there, hand, ages)
        return Batch(made.images, made.labels, hand.draw)

    def _mixed(self, there: list[int], hand: Batch, ages: Ages) -> Made:
        newest = self._of(there[0], hand)
        mixed = Made(newest.images.clone(), None if newest.labels is None else newest.labels.clone())
        for age in range(1, len(there)):
            rows = torch.as_tensor(np.flatnonzero(ages == age), device=mixed.images.device)
            old = self._of(there[age], hand)
            mixed.images[rows] = old.images[rows]
            if mixed.labels is not None and old.labels is not None:
                mixed.labels[rows] = old.labels[rows]
        return mixed

    def _of(self, step: int, hand: Batch) -> Made:
        """What was made in a step for the lanes of a hand, in their order."""
        passes, lanes = self.rounds[step], hand.draw.lanes
        if lanes in passes:
            return passes[lanes]
        return Made.joined(self._of_lane(passes, lane, hand.draw.per_lane) for lane in lanes)

    def _of_lane(self, passes: Mapping[Lanes, Made], lane: int, per_lane: int) -> Made:
        lanes, made = next((lanes, made) for lanes, made in passes.items() if lane in lanes)
        at = lanes.index(lane) * per_lane
        return made.part(at, at + per_lane)

    def state(self) -> Tensors:
        """Lane by lane, so that it can be dealt again."""
        found: Tensors = {}
        for step, passes in self.rounds.items():
            for lanes, made in passes.items():
                for lane, images in zip(lanes, made.images.chunk(len(lanes))):
                    found[f"fakes/{step}/{lane}/images"] = images
                if made.labels is not None:
                    for lane, labels in zip(lanes, made.labels.chunk(len(lanes))):
                        found[f"fakes/{step}/{lane}/labels"] = labels
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `state` of all ranks back."""
        self.rounds = {}
        for name, images in tensors.items():
            kind, step, lane, what = name.split("/")
            if (kind, what) == ("fakes", "images"):
                made = Made(images, tensors.get(f"fakes/{step}/{lane}/labels"))
                self.rounds.setdefault(int(step), {})[(int(lane),)] = made


class PastCritic:
    """D as it was in G's turn some rounds ago, for G to play against.

    lag : how many; 0: as it now is;  most : the largest
    """

    def __init__(self, d: Player, lag: Lag, most: int):
        self.d, self.lag, self.most = d, lag, most
        self.net = copy.deepcopy(d.net).requires_grad_(False) if most else d.net
        self.versions: dict[int, Tensors] = {}  # by step
        self._shown: int | None = None

    def __call__(self, step: int) -> Net:
        """Asked for in G's turn, while D stands where it is: that is remembered."""
        if self.most and step not in self.versions:
            self.versions[step] = {name: tensor.clone() for name, tensor in self.d.net.state_dict().items()}
            for old in [s for s in self.versions if s < step - self.most]:
                del self.versions[old]
        lag = self.lag(step)
        if not lag:
            return self.d.net
        version = max((s for s in self.versions if s <= step - lag), default=min(self.versions))
        if version != self._shown:
            self.net.load_state_dict(self.versions[version])
            self._shown = version
        return self.net

    def state(self) -> Tensors:
        return {f"critic/{step}/{name}": t for step, version in self.versions.items() for name, t in version.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.versions, self._shown = {}, None
        for name, tensor in tensors.items():
            kind, step, what = name.split("/", 2)
            if kind == "critic":
                self.versions.setdefault(int(step), {})[what] = tensor
