"""What a summary keeps of the images that go by: each metric names the readings it needs.

A reading is a description, and the key under which a summary has it; it adds what it sees to what `begin` gave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian, Moments
from paragan.eval.inception_score import Marginals
from paragan.eval.sharding import Share, Summing, of_first, whole

Heed = Callable[[int], bool]


def unheeded(seen: int) -> bool:
    """Nobody watches, and nobody wants to give up."""
    return False


@dataclass(frozen=True)
class Look:
    """What is looked at, how. heed: is told now and then how many images were looked at, and says whether this rank
    would give up."""

    space: FeatureSpace
    count: int
    block: int  # images that are looked at together
    classes: int  # 0 without labels
    seed: int
    device: torch.device
    heed: Heed = field(default=unheeded, compare=False)


class Seen(NamedTuple):
    """Some images, and what the space makes of them."""

    rows: range
    images: Tensor  # uint8 [n, C, H, W]
    features: Tensor  # float32 [n, F]
    labels: Tensor | None  # int64 [n]


class Reading(Protocol):
    """One that is a property of the images alone, and so may be kept for later, has a `name`."""

    @property
    def name(self) -> str: ...
    @property
    def wanted_by(self) -> str: ...  # metrics, for messages
    @property
    def labelled(self) -> bool: ...  # whether it needs labels

    def begin(self, look: Look) -> Any: ...  # what is known of no images yet: `so_far` below
    def add(self, so_far: Any, look: Look, seen: Seen) -> None: ...
    def end(self, so_far: Any, look: Look, group: Summing) -> Any: ...  # joined over ranks, or this rank's share


@dataclass(frozen=True)
class OfAll:
    """The Gaussian of the features."""

    name: str = "gaussian"
    wanted_by: str = "fd or fid"
    labelled: bool = False

    def begin(self, look: Look) -> Moments:
        return Moments(look.space.num_features, look.device)

    def add(self, so_far: Moments, look: Look, seen: Seen) -> None:
        so_far.add(seen.features)

    def end(self, so_far: Moments, look: Look, group: Summing) -> Gaussian:
        return so_far.gaussian(group)


@dataclass(frozen=True)
class OfClasses:
    """The Gaussian of each class; None of one that has fewer than two images."""

    name: str = "gaussians of classes"
    wanted_by: str = "intra_fd or intra_fid"
    labelled: bool = True

    def begin(self, look: Look) -> list[Moments]:
        return [Moments(look.space.num_features, look.device) for _ in range(look.classes)]

    def add(self, so_far: list[Moments], look: Look, seen: Seen) -> None:
        assert seen.labels is not None
        for label in seen.labels.unique().tolist():
            so_far[label].add(seen.features[seen.labels == label])

    def end(self, so_far: list[Moments], look: Look, group: Summing) -> list[Gaussian | None]:
        return [moments.fitted(group) for moments in so_far]


@dataclass(frozen=True)
class Features:
    """The features themselves, each rank its share."""

    name: str = "features"
    wanted_by: str = "kid or prdc"
    labelled: bool = False

    def begin(self, look: Look) -> list[Tensor]:
        return [torch.zeros(0, look.space.num_features, device=look.device)]

    def add(self, so_far: list[Tensor], look: Look, seen: Seen) -> None:
        so_far.append(seen.features)

    def end(self, so_far: list[Tensor], look: Look, group: Summing) -> Share:
        return Share(torch.cat(so_far), look.count, look.block)


@dataclass(frozen=True)
class Guesses:
    """Sums over what a classifier makes of the images, in random splits."""

    splits: int
    name: str = ""
    wanted_by: str = "is"
    labelled: bool = False

    def begin(self, look: Look) -> Marginals:
        return Marginals(look.count, look.space.num_logits, self.splits, look.seed, look.device)

    def add(self, so_far: Marginals, look: Look, seen: Seen) -> None:
        so_far.add(seen.rows, look.space.logits(seen.features.double()))

    def end(self, so_far: Marginals, look: Look, group: Summing) -> Marginals:
        return so_far


@dataclass(frozen=True)
class Hits:
    """[classes, 2]: how many images of each class the classifier tells right, and how many there are."""

    name: str = ""
    wanted_by: str = "accuracy"
    labelled: bool = True

    def begin(self, look: Look) -> Tensor:
        return torch.zeros(look.classes, 2, dtype=torch.float64, device=look.device)

    def add(self, so_far: Tensor, look: Look, seen: Seen) -> None:
        assert seen.labels is not None
        right = look.space.logits(seen.features).argmax(1) == seen.labels
        so_far.index_add_(0, seen.labels, torch.stack([right, torch.ones_like(right)], 1).double())

    def end(self, so_far: Tensor, look: Look, group: Summing) -> Tensor:
        group.sum(so_far).wait()
        return so_far


@dataclass(frozen=True)
class Pictures:
    """About `most` images, some of every block, as the space's classifier sees them, and their labels: all of them on
    every rank."""

    most: int
    name: str = ""
    wanted_by: str = "cas"
    labelled: bool = True

    def begin(self, look: Look) -> list[tuple[Tensor, Tensor]]:
        return []

    def add(self, so_far: list[tuple[Tensor, Tensor]], look: Look, seen: Seen) -> None:
        assert seen.labels is not None
        quota = self._quota(look)
        so_far.append((look.space.seen(seen.images[:quota]).cpu(), seen.labels[:quota].cpu()))

    def end(self, so_far: list[tuple[Tensor, Tensor]], look: Look, group: Summing) -> tuple[Tensor, Tensor]:
        """uint8 [N, C, R, R], int64 [N]."""
        quota, (blocks, rest) = self._quota(look), divmod(look.count, look.block)
        count = blocks * quota + min(rest, quota)
        shape = of_first(group, torch.tensor(so_far[0][0].shape[1:] if so_far else (0, 0, 0)))
        own = [torch.zeros(0, int(shape.prod()), dtype=torch.uint8), *(images.flatten(1) for images, _ in so_far)]
        labels = [torch.zeros(0, dtype=torch.long), *(labels for _, labels in so_far)]
        images = whole(Share(torch.cat(own), count, quota), group)
        numbers = whole(Share(torch.cat(labels)[:, None], count, quota), group)
        return images.view(-1, *shape.tolist()), numbers[:, 0]

    def _quota(self, look: Look) -> int:
        """Of every block."""
        return min(look.block, max(1, look.block * self.most // look.count))


Kept = Mapping[Reading, Any]


def wanted(readings: Sequence[Sequence[Reading]]) -> list[Reading]:
    """Each once, in order."""
    return list(dict.fromkeys(reading for several in readings for reading in several))
