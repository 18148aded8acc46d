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

from paragan.core.devices import backend_of
from paragan.core.types import Batch, DiscriminatorFn
from paragan.game.player import BatchCoupled, Player
from paragan.game.replay_policy import Ages, ReplayPolicy

LagFn = Callable[[int], int]  # step -> how many rounds back
LaneIds = tuple[int, ...]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FakeBatch:
    """Images of some lanes, one lane after the other: [N, C, H, W], and their labels [N] or None."""

    images: Tensor
    labels: Tensor | None
    ages: Ages | int = 0  # of each, in rounds before the newest

    def slice_rows(self, start: int, end: int) -> FakeBatch:
        return FakeBatch(self.images[start:end], None if self.labels is None else self.labels[start:end])

    @staticmethod
    def from_rounds(rounds: Sequence[FakeBatch], rows: Ages, ages: Ages) -> FakeBatch:
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
        return FakeBatch(images, labels, ages)

    @staticmethod
    def concat(parts: Iterable[FakeBatch]) -> FakeBatch:
        some = list(parts)
        labels = [part.labels for part in some if part.labels is not None]
        return FakeBatch(torch.cat([part.images for part in some]), torch.cat(labels) if labels else None)


@dataclass
class StalenessStats:
    """How many rounds old was what a player saw. ages: of every image, or every opponent, since they were last asked
    for; pattern: of the newest in each round."""

    ages: Counter[int] = field(default_factory=Counter[int])
    lags: dict[int, int] = field(default_factory=dict[int, int])  # by step

    def record(self, step: int, newest: int, ages: Counter[int]) -> None:
        self.lags[step] = step - newest
        self.ages.update(ages)

    def pop(self) -> tuple[Counter[int], dict[int, int]]:
        """Both, which then begin anew."""
        found = self.ages, self.lags
        self.ages, self.lags = Counter(), {}
        return found


def _age_histogram(step: int, available_steps: Sequence[int], fakes: FakeBatch) -> Counter[int]:
    """How many of them are how old."""
    ages = np.bincount(np.broadcast_to(fakes.ages, len(fakes.images)))
    return Counter({step - available_steps[i]: int(n) for i, n in enumerate(ages) if n})


class FakeReplayBuffer:
    """The images that G made in its turns, and D draws from: a bounded buffer.

    lag  : how many rounds ago the newest that may be drawn were made (at the beginning: the oldest there are)
    most : the largest lag
    ratio: images of G's batch for one of D's. Of more, a further step of D in a round takes the next ones; of fewer,
           those of rounds before are drawn as well
    """

    def __init__(self, policy: ReplayPolicy, lag: LagFn, max_lag: int, g_to_d_batch_ratio: float = 1.0):
        self.policy, self.lag = policy, lag
        self.window = max(policy.window, math.ceil(1 / g_to_d_batch_ratio))
        self.capacity = max_lag + self.window
        self.rounds: dict[int, dict[LaneIds, FakeBatch]] = {}  # by step, then by the lanes of a pass
        self.staleness = StalenessStats()
        self._wait_for_fakes: Callable[[], None] = lambda: None
        self._draw_counts: tuple[int, Counter[LaneIds]] = (-1, Counter())  # in the round that is being played

    def push(self, fake: Batch, step: int) -> None:
        """G made these in this step."""
        self.insert(FakeBatch(fake.images.detach(), fake.labels), fake.rng.lanes, step)
        self._wait_for_fakes = backend_of(fake.images.device).record_event(fake.images.device)

    def insert(self, fakes: FakeBatch, lanes: LaneIds, step: int) -> None:
        self.rounds.setdefault(step, {})[lanes] = fakes
        for old in [s for s in self.rounds if s <= step - self.capacity]:
            del self.rounds[old]

    def __call__(self, micro_batch: Batch, step: int) -> Batch:
        """As many as the hand has, for D to judge, perhaps on another stream than that on which they are made."""
        self._wait_for_fakes()
        lag = self.lag(step)
        newest = max((s for s in self.rounds if s <= step - lag), default=min(self.rounds))
        there = sorted((s for s in self.rounds if s <= newest), reverse=True)[: self.window]
        made = self._sample(there, micro_batch, self._count_draw(micro_batch.rng.lanes, step))
        self.staleness.record(step, newest, _age_histogram(step, there, made))
        return Batch(made.images, made.labels, micro_batch.rng)

    def _count_draw(self, lanes: LaneIds, step: int) -> int:
        """How often these lanes have drawn in this round."""
        if self._draw_counts[0] != step:
            self._draw_counts = step, Counter()
        self._draw_counts[1][lanes] += 1
        return self._draw_counts[1][lanes] - 1

    def _sample(self, available_steps: list[int], micro_batch: Batch, draw_index: int) -> FakeBatch:
        """Row i of a lane is row i of what was made for it, at the age that the policy gives it; where G's batch is of
        another size, rows are counted on, round after round."""
        draw = micro_batch.rng
        rounds = [self._get_lanes(step, draw.lanes) for step in available_steps]
        made = len(rounds[0].images) // len(draw.lanes)
        ages = self.policy.sample_ages(draw, min(len(available_steps), self.policy.window))
        if ages is None and made == draw.per_lane:
            return rounds[0]
        rows = np.tile(draw_index * draw.per_lane + np.arange(draw.per_lane), len(draw.lanes))
        if ages is None:
            ages = rows // made % len(available_steps) if made < draw.per_lane else np.zeros_like(rows)
        at = np.repeat(np.arange(len(draw.lanes)) * made, draw.per_lane) + rows % made
        return FakeBatch.from_rounds(rounds, at, ages)

    def _get_lanes(self, step: int, lanes: LaneIds) -> FakeBatch:
        """What was made in a step for some lanes, in their order."""
        passes = self.rounds[step]
        return passes[lanes] if lanes in passes else FakeBatch.concat(self._get_lane(passes, lane) for lane in lanes)

    def _get_lane(self, passes: Mapping[LaneIds, FakeBatch], lane: int) -> FakeBatch:
        lanes, made = next((lanes, made) for lanes, made in passes.items() if lane in lanes)
        per_lane = len(made.images) // len(lanes)
        at = lanes.index(lane) * per_lane
        return made.slice_rows(at, at + per_lane)

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
                made = FakeBatch(images, tensors.get(f"fakes/{step}/{lane}/labels"))
                self.rounds.setdefault(int(step), {})[(int(lane),)] = made


class StaleDiscriminator:
    """D as it was in G's turn some rounds ago, for G to play against.

    lag : how many; 0: as it now is;  most : the largest
    """

    def __init__(self, d: Player, lag: LagFn, max_lag: int):
        self.d, self.lag, self.max_lag = d, lag, max_lag
        self.net = _frozen_copy(d.net) if max_lag else d.net
        self._batch_coupled_layers = [layer for layer in self.net.modules() if isinstance(layer, BatchCoupled)]
        self.versions: dict[int, Tensors] = {}  # by step
        self.staleness = StalenessStats()
        self._loaded_version: int | None = None

    def __call__(self, step: int) -> DiscriminatorFn:
        """Asked for in G's turn, while D stands where it is: that is remembered."""
        if self.max_lag and step not in self.versions:
            self.versions[step] = {name: tensor.clone() for name, tensor in self.d.net.state_dict().items()}
            for old in [s for s in self.versions if s < step - self.max_lag]:
                del self.versions[old]
        lag = self.lag(step)
        if not lag:
            self.staleness.record(step, step, Counter({0: 1}))
            return self.d.net
        for mine, hers in zip(self._batch_coupled_layers, self.d.batch_coupled_layers, strict=True):
            mine.lane_batch = hers.lane_batch
        version = max((s for s in self.versions if s <= step - lag), default=min(self.versions))
        self.staleness.record(step, version, Counter({step - version: 1}))
        if version != self._loaded_version:
            self.net.load_state_dict(self.versions[version])
            self._loaded_version = version
        return self.net

    def state(self) -> Tensors:
        return {f"critic/{step}/{name}": t for step, version in self.versions.items() for name, t in version.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.versions, self._loaded_version = {}, None
        for name, tensor in tensors.items():
            kind, step, what = name.split("/", 2)
            if kind == "critic" and self.max_lag:
                self.versions.setdefault(int(step), {})[what] = tensor


def _frozen_copy(net: nn.Module) -> nn.Module:
    """A network of its own, frozen. Tensors are copied one by one: deepcopy would copy the player's whole vectors, of
    which they are parts."""
    tensors: dict[int, Tensor] = {id(t): t.detach().clone() for t in net.buffers()}
    tensors |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in net.parameters()}
    return copy.deepcopy(net, tensors)
