"""Accumulators: what a pass over images collects for the metrics (a Gaussian, features, sums of logits, ...).

Each metric names the accumulators that it needs, and each of them collects from the same pass over the images. An
accumulator is a frozen description and the key of its result in `FeatureStats`; `init` returns its mutable state, which
`update` changes. Features stay on their rank (`eval/sharding.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paragan.core.host_copies import HostCopy, copy_to_device
from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian, RunningMoments
from paragan.eval.inception_score import InceptionScoreSums
from paragan.eval.sharding import FeatureShard, ReduceGroup, broadcast_from_rank0, gather_all

ShouldAbort = Callable[[int], bool]


def never_abort(images: int) -> bool:
    """Default of `should_abort`."""
    return False


@dataclass(frozen=True)
class PairedReals:
    """The reals that fakes were made from, where G is given data.

    sample      : maps indices of fakes to reals, as fakes are: uint8 [n, C, H, W], or float32 [n, ...]
    sample_rate : of audio, Hz; 0 for other data
    """

    sample: Callable[[range], Tensor]
    sample_rate: int = 0


@dataclass(frozen=True)
class FeaturePass:
    """One pass over images: how many, through which feature space, on which device.

    `should_abort` is called from time to time with the number of images so far, and returns whether this rank wants to
    abort.
    """

    space: FeatureSpace
    count: int
    block_size: int  # images per batch
    classes: int  # 0 without labels
    seed: int  # of random splits
    device: torch.device
    should_abort: ShouldAbort = field(default=never_abort, compare=False)
    pairs: PairedReals | None = field(default=None, compare=False)


class FeatureBatch(NamedTuple):
    """Some images and their features."""

    rows: range
    images: Tensor  # uint8 [n, C, H, W]
    features: Tensor  # float32 [n, F]; [n, 0] if all accumulators are paired
    labels: Tensor | None  # int64 [n], on the host
    reals: Tensor | None = None  # that the images were made from, of their shape and type, if an accumulator is paired


class Accumulator(Protocol):
    """Collects something from a pass over images."""

    @property
    def name(self) -> str:
        """Name in the cache; "" if the result depends on more than the images, and so is not cached."""
        ...

    @property
    def metrics(self) -> str:
        """Metrics that need it, for messages."""
        ...

    @property
    def needs_labels(self) -> bool:
        """Whether it needs labels."""
        ...

    @property
    def is_paired(self) -> bool:
        """True if it compares fakes with the reals that they were made from; it then uses no features."""
        ...

    def init(self, feature_pass: FeaturePass) -> Any:
        """Return the state before the first image."""
        ...

    def update(self, state: Any, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        """Add a batch to the state."""
        ...

    def compute(self, state: Any, feature_pass: FeaturePass, group: ReduceGroup) -> Any:
        """Return the result: reduced over all ranks, or this rank's shard. Every rank calls it."""
        ...


@dataclass(frozen=True)
class GaussianAcc:
    """Collects the Gaussian of the features."""

    name: str = "gaussian"
    metrics: str = "fd or fid"
    needs_labels: bool = False
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> RunningMoments:
        return RunningMoments(feature_pass.space.num_features, feature_pass.device)

    def update(self, state: RunningMoments, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        state.update(batch.features)

    def compute(self, state: RunningMoments, feature_pass: FeaturePass, group: ReduceGroup) -> Gaussian:
        return state.compute(group)


@dataclass(frozen=True)
class ClassGaussianAcc:
    """Collects the Gaussian of each class; None for a class with fewer than two images."""

    name: str = "gaussians of classes"
    metrics: str = "intra_fd or intra_fid"
    needs_labels: bool = True
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> list[RunningMoments]:
        return [
            RunningMoments(feature_pass.space.num_features, feature_pass.device) for _ in range(feature_pass.classes)
        ]

    def update(self, state: list[RunningMoments], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        order = batch.labels.argsort(stable=True)
        labels, counts = batch.labels.unique(return_counts=True)
        by_label = batch.features[copy_to_device(order, batch.features.device)].split(counts.tolist())
        for label, features in zip(labels.tolist(), by_label, strict=True):
            state[label].update(features)

    def compute(
        self, state: list[RunningMoments], feature_pass: FeaturePass, group: ReduceGroup
    ) -> list[Gaussian | None]:
        return [moments.compute_or_none(group) for moments in state]


@dataclass(frozen=True)
class FeatureAcc:
    """Collects the features; every rank holds its shard."""

    name: str = "features"
    metrics: str = "kid or prdc"
    needs_labels: bool = False
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> list[Tensor]:
        return [torch.zeros(0, feature_pass.space.num_features, device=feature_pass.device)]

    def update(self, state: list[Tensor], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        state.append(batch.features)

    def compute(self, state: list[Tensor], feature_pass: FeaturePass, group: ReduceGroup) -> FeatureShard:
        return FeatureShard(torch.cat(state), feature_pass.count, feature_pass.block_size)


@dataclass(frozen=True)
class LogitAcc:
    """Collects sums of class probabilities in random splits of the images."""

    splits: int
    name: str = ""
    metrics: str = "is"
    needs_labels: bool = False
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> InceptionScoreSums:
        return InceptionScoreSums(
            feature_pass.count, feature_pass.space.num_logits, self.splits, feature_pass.seed, feature_pass.device
        )

    def update(self, state: InceptionScoreSums, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        state.update(batch.rows, feature_pass.space.logits(batch.features.double()))

    def compute(self, state: InceptionScoreSums, feature_pass: FeaturePass, group: ReduceGroup) -> InceptionScoreSums:
        return state


@dataclass(frozen=True)
class AccuracyAcc:
    """Collects [classes, 2]: the number of correctly classified images of each class, and of all its images."""

    name: str = ""
    metrics: str = "accuracy"
    needs_labels: bool = True
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> Tensor:
        return torch.zeros(feature_pass.classes, 2, dtype=torch.float64, device=feature_pass.device)

    def update(self, state: Tensor, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        labels = copy_to_device(batch.labels, batch.features.device)
        correct = feature_pass.space.logits(batch.features).argmax(1) == labels
        state.index_add_(0, labels, torch.stack([correct, torch.ones_like(correct)], 1).double())

    def compute(self, state: Tensor, feature_pass: FeaturePass, group: ReduceGroup) -> Tensor:
        group.all_reduce_sum(state).wait()
        return state


@dataclass(frozen=True)
class ImageAcc:
    """Collects about `max_images` preprocessed images and their labels, some of every block, on every rank."""

    max_images: int
    name: str = ""
    metrics: str = "cas"
    needs_labels: bool = True
    is_paired: bool = False

    def init(self, feature_pass: FeaturePass) -> list[tuple[HostCopy, Tensor]]:
        return []

    def update(self, state: list[tuple[HostCopy, Tensor]], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        quota = self._images_per_block(feature_pass)
        state.append((HostCopy(feature_pass.space.preprocess(batch.images[:quota])), batch.labels[:quota]))

    def compute(
        self, state: list[tuple[HostCopy, Tensor]], feature_pass: FeaturePass, group: ReduceGroup
    ) -> tuple[Tensor, Tensor]:
        """Return all images, uint8 [N, C, H, W], and labels, int64 [N]."""
        quota = self._images_per_block(feature_pass)
        blocks, rest = divmod(feature_pass.count, feature_pass.block_size)
        count = blocks * quota + min(rest, quota)
        images = [copy.wait() for copy, _ in state]
        shape = broadcast_from_rank0(group, torch.tensor(images[0].shape[1:] if images else (0, 0, 0)))
        local = [torch.zeros(0, int(shape.prod()), dtype=torch.uint8), *(block.flatten(1) for block in images)]
        labels = [torch.zeros(0, dtype=torch.long), *(labels for _, labels in state)]
        all_images = gather_all(FeatureShard(torch.cat(local), count, quota), group)
        all_labels = gather_all(FeatureShard(torch.cat(labels)[:, None], count, quota), group)
        return all_images.view(-1, *shape.tolist()), all_labels[:, 0]

    def _images_per_block(self, feature_pass: FeaturePass) -> int:
        """Return how many images of every block are collected."""
        return min(feature_pass.block_size, max(1, feature_pass.block_size * self.max_images // feature_pass.count))


AccumulatorResults = Mapping[Accumulator, Any]


def unique_accumulators(accumulators: Sequence[Sequence[Accumulator]]) -> list[Accumulator]:
    """Return the accumulators of several metrics without duplicates, in order."""
    return list(dict.fromkeys(accumulator for group in accumulators for accumulator in group))
