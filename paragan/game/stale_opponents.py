"""Stale opponents: images that G made in earlier turns, and D as it was some rounds ago.

Both keep what a checkpoint needs, lane by lane, so that another number of ranks can resume.
"""

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
from paragan.core.host_copies import copy_to_device
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn
from paragan.game.player import BatchCoupled, Player
from paragan.game.replay_policy import Ages, ReplayPolicy

LagFn = Callable[[int], int]  # step -> how many rounds back
LaneIds = tuple[int, ...]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class FakeBatch:
    """What G made for some lanes, one lane after the other.

    arrays : "images" [N, ...], "labels" [N] if there are any, and the fields [N, ...] of G's output that D's loss uses
    ages   : of each image, in rounds before the newest
    """

    arrays: Mapping[str, Tensor]
    ages: Ages | int = 0

    @property
    def images(self) -> Tensor:
        return self.arrays["images"]

    @property
    def labels(self) -> Tensor | None:
        return self.arrays.get("labels")

    @staticmethod
    def from_batch(fake: Batch, fields: Sequence[str] = ()) -> FakeBatch:
        """Return what is replayed of the fakes that G has just made: with the fields of its output so named."""
        arrays = {"images": fake.images.detach()}
        if fake.labels is not None:
            arrays["labels"] = fake.labels
        return FakeBatch(arrays | {name: fake.fields[name].detach() for name in fields})

    def to_batch(self, rng: LaneRng) -> Batch:
        """Return it as fakes for D."""
        fields = {name: x for name, x in self.arrays.items() if name not in ("images", "labels")}
        return Batch(self.images, self.labels, rng, fields=fields)

    def slice_rows(self, start: int, end: int) -> FakeBatch:
        """Return the rows from `start` to before `end`."""
        return FakeBatch({name: x[start:end] for name, x in self.arrays.items()})

    @staticmethod
    def from_rounds(rounds: Sequence[FakeBatch], rows: Ages, ages: Ages) -> FakeBatch:
        """Return a batch whose image i is row `rows[i]` of round `ages[i]`."""
        first = rounds[0]
        device = first.images.device
        at = copy_to_device(torch.as_tensor(rows), device)
        arrays = {name: x[at] for name, x in first.arrays.items()}
        for age in range(1, len(rounds)):
            selected = copy_to_device(torch.as_tensor(np.flatnonzero(ages == age)), device)
            for name, x in arrays.items():
                x[selected] = rounds[age].arrays[name][at[selected]]
        return FakeBatch(arrays, ages)

    @staticmethod
    def concat(parts: Iterable[FakeBatch]) -> FakeBatch:
        """Return the rows of all parts, in order."""
        batches = list(parts)
        return FakeBatch({name: torch.cat([batch.arrays[name] for batch in batches]) for name in batches[0].arrays})


@dataclass
class StalenessStats:
    """How old, in rounds, what a player trained against was, since the last `pop`.

    ages : histogram over all images, or all opponents
    lags : of the newest, by step
    """

    ages: Counter[int] = field(default_factory=Counter[int])
    lags: dict[int, int] = field(default_factory=dict[int, int])

    def record(self, step: int, newest: int, ages: Counter[int]) -> None:
        """Count what was used in a step; `newest` is the step that its newest part is from."""
        self.lags[step] = step - newest
        self.ages.update(ages)

    def pop(self) -> tuple[Counter[int], dict[int, int]]:
        """Return ages and lags, and start again."""
        ages = self.ages
        lags = self.lags
        self.ages = Counter()
        self.lags = {}
        return ages, lags


def _age_histogram(step: int, available_steps: Sequence[int], fakes: FakeBatch) -> Counter[int]:
    """Return the histogram of image ages, in rounds."""
    ages = np.bincount(np.broadcast_to(fakes.ages, len(fakes.images)))
    return Counter({step - available_steps[i]: int(n) for i, n in enumerate(ages) if n})


class FakeReplayBuffer:
    """A bounded buffer of the images of G's turns, from which D draws.

    policy             : the ages of the images that D draws
    lag                : step -> how many rounds ago the newest that may be drawn were made (early: the oldest)
    max_lag            : the largest lag
    g_to_d_batch_ratio : images of G's batch for one of D's. Above 1, further steps of D in a round take the next
                         images; below 1, images of earlier rounds are drawn as well
    fields             : the fields of G's output that D's loss uses
    """

    def __init__(
        self,
        policy: ReplayPolicy,
        lag: LagFn,
        max_lag: int,
        g_to_d_batch_ratio: float = 1.0,
        fields: Sequence[str] = (),
    ):
        self.policy = policy
        self.lag = lag
        self.fields = tuple(fields)
        self.window = max(policy.window, math.ceil(1 / g_to_d_batch_ratio))
        self.capacity = max_lag + self.window
        self.rounds: dict[int, dict[LaneIds, FakeBatch]] = {}  # by step, then by the lanes of a pass
        self.staleness = StalenessStats()
        self._wait_for_fakes: Callable[[], None] = lambda: None
        self._draw_counts: tuple[int, Counter[LaneIds]] = (-1, Counter())  # in the current round

    def push(self, fake: Batch, step: int) -> None:
        """Add the images of one pass of G."""
        self.insert(FakeBatch.from_batch(fake, self.fields), fake.rng.lanes, step)
        self._wait_for_fakes = backend_of(fake.images.device).record_event(fake.images.device).wait

    def insert(self, fakes: FakeBatch, lanes: LaneIds, step: int) -> None:
        """Add images of some lanes, and drop rounds that are too old."""
        self.rounds.setdefault(step, {})[lanes] = fakes
        for old in [s for s in self.rounds if s <= step - self.capacity]:
            del self.rounds[old]

    def __call__(self, micro_batch: Batch, step: int) -> Batch:
        """Return as many fakes as a micro-batch has rows; maybe on another stream than G."""
        self._wait_for_fakes()
        lag = self.lag(step)
        newest = max((s for s in self.rounds if s <= step - lag), default=min(self.rounds))
        available_steps = sorted((s for s in self.rounds if s <= newest), reverse=True)[: self.window]
        fakes = self._sample(available_steps, micro_batch, self._count_draw(micro_batch.rng.lanes, step))
        self.staleness.record(step, newest, _age_histogram(step, available_steps, fakes))
        return fakes.to_batch(micro_batch.rng)

    def _count_draw(self, lanes: LaneIds, step: int) -> int:
        """Return how often these lanes drew in this round before."""
        if self._draw_counts[0] != step:
            self._draw_counts = step, Counter()
        self._draw_counts[1][lanes] += 1
        return self._draw_counts[1][lanes] - 1

    def _sample(self, available_steps: list[int], micro_batch: Batch, draw_index: int) -> FakeBatch:
        """Row i of a lane is row i of the fakes of that lane, at the age that the policy gives. If G's batch
        and D's differ in size, rows are counted on from draw to draw, and from round to round."""
        rng = micro_batch.rng
        rounds = [self._get_lanes(step, rng.lanes) for step in available_steps]
        fakes_per_lane = len(rounds[0].images) // len(rng.lanes)
        ages = self.policy.sample_ages(rng, min(len(available_steps), self.policy.window))
        if ages is None and fakes_per_lane == rng.per_lane:
            return rounds[0]
        rows = np.tile(draw_index * rng.per_lane + np.arange(rng.per_lane), len(rng.lanes))
        if ages is None:
            if fakes_per_lane < rng.per_lane:
                ages = rows // fakes_per_lane % len(available_steps)
            else:
                ages = np.zeros_like(rows)
        at = np.repeat(np.arange(len(rng.lanes)) * fakes_per_lane, rng.per_lane) + rows % fakes_per_lane
        return FakeBatch.from_rounds(rounds, at, ages)

    def _get_lanes(self, step: int, lanes: LaneIds) -> FakeBatch:
        """Return the fakes of one step for some lanes, in their order."""
        passes = self.rounds[step]
        return passes[lanes] if lanes in passes else FakeBatch.concat(self._get_lane(passes, lane) for lane in lanes)

    def _get_lane(self, passes: Mapping[LaneIds, FakeBatch], lane: int) -> FakeBatch:
        lanes, fakes = next((lanes, fakes) for lanes, fakes in passes.items() if lane in lanes)
        per_lane = len(fakes.images) // len(lanes)
        start = lanes.index(lane) * per_lane
        return fakes.slice_rows(start, start + per_lane)

    def state(self) -> Tensors:
        """Return the images lane by lane, so that another number of ranks can load them."""
        tensors: Tensors = {}
        for step, passes in self.rounds.items():
            for lanes, fakes in passes.items():
                for name, x in fakes.arrays.items():
                    tensors |= {f"fakes/{step}/{lane}/{name}": part for lane, part in zip(lanes, x.chunk(len(lanes)))}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from the `state` of all ranks."""
        arrays: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, x in tensors.items():
            if name.startswith("fakes/"):
                _, step, lane, field = name.split("/")
                arrays.setdefault((int(step), int(lane)), {})[field] = x
        self.rounds = {}
        for (step, lane), of_lane in arrays.items():
            self.rounds.setdefault(step, {})[(lane,)] = FakeBatch(of_lane)


class StaleDiscriminator:
    """D as it was in G's turn some rounds ago, for G to train against.

    lag     : step -> how many rounds; 0: the current D
    max_lag : the largest lag
    """

    def __init__(self, d: Player, lag: LagFn, max_lag: int):
        self.d = d
        self.lag = lag
        self.max_lag = max_lag
        self.net = _frozen_copy(d.net) if max_lag else d.net
        self._batch_coupled_layers = [layer for layer in self.net.modules() if isinstance(layer, BatchCoupled)]
        self.versions: dict[int, Tensors] = {}  # by step
        self.staleness = StalenessStats()
        self._loaded_version: int | None = None

    def __call__(self, step: int) -> DiscriminatorFn:
        """Return the D of `lag` rounds ago. Called in G's turn, before D steps: the current D is saved."""
        if self.max_lag and step not in self.versions:
            self.versions[step] = {name: tensor.clone() for name, tensor in self.d.net.state_dict().items()}
            for old in [s for s in self.versions if s < step - self.max_lag]:
                del self.versions[old]
        lag = self.lag(step)
        if not lag:
            self.staleness.record(step, step, Counter({0: 1}))
            return self.d.net
        for stale, current in zip(self._batch_coupled_layers, self.d.batch_coupled_layers, strict=True):
            stale.lane_batch = current.lane_batch
        version = max((s for s in self.versions if s <= step - lag), default=min(self.versions))
        self.staleness.record(step, version, Counter({step - version: 1}))
        if version != self._loaded_version:
            self.net.load_state_dict(self.versions[version])
            self._loaded_version = version
        return self.net

    def state(self) -> Tensors:
        """Return the saved versions of D."""
        return {f"critic/{step}/{name}": t for step, version in self.versions.items() for name, t in version.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from the `state` of all ranks."""
        self.versions = {}
        self._loaded_version = None
        for name, tensor in tensors.items():
            kind, step, what = name.split("/", 2)
            if kind == "critic" and self.max_lag:
                self.versions.setdefault(int(step), {})[what] = tensor


def _frozen_copy(net: nn.Module) -> nn.Module:
    """Return a frozen copy. Tensors are copied one by one: deepcopy would copy the whole flat vectors behind them."""
    tensors: dict[int, Tensor] = {id(t): t.detach().clone() for t in net.buffers()}
    tensors |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in net.parameters()}
    return copy.deepcopy(net, tensors)
