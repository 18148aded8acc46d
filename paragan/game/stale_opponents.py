"""What a player plays against where it is not the other as it now is: images that G made in its own turns, and D as it
was."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from paragan.core.devices import kind_of
from paragan.core.types import Batch, Net
from paragan.game.player import BatchCoupled, Player
from paragan.game.replay_policy import Ages, Policy

Lag = Callable[[int], int]  # step -> how many rounds back
Lanes = tuple[int, ...]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Made:
    """Images of some lanes, one lane after the other: [N, C, H, W], and their labels [N] or None."""

    images: Tensor
    labels: Tensor | None
    ages: Ages | int = 0  # of each, in rounds before the newest

    def part(self, start: int, end: int) -> Made:
        return Made(self.images[start:end], None if self.labels is None else self.labels[start:end])

    @staticmethod
    def mixed(rounds: Sequence[Made], rows: Ages, ages: Ages) -> Made:
        """Image i is row `rows[i]` of the round `ages[i]`."""
        first = rounds[0]
        at = torch.as_tensor(rows, device=first.images.device)
        images = first.images[at]
        labels = None if first.labels is None else first.labels[at]
        for age in range(1, len(rounds)):
            some = torch.as_tensor(np.flatnonzero(ages == age), device=images.device)
            images[some] = rounds[age].images[at[some]]
            old = rounds[age].labels
            if labels is not None and old is not None:
                labels[some] = old[at[some]]
        return Made(images, labels, ages)

    @staticmethod
    def joined(parts: Iterable[Made]) -> Made:
        some = list(parts)
        labels = [part.labels for part in some if part.labels is not None]
        return Made(torch.cat([part.images for part in some]), torch.cat(labels) if labels else None)


@dataclass
class Seen:
    """How many rounds old was what a player saw. ages: of every image, or every opponent, since they were last asked
    for; pattern: of the newest in each round."""

    ages: Counter[int] = field(default_factory=Counter[int])
    pattern: dict[int, int] = field(default_factory=dict[int, int])  # by step

    def note(self, step: int, newest: int, ages: Counter[int]) -> None:
        self.pattern[step] = step - newest
        self.ages.update(ages)

    def taken(self) -> tuple[Counter[int], dict[int, int]]:
        """Both, which then begin anew."""
        found = self.ages, self.pattern
        self.ages, self.pattern = Counter(), {}
        return found


def _counted(step: int, there: Sequence[int], made: Made) -> Counter[int]:
    """How many of them are how old."""
    ages = np.bincount(np.broadcast_to(made.ages, len(made.images)))
    return Counter({step - there[i]: int(n) for i, n in enumerate(ages) if n})


class PastFakes:
    """The images that G made in its turns, and D draws from: a bounded buffer.

    lag  : how many rounds ago the newest that may be drawn were made (at the beginning: the oldest there are)
    most : the largest lag
    ratio: images of G's batch for one of D's. Of more, a further step of D in a round takes the next ones; of fewer,
           those of rounds before are drawn as well
    """

    def __init__(self, policy: Policy, lag: Lag, most: int, ratio: float = 1.0):
        self.policy, self.lag = policy, lag
        self.last = max(policy.last, math.ceil(1 / ratio))
        self.kept = most + self.last
        self.rounds: dict[int, dict[Lanes, Made]] = {}  # by step, then by the lanes of a pass
        self.seen = Seen()
        self._made: Callable[[], None] = lambda: None
        self._draws: tuple[int, Counter[Lanes]] = (-1, Counter())  # in the round that is being played

    def post(self, fake: Batch, step: int) -> None:
        """G made these in this step."""
        self.keep(Made(fake.images.detach(), fake.labels), fake.draw.lanes, step)
        self._made = kind_of(fake.images.device).mark(fake.images.device)

    def keep(self, made: Made, lanes: Lanes, step: int) -> None:
        self.rounds.setdefault(step, {})[lanes] = made
        for old in [s for s in self.rounds if s <= step - self.kept]:
            del self.rounds[old]

    def __call__(self, hand: Batch, step: int) -> Batch:
        """As many as the hand has, for D to judge, perhaps on another stream than that on which they are made."""
        self._made()
        lag = self.lag(step)
        newest = max((s for s in self.rounds if s <= step - lag), default=min(self.rounds))
        there = sorted((s for s in self.rounds if s <= newest), reverse=True)[: self.last]
        made = self._drawn(there, hand, self._turn(hand.draw.lanes, step))
        self.seen.note(step, newest, _counted(step, there, made))
        return Batch(made.images, made.labels, hand.draw)

    def _turn(self, lanes: Lanes, step: int) -> int:
        """How often these lanes have drawn in this round."""
        if self._draws[0] != step:
            self._draws = step, Counter()
        self._draws[1][lanes] += 1
        return self._draws[1][lanes] - 1

    def _drawn(self, there: list[int], hand: Batch, turn: int) -> Made:
        """Row i of a lane is row i of what was made for it, at the age that the policy gives it; where G's batch is of
        another size, rows are counted on, round after round."""
        draw = hand.draw
        rounds = [self._of(step, draw.lanes) for step in there]
        made = len(rounds[0].images) // len(draw.lanes)
        ages = self.policy.ages(draw, min(len(there), self.policy.last))
        if ages is None and made == draw.per_lane:
            return rounds[0]
        rows = np.tile(turn * draw.per_lane + np.arange(draw.per_lane), len(draw.lanes))
        if ages is None:
            ages = rows // made % len(there) if made < draw.per_lane else np.zeros_like(rows)
        at = np.repeat(np.arange(len(draw.lanes)) * made, draw.per_lane) + rows % made
        return Made.mixed(rounds, at, ages)

    def _of(self, step: int, lanes: Lanes) -> Made:
        """What was made in a step for some lanes, in their order."""
        passes = self.rounds[step]
        return passes[lanes] if lanes in passes else Made.joined(self._of_lane(passes, lane) for lane in lanes)

    def _of_lane(self, passes: Mapping[Lanes, Made], lane: int) -> Made:
        lanes, made = next((lanes, made) for lanes, made in passes.items() if lane in lanes)
        per_lane = len(made.images) // len(lanes)
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
            if name.startswith("fakes/") and name.endswith("/images"):
                _, step, lane, _ = name.split("/")
                made = Made(images, tensors.get(f"fakes/{step}/{lane}/labels"))
                self.rounds.setdefault(int(step), {})[(int(lane),)] = made


class PastCritic:
    """D as it was in G's turn some rounds ago, for G to play against.

    lag : how many; 0: as it now is;  most : the largest
    """

    def __init__(self, d: Player, lag: Lag, most: int):
        self.d, self.lag, self.most = d, lag, most
        self.net = _copied(d.net) if most else d.net
        self._coupled = [layer for layer in self.net.modules() if isinstance(layer, BatchCoupled)]
        self.versions: dict[int, Tensors] = {}  # by step
        self.seen = Seen()
        self._shown: int | None = None

    def __call__(self, step: int) -> Net:
        """Asked for in G's turn, while D stands where it is: that is remembered."""
        if self.most and step not in self.versions:
            self.versions[step] = {name: tensor.clone() for name, tensor in self.d.net.state_dict().items()}
            for old in [s for s in self.versions if s < step - self.most]:
                del self.versions[old]
        lag = self.lag(step)
        if not lag:
            self.seen.note(step, step, Counter({0: 1}))
            return self.d.net
        for mine, hers in zip(self._coupled, self.d.coupled, strict=True):
            mine.lane_batch = hers.lane_batch
        version = max((s for s in self.versions if s <= step - lag), default=min(self.versions))
        self.seen.note(step, version, Counter({step - version: 1}))
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
            if kind == "critic" and self.most:
                self.versions.setdefault(int(step), {})[what] = tensor


def _copied(net: nn.Module) -> nn.Module:
    """A network of its own, frozen. Tensors are copied one by one: deepcopy would copy the player's whole vectors, of
    which they are parts."""
    tensors: dict[int, Tensor] = {id(t): t.detach().clone() for t in net.buffers()}
    tensors |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in net.parameters()}
    return copy.deepcopy(net, tensors)
