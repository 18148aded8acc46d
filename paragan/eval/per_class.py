"""Per-class scores: intra-class Fréchet distance (Miyato and Koyama 2018, arXiv 1802.05637), accuracy of a classifier
on fakes, and of a classifier trained on fakes (Ravuri and Vinyals 2019, arXiv 1905.10887).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragan.eval.classifier import ClassifierTraining, count_correct, run_on_rank0, train_classifier
from paragan.eval.frechet import FrechetDistance, Gaussian, frechet_distance
from paragan.eval.sharding import ReduceGroup, broadcast_from_rank0


def intra_frechet(real: Sequence[Gaussian | None], fake: Sequence[Gaussian | None]) -> list[FrechetDistance | None]:
    """Return the Fréchet distance of each class; None for a class with fewer than two reals or fakes."""
    return [frechet_distance(a, b) if a and b else None for a, b in zip(real, fake, strict=True)]


def accuracies(counts: Tensor) -> tuple[float, list[float | None]]:
    """Return the accuracy over all images, and that of each class (None without images), from [classes, 2] counts."""
    counts = counts.cpu()
    correct, total = counts.sum(0).tolist()
    return correct / total, [c / n if n else None for c, n in counts.tolist()]


LabelledImages = tuple[Tensor, Tensor]  # images uint8 [N, C, H, W], labels int64 [N]


def train_on_fakes_test_on_reals(
    fakes: LabelledImages,
    reals: LabelledImages,
    classes: int,
    group: ReduceGroup,
    device: torch.device,
    training: ClassifierTraining,
) -> Tensor:
    """Train a classifier on fakes and test it on reals, on rank 0. Every rank calls it.

    Returns:
        [classes, 2] float64 on every rank: the number of correctly classified reals, and of all reals.
    """

    def train(on_step: Callable[[], None]) -> Tensor:
        return count_correct(train_classifier(*fakes, classes, training, device, on_step), *reals, device)

    counts = run_on_rank0(group, training.num_steps(len(fakes[0])), train)
    return broadcast_from_rank0(group, torch.zeros(classes, 2, dtype=torch.float64) if counts is None else counts)
