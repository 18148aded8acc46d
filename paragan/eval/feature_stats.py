"""What a feature space saw of some images: all that a score needs of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import Unusable
from paragan.eval.accumulators import Kept, Look, Reading, Seen
from paragan.eval.features import FeatureSpace
from paragan.eval.sharding import GivenUp, Summing, dealt, everywhere, of_first

HEARD = 8  # blocks of a rank, after which all hear of each other
Sample = Callable[[range], Tensor]  # indices -> uint8 images [len, C, H, W], or numbers float32 [len, ...]
LabelsOf = Callable[[range], np.ndarray]  # indices -> int64 labels [len]


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
    """What a feature space saw of some images. Made once, it serves often; of features every rank has its share."""

    space: FeatureSpace
    image: tuple[int, ...]  # (C, H, W), or the shape of a record; () where only statistics are known
    count: int  # 0 likewise
    kept: Kept = field(repr=False)
    source: str | None = None  # the file whose statistics these are, if they are

    def of(self, reading: Reading) -> Any:
        """Raises `Unusable` where no metric that needs it was named when summarizing."""
        if reading not in self.kept:
            if self.source:
                names = f"it holds a mean and a covariance, which {reading.wanted_by} do not go by: ask for fd or fid"
                raise Unusable(f"reference: {self.source}: {names}, or leave the reference out")
            raise Unusable(f"reals: summarized without {reading.name}; name {reading.wanted_by} when summarizing")
        return self.kept[reading]


def look(
    sample: Sample,
    look: Look,
    readings: Sequence[Reading],
    group: Summing,
    labels: LabelsOf | None = None,
) -> Summary:
    """Look at images 0 to `look.count`, each rank at its share, and keep what was asked for.

    Raises `Unusable` for what are no uint8 images, and for features that are not finite; `GivenUp` where `look.heed`
    says so on all ranks.
    """
    known = {reading: reading.begin(look) for reading in readings}
    told, bad = labels if any(reading.labelled for reading in readings) else None, torch.zeros(1)
    image = (0,) * (len(look.space.shape) or 3)
    for rows in _in_step(look, group):
        pictures = _checked(sample(rows), len(rows), look.space)
        image = tuple(pictures.shape[1:])
        pictures = pictures.to(look.device)
        y = None if told is None else _labels(told(rows), rows, look.classes).to(look.device)
        seen = Seen(rows, pictures, look.space(pictures), y)
        bad += float(not seen.features.isfinite().all())
        for reading, so_far in known.items():
            reading.add(so_far, look, seen)
    image = tuple(of_first(group, torch.tensor(image, device=look.device)).tolist())
    group.sum(bad).wait()
    if bad:
        raise Unusable(f"space: {look.space.name} gave features that are not finite")  # on all ranks if on one
    kept = {reading: reading.end(so_far, look, group) for reading, so_far in known.items()}
    return Summary(look.space, image, look.count, kept)


def _in_step(look: Look, group: Summing) -> Iterator[range]:
    """The blocks of this rank. Now and then all hear from each other: who was lost is noticed before all is done, a
    group takes a long silence for a failure, and those who want to give up do so together."""
    mine = dealt(look.count, look.block, group.rank, group.size)
    for number in range(-(-look.count // (look.block * group.size))):
        heard = group.size == 1 or number % HEARD == HEARD - 1
        if heard and everywhere(group, look.heed(number * look.block * group.size)):
            raise GivenUp
        yield from mine[number : number + 1]


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


def _labels(given: np.ndarray, rows: range, classes: int) -> Tensor:
    """int64 [len(rows)] of classes that there are."""
    labels = torch.from_numpy(np.asarray(given, np.int64))
    if len(labels) != len(rows) or not ((labels >= 0) & (labels < classes)).all():
        raise Unusable(f"labels: want one of 0 to {classes - 1} for each image, and images {rows} have others")
    return labels
