"""Run images through a feature space and collect what scores need of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.host_copies import copy_to_device
from paragan.eval.accumulators import Accumulator, AccumulatorResults, FeatureBatch, FeaturePass
from paragan.eval.features import FeatureSpace
from paragan.eval.sharding import EvaluationAborted, ReduceGroup, all_ranks, block_shards, broadcast_from_rank0

SYNC_PERIOD_BLOCKS = 8  # blocks of a rank between two votes on aborting
SampleFn = Callable[[range], Tensor]  # indices -> uint8 images [len, C, H, W], or float32 arrays [len, ...]
LabelsFn = Callable[[range], np.ndarray]  # indices -> int64 labels [len]


class ImageArray(Protocol):
    """Images uint8 [N, H, W, C]: an array, or an object that reads them when it is sliced."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class FeatureStats:
    """Results of a pass over images. Features are sharded over ranks."""

    space: FeatureSpace
    image_shape: tuple[int, ...]  # (C, H, W), or the shape of a record; () if unknown
    count: int  # 0 if unknown
    results: AccumulatorResults = field(repr=False)
    source_file: str | None = None  # the file that the statistics come from, if any

    def get(self, accumulator: Accumulator) -> Any:
        """Return the result of an accumulator. Raises `UsageError` if it was not collected."""
        if accumulator in self.results:
            return self.results[accumulator]
        if self.source_file:
            raise UsageError(
                f"reference={self.source_file}: holds only a mean and a covariance, and {accumulator.metrics} needs "
                "more. Use fd, or fid if it is of Inception, or no reference"
            )
        raise UsageError(
            f"reals: their stats have no {accumulator.name}. Compute them with metrics={accumulator.metrics}"
        )


def extract(
    sample: SampleFn,
    feature_pass: FeaturePass,
    accumulators: Sequence[Accumulator],
    group: ReduceGroup,
    labels: LabelsFn | None = None,
) -> FeatureStats:
    """Run images 0 to `feature_pass.count` through the space, each rank its blocks, and fill the accumulators.

    Args:
        sample: Images of a range of indices.
        feature_pass: Space, number of images, block size and device.
        accumulators: What to collect.
        group: All ranks; every rank calls this.
        labels: Labels of a range of indices, if an accumulator needs them.

    Raises:
        UsageError: The images are not uint8, a label is no class, features are not finite, or fakes and the reals that
            they were made from differ in shape.
        EvaluationAborted: `feature_pass.should_abort` returned True on all ranks.
    """
    space = feature_pass.space
    device = feature_pass.device
    states = {accumulator: accumulator.init(feature_pass) for accumulator in accumulators}
    if not any(accumulator.needs_labels for accumulator in accumulators):
        labels = None
    uses_features = not all(accumulator.is_paired for accumulator in accumulators)
    pairs = feature_pass.pairs if any(accumulator.is_paired for accumulator in accumulators) else None
    num_nonfinite = torch.zeros(1, device=device)
    shape = tuple(0 for _ in space.array_shape) or (0, 0, 0)
    for rows in _local_blocks(feature_pass, group):
        images = _check_images(sample(rows), len(rows), space)
        shape = tuple(images.shape[1:])
        images = copy_to_device(images, device)
        y = None if labels is None else _check_labels(labels(rows), rows, feature_pass.classes)
        reals = None if pairs is None else copy_to_device(_check_reals(pairs.sample(rows), images), device)
        batch = FeatureBatch(rows, images, space(images) if uses_features else images.new_empty(len(rows), 0), y, reals)
        num_nonfinite += batch.features.isfinite().all().logical_not()
        for accumulator, state in states.items():
            accumulator.update(state, feature_pass, batch)
    shape = tuple(broadcast_from_rank0(group, torch.tensor(shape)).tolist())
    num_nonfinite = num_nonfinite.cpu()
    group.all_reduce_sum(num_nonfinite).wait()
    if num_nonfinite:  # on all ranks if on one
        raise UsageError(f"space={space.name}: returned features that are not finite. Use finite images and weights")
    results = {accumulator: accumulator.compute(state, feature_pass, group) for accumulator, state in states.items()}
    return FeatureStats(space, shape, feature_pass.count, results)


def _local_blocks(feature_pass: FeaturePass, group: ReduceGroup) -> Iterator[range]:
    """Yield the blocks of this rank, and let all ranks vote on aborting every `SYNC_PERIOD_BLOCKS` blocks.

    The votes also detect lost ranks early, and break the silence that a group would take for a failure.
    """
    blocks = block_shards(feature_pass.count, feature_pass.block_size, group.rank, group.size)
    images_per_block = feature_pass.block_size * group.size  # of all ranks
    for index in range(-(-feature_pass.count // images_per_block)):
        votes = group.size == 1 or index % SYNC_PERIOD_BLOCKS == SYNC_PERIOD_BLOCKS - 1
        if votes and all_ranks(group, feature_pass.should_abort(index * images_per_block)):
            raise EvaluationAborted
        yield from blocks[index : index + 1]


def array_sampler(images: ImageArray, space: FeatureSpace) -> SampleFn:
    """Return a sampler of the rows of uint8 [N, H, W, C] or float32 [N, ...]. Raises `UsageError` for other arrays."""
    if space.array_shape and images.dtype == np.float32:
        return lambda rows: torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop]))
    if images.dtype != np.uint8 or len(images.shape) != 4:
        raise UsageError(f"reals: {images.dtype} {list(images.shape)} are no images. Use uint8 [N, H, W, C]")

    def sample(rows: range) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop].transpose(0, 3, 1, 2)))

    return sample


def _check_images(images: Tensor, count: int, space: FeatureSpace) -> Tensor:
    if space.array_shape:
        if images.dtype != torch.float32 or images.shape != (count, *space.array_shape):
            actual = f"{images.dtype} {list(images.shape)}"
            raise UsageError(f"fakes: expected float32 {[count, *space.array_shape]}, got {actual}")
        return images
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != count:
        actual = f"{images.dtype} {list(images.shape)}"
        raise UsageError(f"fakes: expected uint8 images [{count}, C, H, W] in [0, 255], got {actual}")
    return images


def _check_reals(reals: Tensor, fakes: Tensor) -> Tensor:
    if reals.shape != fakes.shape or reals.dtype != fakes.dtype:
        actual = (
            f"{fakes.dtype} {list(fakes.shape)}, and the reals they were made from {reals.dtype} {list(reals.shape)}"
        )
        raise UsageError(f"fakes: are {actual}. Leave psnr, log_mel and stft out, or return the shape of the reals")
    return reals


def _check_labels(values: np.ndarray, rows: range, classes: int) -> Tensor:
    """Return the labels as int64 [len(rows)]. Raises `UsageError` unless all are classes."""
    labels = torch.from_numpy(np.asarray(values, np.int64))
    if len(labels) != len(rows) or not ((labels >= 0) & (labels < classes)).all():
        raise UsageError(f"labels: expected one of 0 to {classes - 1} for each image, got others for images {rows}")
    return labels
