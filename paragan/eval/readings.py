"""What a summary keeps of the images that go by: each metric names the readings it needs.

A reading is a description, and the key under which a summary has it; `begin` gives what collects it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paragan.eval.features import FeatureSpace
from paragan.eval.gaussian import Gaussian, Moments
from paragan.eval.marginals import Marginals
from paragan.eval.shares import Share, Summing, of_first, whole


@dataclass(frozen=True)
class Look:
    """What is looked at, how."""

    space: FeatureSpace
    count: int
    block: int  # images that are looked at together
    classes: int  # 0 without labels
    seed: int
    device: torch.device


class Seen(NamedTuple):
    """Some images, and what the space makes of them."""

    rows: range
    images: Tensor  # uint8 [n, C, H, W]
    features: Tensor  # float32 [n, F]
    labels: Tensor | None  # int64 [n]


class Collector(Protocol):
    def add(self, seen: Seen) -> None: ...
    def end(self, group: Summing) -> Any: ...  # joined over ranks, or this rank's share


class Reading(Protocol):
    """One that is a property of the images alone, and so may be kept for later, has a `name`."""

    @property
    def name(self) -> str: ...
    @property
    def wanted_by(self) -> str: ...  # metrics, for messages
    @property
    def labelled(self) -> bool: ...  # whether it needs labels
    def begin(self, look: Look) -> Collector: ...


@dataclass(frozen=True)
class OfAll:
    """The Gaussian of the features."""

    name: str = "gaussian"
    wanted_by: str = "fd or fid"
    labelled: bool = False

    def begin(self, look: Look) -> Collector:
        return _Gaussian(look)


class _Gaussian:
    def __init__(self, look: Look):
        self.moments = Moments(look.space.num_features, look.device)

    def add(self, seen: Seen) -> None:
        self.moments.add(seen.features)

    def end(self, group: Summing) -> Gaussian:
        return self.moments.gaussian(group)


@dataclass(frozen=True)
class OfClasses:
    """The Gaussian of each class; None of one that has fewer than two images."""

    name: str = "gaussians of classes"
    wanted_by: str = "intra_fd or intra_fid"
    labelled: bool = True

    def begin(self, look: Look) -> Collector:
        return _Gaussians(look)


class _Gaussians:
    def __init__(self, look: Look):
        self.moments = [Moments(look.space.num_features, look.device) for _ in range(look.classes)]

    def add(self, seen: Seen) -> None:
        assert seen.labels is not None
        for label in seen.labels.unique().tolist():
            self.moments[label].add(seen.features[seen.labels == label])

    def end(self, group: Summing) -> list[Gaussian | None]:
        return [moments.fitted(group) for moments in self.moments]


@dataclass(frozen=True)
class Features:
    """The features themselves, each rank its share."""

    name: str = "features"
    wanted_by: str = "kid or prdc"
    labelled: bool = False

    def begin(self, look: Look) -> Collector:
        return _Features(look)


class _Features:
    def __init__(self, look: Look):
        self.look, self.kept = look, [torch.zeros(0, look.space.num_features, device=look.device)]

    def add(self, seen: Seen) -> None:
        self.kept.append(seen.features)

    def end(self, group: Summing) -> Share:
        return Share(torch.cat(self.kept), self.look.count, self.look.block)


@dataclass(frozen=True)
class Guesses:
    """Sums over what a classifier makes of the images, in random splits."""

    splits: int
    name: str = ""
    wanted_by: str = "is"
    labelled: bool = False

    def begin(self, look: Look) -> Collector:
        return _Guesses(look, self.splits)


class _Guesses:
    def __init__(self, look: Look, splits: int):
        self.space = look.space
        self.marginals = Marginals(look.count, look.space.num_logits, splits, look.seed, look.device)

    def add(self, seen: Seen) -> None:
        self.marginals.add(seen.rows, self.space.logits(seen.features.double()))

    def end(self, group: Summing) -> Marginals:
        return self.marginals


@dataclass(frozen=True)
class Hits:
    """[classes, 2]: how many images of each class the classifier tells right, and how many there are."""

    name: str = ""
    wanted_by: str = "accuracy"
    labelled: bool = True

    def begin(self, look: Look) -> Collector:
        return _Hits(look)


class _Hits:
    def __init__(self, look: Look):
        self.space = look.space
        self.tally = torch.zeros(look.classes, 2, dtype=torch.float64, device=look.device)

    def add(self, seen: Seen) -> None:
        assert seen.labels is not None
        right = self.space.logits(seen.features).argmax(1) == seen.labels
        self.tally.index_add_(0, seen.labels, torch.stack([right, torch.ones_like(right)], 1).double())

    def end(self, group: Summing) -> Tensor:
        group.sum(self.tally).wait()
        return self.tally


@dataclass(frozen=True)
class Pictures:
    """About `most` images, some of every block, as the space's classifier sees them, and their labels: all of them on
    every rank."""

    most: int
    name: str = ""
    wanted_by: str = "cas"
    labelled: bool = True

    def begin(self, look: Look) -> Collector:
        return _Pictures(look, min(look.block, max(1, look.block * self.most // look.count)))


class _Pictures:
    def __init__(self, look: Look, quota: int):
        self.look, self.quota = look, quota  # of every block
        self.kept: list[Tensor] = []
        self.labels = [torch.zeros(0, dtype=torch.long)]

    def add(self, seen: Seen) -> None:
        assert seen.labels is not None
        self.kept.append(self.look.space.seen(seen.images[: self.quota]).cpu())
        self.labels.append(seen.labels[: self.quota].cpu())

    def end(self, group: Summing) -> tuple[Tensor, Tensor]:
        """uint8 [N, C, R, R], int64 [N]."""
        blocks, rest = divmod(self.look.count, self.look.block)
        count = blocks * self.quota + min(rest, self.quota)
        shape = of_first(group, torch.tensor(self.kept[0].shape[1:] if self.kept else (0, 0, 0)))
        own = torch.cat(self.kept).flatten(1) if self.kept else torch.zeros(0, int(shape.prod()), dtype=torch.uint8)
        images = whole(Share(own, count, self.quota), group)
        labels = whole(Share(torch.cat(self.labels)[:, None], count, self.quota), group)
        return images.view(-1, *shape.tolist()), labels[:, 0]


Kept = Mapping[Reading, Any]


def wanted(readings: Sequence[Sequence[Reading]]) -> list[Reading]:
    """Each once, in order."""
    return list(dict.fromkeys(reading for several in readings for reading in several))
