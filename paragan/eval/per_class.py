"""Scores class by class: intra-class Fréchet distance (Miyato and Koyama 2018, arXiv 1802.05637), accuracy of a
classifier on fakes, and of one that was trained on fakes (Ravuri and Vinyals 2019, arXiv 1905.10887)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragan.eval.classifier import Training, by_first, fit, hits
from paragan.eval.frechet import Distance, Gaussian, frechet
from paragan.eval.sharding import Summing, of_first


def intra_frechet(real: Sequence[Gaussian | None], fake: Sequence[Gaussian | None]) -> list[Distance | None]:
    """The Fréchet distance within each class; None of one that has fewer than two reals or fakes."""
    return [frechet(a, b) if a and b else None for a, b in zip(real, fake, strict=True)]


def shares(tally: Tensor) -> tuple[float, list[float | None]]:
    """Of [classes, 2] (right, all): the share that is right, and that of each class; None of one without images."""
    right, there = tally.sum(0).tolist()
    return right / there, [r / n if n else None for r, n in tally.tolist()]


Labelled = tuple[Tensor, Tensor]  # images uint8 [N, C, R, R], labels int64 [N]


def trained_on_fakes(
    fakes: Labelled, reals: Labelled, classes: int, group: Summing, device: torch.device, how: Training
) -> Tensor:
    """[classes, 2] reals that a classifier tells right which was trained on fakes, and all; by rank 0, for all."""

    def train(each: Callable[[], None]) -> Tensor:
        return hits(fit(*fakes, classes, how, device, each), *reals, device)

    tally = by_first(group, how.steps(len(fakes[0])), train)
    return of_first(group, torch.zeros(classes, 2, dtype=torch.float64) if tally is None else tally)
