"""What a feature space saw of some images: all that a score needs of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.eval.accumulators import Accumulator, AccumulatorResults, FeatureBatch, FeaturePass
from paragan.eval.features import FeatureSpace
from paragan.eval.sharding import EvaluationAborted, ReduceGroup, all_ranks, block_shards, broadcast_from_rank0

SYNC_PERIOD_BLOCKS = 8  # blocks of a rank, after which all hear of each other
SampleFn = Callable[[range], Tensor]  # indices -> uint8 images [len, C, H, W], or numbers float32 [len, ...]
LabelsFn = Callable[[range], np.ndarray]  # indices -> int64 labels [len]


class ImageArray(Protocol):
    """Images uint8 [N, H, W, C], an array or what reads them when it is sliced."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class FeatureStats:
    """What a feature space saw of some images. Made once, it serves often; of features every rank has its share."""

    space: FeatureSpace
    image_shape: tuple[int, ...]  # (C, H, W), or the shape of a record; () where only statistics are known
    count: int  # 0 likewise
    results: AccumulatorResults = field(repr=False)
    source_file: str | None = None  # the file whose statistics these are, if they are

    def get(self, accumulator: Accumulator) -> Any:
        """Raises `Unusable` where no metric that needs it was named when summarizing."""
        if accumulator not in self.results:
            if self.source_file:
                names = f"it holds a mean and a covariance, which {accumulator.metrics} do not go by: ask for fd or fid"
                raise UsageError(f"reference: {self.source_file}: {names}, or leave the reference out")
            raise UsageError(
                f"reals: summarized without {accumulator.name}; name {accumulator.metrics} when summarizing"
            )
        return self.results[accumulator]


def extract(
    sample: SampleFn,
    feature_pass: FeaturePass,
    accumulators: Sequence[Accumulator],
    group: ReduceGroup,
    labels: LabelsFn | None = None,
) -> FeatureStats:
    """Look at images 0 to `look.count`, each rank at its share, and keep what was asked for.

    Raises `Unusable` for what are no uint8 images, and for features that are not finite; `GivenUp` where `look.heed`
    says so on all ranks.
    """
    known = {reading: reading.init(feature_pass) for reading in accumulators}
    told, bad = labels if any(reading.needs_labels for reading in accumulators) else None, torch.zeros(1)
    image = (0,) * (len(feature_pass.space.array_shape) or 3)
    for rows in _local_blocks(feature_pass, group):
        pictures = _check_images(sample(rows), len(rows), feature_pass.space)
        image = tuple(pictures.shape[1:])
        pictures = pictures.to(feature_pass.device)
        y = None if told is None else _check_labels(told(rows), rows, feature_pass.classes).to(feature_pass.device)
        seen = FeatureBatch(rows, pictures, feature_pass.space(pictures), y)
        bad += float(not seen.features.isfinite().all())
        for reading, so_far in known.items():
            reading.update(so_far, feature_pass, seen)
    image = tuple(broadcast_from_rank0(group, torch.tensor(image, device=feature_pass.device)).tolist())
    group.all_reduce_sum(bad).wait()
    if bad:
        raise UsageError(
            f"space: {feature_pass.space.name} gave features that are not finite"
        )  # on all ranks if on one
    kept = {reading: reading.compute(so_far, feature_pass, group) for reading, so_far in known.items()}
    return FeatureStats(feature_pass.space, image, feature_pass.count, kept)


def _local_blocks(feature_pass: FeaturePass, group: ReduceGroup) -> Iterator[range]:
    """The blocks of this rank. Now and then all hear from each other: who was lost is noticed before all is done, a
    group takes a long silence for a failure, and those who want to give up do so together."""
    mine = block_shards(feature_pass.count, feature_pass.block_size, group.rank, group.size)
    for number in range(-(-feature_pass.count // (feature_pass.block_size * group.size))):
        heard = group.size == 1 or number % SYNC_PERIOD_BLOCKS == SYNC_PERIOD_BLOCKS - 1
        if heard and all_ranks(group, feature_pass.should_abort(number * feature_pass.block_size * group.size)):
            raise EvaluationAborted
        yield from mine[number : number + 1]


def array_sampler(images: ImageArray, space: FeatureSpace) -> SampleFn:
    """A sampler of the rows of uint8 [N, H, W, C], or of float32 [N, ...]. Raises `Unusable` for another array."""
    if space.array_shape and images.dtype == np.float32:
        return lambda rows: torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop]))
    if images.dtype != np.uint8 or len(images.shape) != 4:
        raise UsageError(f"reals: want uint8 images [N, H, W, C], not {images.dtype} {list(images.shape)}")

    def sample(rows: range) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop].transpose(0, 3, 1, 2)))

    return sample


def _check_images(images: Tensor, count: int, space: FeatureSpace) -> Tensor:
    if space.array_shape:
        if images.dtype != torch.float32 or images.shape != (count, *space.array_shape):
            found = f"{images.dtype} {list(images.shape)}"
            raise UsageError(f"fakes: want float32 {[count, *space.array_shape]}, not {found}")
        return images
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != count:
        found = f"{images.dtype} {list(images.shape)}"
        raise UsageError(f"fakes: want uint8 images [{count}, C, H, W] in [0, 255], not {found}")
    return images


def _check_labels(values: np.ndarray, rows: range, classes: int) -> Tensor:
    """int64 [len(rows)] of classes that there are."""
    labels = torch.from_numpy(np.asarray(values, np.int64))
    if len(labels) != len(rows) or not ((labels >= 0) & (labels < classes)).all():
        raise UsageError(f"labels: want one of 0 to {classes - 1} for each image, and images {rows} have others")
    return labels
