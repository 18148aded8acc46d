"""What a feature space saw of some images: all that a score needs of them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paragan.errors import Unusable
from paragan.eval.features import FeatureSpace
from paragan.eval.scores import Gaussian, Moments
from paragan.eval.shares import Summing, dealt, of_first, whole

Sample = Callable[[range], Tensor]  # indices -> uint8 images [len, C, H, W], or numbers float32 [len, ...]


class Rows(Protocol):
    """Images uint8 [N, H, W, C], an array or what reads them when it is sliced."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Summary:
    """What a feature space saw of some images, the same on every rank. Made once, it serves often."""

    space: FeatureSpace
    image: tuple[int, ...]  # (C, H, W), or the shape of a record
    count: int
    gaussian: Gaussian | None = None  # where a metric needs it
    features: Tensor | None = None  # [count, F] float32, likewise


def gaussian_of(summary: Summary) -> Gaussian:
    """Raises `Unusable` where no metric that needs it was named when summarizing; `features_of` likewise."""
    if summary.gaussian is None:
        raise Unusable("reals: summarized without a covariance; name fd or fid when summarizing")
    return summary.gaussian


def features_of(summary: Summary) -> Tensor:
    if summary.features is None:
        raise Unusable("reals: summarized without their features; name kid or prdc when summarizing")
    return summary.features


Reading = Callable[[Summary], Any]


def look(
    sample: Sample,
    count: int,
    space: FeatureSpace,
    readings: Collection[Reading],
    group: Summing,
    batch: int,
    device: torch.device,
) -> Summary:
    """Look at images 0 to `count`, each rank at its share, and keep what `readings` will read.

    `readings` are `gaussian_of`, `features_of`, or both. Raises `Unusable` for what are no uint8 images, and
    for features that are not finite.
    """
    moments = Moments(space.num_features if gaussian_of in readings else 0, device)
    kept = [torch.zeros(0, space.num_features, device=device)]
    image = (0,) * (len(space.shape) or 3)
    for rows in dealt(count, batch, group.rank, group.size):
        pictures = _checked(sample(rows), len(rows), space)
        image = tuple(pictures.shape[1:])
        seen = space(pictures.to(device))
        if gaussian_of in readings:
            moments.add(seen)
        if features_of in readings:
            kept.append(seen)
    summary = Summary(
        space,
        tuple(of_first(group, torch.tensor(image, device=device)).tolist()),
        count,
        moments.gaussian(group) if gaussian_of in readings else None,
        whole(torch.cat(kept), count, batch, group) if features_of in readings else None,
    )
    return _finite(summary)


def rows_of(images: Rows, space: FeatureSpace) -> Sample:
    """A sampler of the rows of uint8 [N, H, W, C], or of float32 [N, ...]. Raises `Unusable` for another array."""
    if space.shape and images.dtype == np.float32:
        return lambda rows: torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop]))
    if images.dtype != np.uint8 or len(images.shape) != 4:
        raise Unusable(f"reals: want uint8 images [N, H, W, C], not {images.dtype} {list(images.shape)}")

    def sample(rows: range) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(images[rows.start : rows.stop].transpose(0, 3, 1, 2)))

    return sample


def _checked(pictures: Tensor, count: int, space: FeatureSpace) -> Tensor:
    if space.shape:
        if pictures.dtype != torch.float32 or pictures.shape != (count, *space.shape):
            found = f"{pictures.dtype} {list(pictures.shape)}"
            raise Unusable(f"fakes: want float32 {[count, *space.shape]}, not {found}")
        return pictures
    if pictures.dtype != torch.uint8 or pictures.ndim != 4 or len(pictures) != count:
        found = f"{pictures.dtype} {list(pictures.shape)}"
        raise Unusable(f"fakes: want uint8 images [{count}, C, H, W] in [0, 255], not {found}")
    return pictures


def _finite(summary: Summary) -> Summary:
    seen = summary.features if summary.gaussian is None else summary.gaussian.covariance
    if seen is not None and not seen.isfinite().all():
        raise Unusable(f"space: {summary.space.name} gave features that are not finite")
    return summary
