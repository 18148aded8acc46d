"""Scores class by class: intra-class Fréchet distance (Miyato and Koyama 2018, arXiv 1802.05637), accuracy of a
classifier on fakes, and of one that was trained on fakes (Ravuri and Vinyals 2019, arXiv 1905.10887)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paragan.errors import Unusable
from paragan.eval.classifier import Training, fit, hits
from paragan.eval.gaussian import Distance, Gaussian, frechet


def intra_frechet(real: Sequence[Gaussian | None], fake: Sequence[Gaussian | None]) -> list[Distance | None]:
    """The Fréchet distance within each class; None of one that has fewer than two reals or fakes."""
    return [frechet(a, b) if a and b else None for a, b in zip(real, fake, strict=True)]


def shares(tally: Tensor) -> tuple[float, list[float | None]]:
    """Of [classes, 2] (right, all): the share that is right, and that of each class; None of one without images."""
    right, there = tally.sum(0).tolist()
    return right / there, [r / n if n else None for r, n in tally.tolist()]


def trained_on_fakes(
    fakes: tuple[Tensor, Tensor], reals: tuple[Tensor, Tensor], classes: int, device: torch.device, how: Training
) -> Tensor:
    """[classes, 2] reals that a classifier tells right which was trained on fakes; images [N, C, R, R] and labels."""
    if fakes[0].shape[1:] != reals[0].shape[1:]:
        raise Unusable(f"reals: {list(reals[0].shape[1:])}, the fakes {list(fakes[0].shape[1:])}; they must agree")
    net = fit(*fakes, classes, how, device)
    return hits(net, *reals, device)
