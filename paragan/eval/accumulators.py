"""What a summary keeps of the images that go by: each metric names the readings it needs.

A reading is a description, and the key under which a summary has it; it adds what it sees to what `begin` gave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian, RunningMoments
from paragan.eval.inception_score import InceptionScoreSums
from paragan.eval.sharding import FeatureShard, ReduceGroup, broadcast_from_rank0, gather_all

ShouldAbort = Callable[[int], bool]


def never_abort(images: int) -> bool:
    """Nobody watches, and nobody wants to give up."""
    return False


@dataclass(frozen=True)
class FeaturePass:
    """What is looked at, how. heed: is told now and then how many images were looked at, and says whether this rank
    would give up."""

    space: FeatureSpace
    count: int
    block_size: int  # images that are looked at together
    classes: int  # 0 without labels
    seed: int
    device: torch.device
    should_abort: ShouldAbort = field(default=never_abort, compare=False)


class FeatureBatch(NamedTuple):
    """Some images, and what the space makes of them."""

    rows: range
    images: Tensor  # uint8 [n, C, H, W]
    features: Tensor  # float32 [n, F]
    labels: Tensor | None  # int64 [n]


class Accumulator(Protocol):
    """One that is a property of the images alone, and so may be kept for later, has a `name`."""

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> str: ...  # metrics, for messages
    @property
    def needs_labels(self) -> bool: ...  # whether it needs labels

    def init(self, feature_pass: FeaturePass) -> Any: ...  # what is known of no images yet: `so_far` below
    def update(self, state: Any, feature_pass: FeaturePass, batch: FeatureBatch) -> None: ...
    def compute(
        self, state: Any, feature_pass: FeaturePass, group: ReduceGroup
    ) -> Any: ...  # joined over ranks, or this rank's share


@dataclass(frozen=True)
class GaussianAcc:
    """The Gaussian of the features."""

    name: str = "gaussian"
    metrics: str = "fd or fid"
    needs_labels: bool = False

    def init(self, feature_pass: FeaturePass) -> RunningMoments:
        return RunningMoments(feature_pass.space.num_features, feature_pass.device)

    def update(self, state: RunningMoments, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        state.update(batch.features)

    def compute(self, state: RunningMoments, feature_pass: FeaturePass, group: ReduceGroup) -> Gaussian:
        return state.compute(group)


@dataclass(frozen=True)
class ClassGaussianAcc:
    """The Gaussian of each class; None of one that has fewer than two images."""

    name: str = "gaussians of classes"
    metrics: str = "intra_fd or intra_fid"
    needs_labels: bool = True

    def init(self, feature_pass: FeaturePass) -> list[RunningMoments]:
        return [
            RunningMoments(feature_pass.space.num_features, feature_pass.device) for _ in range(feature_pass.classes)
        ]

    def update(self, state: list[RunningMoments], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        for label in batch.labels.unique().tolist():
            state[label].update(batch.features[batch.labels == label])

    def compute(
        self, state: list[RunningMoments], feature_pass: FeaturePass, group: ReduceGroup
    ) -> list[Gaussian | None]:
        return [moments.compute_or_none(group) for moments in state]


@dataclass(frozen=True)
class FeatureAcc:
    """The features themselves, each rank its share."""

    name: str = "features"
    metrics: str = "kid or prdc"
    needs_labels: bool = False

    def init(self, feature_pass: FeaturePass) -> list[Tensor]:
        return [torch.zeros(0, feature_pass.space.num_features, device=feature_pass.device)]

    def update(self, state: list[Tensor], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        state.append(batch.features)

    def compute(self, state: list[Tensor], feature_pass: FeaturePass, group: ReduceGroup) -> FeatureShard:
        return FeatureShard(torch.cat(state), feature_pass.count, feature_pass.block_size)


@dataclass(frozen=True)
class LogitAcc:
    """Sums over what a classifier makes of the images, in random splits."""

    splits: int
    name: str = ""
    metrics: str = "is"
    needs_labels: bool = False

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
    """[classes, 2]: how many images of each class the classifier tells right, and how many there are."""

    name: str = ""
    metrics: str = "accuracy"
    needs_labels: bool = True

    def init(self, feature_pass: FeaturePass) -> Tensor:
        return torch.zeros(feature_pass.classes, 2, dtype=torch.float64, device=feature_pass.device)

    def update(self, state: Tensor, feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        right = feature_pass.space.logits(batch.features).argmax(1) == batch.labels
        state.index_add_(0, batch.labels, torch.stack([right, torch.ones_like(right)], 1).double())

    def compute(self, state: Tensor, feature_pass: FeaturePass, group: ReduceGroup) -> Tensor:
        group.all_reduce_sum(state).wait()
        return state


@dataclass(frozen=True)
class ImageAcc:
    """About `most` images, some of every block, as the space's classifier sees them, and their labels: all of them on
    every rank."""

    max_images: int
    name: str = ""
    metrics: str = "cas"
    needs_labels: bool = True

    def init(self, feature_pass: FeaturePass) -> list[tuple[Tensor, Tensor]]:
        return []

    def update(self, state: list[tuple[Tensor, Tensor]], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.labels is not None
        quota = self._images_per_block(feature_pass)
        state.append((feature_pass.space.preprocess(batch.images[:quota]).cpu(), batch.labels[:quota].cpu()))

    def compute(
        self, state: list[tuple[Tensor, Tensor]], feature_pass: FeaturePass, group: ReduceGroup
    ) -> tuple[Tensor, Tensor]:
        """uint8 [N, C, R, R], int64 [N]."""
        quota, (blocks, rest) = (
            self._images_per_block(feature_pass),
            divmod(feature_pass.count, feature_pass.block_size),
        )
        count = blocks * quota + min(rest, quota)
        shape = broadcast_from_rank0(group, torch.tensor(state[0][0].shape[1:] if state else (0, 0, 0)))
        own = [torch.zeros(0, int(shape.prod()), dtype=torch.uint8), *(images.flatten(1) for images, _ in state)]
        labels = [torch.zeros(0, dtype=torch.long), *(labels for _, labels in state)]
        images = gather_all(FeatureShard(torch.cat(own), count, quota), group)
        numbers = gather_all(FeatureShard(torch.cat(labels)[:, None], count, quota), group)
        return images.view(-1, *shape.tolist()), numbers[:, 0]

    def _images_per_block(self, feature_pass: FeaturePass) -> int:
        """Of every block."""
        return min(feature_pass.block_size, max(1, feature_pass.block_size * self.max_images // feature_pass.count))


AccumulatorResults = Mapping[Accumulator, Any]


def unique_accumulators(accumulators: Sequence[Sequence[Accumulator]]) -> list[Accumulator]:
    """Each once, in order."""
    return list(dict.fromkeys(reading for several in accumulators for reading in several))
