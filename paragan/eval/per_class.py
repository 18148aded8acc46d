"""Scores class by class: intra-class Fréchet distance (Miyato and Koyama 2018, arXiv 1802.05637), accuracy of a
classifier on fakes, and of one that was trained on fakes (Ravuri and Vinyals 2019, arXiv 1905.10887)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paragan.eval.classifier import ClassifierTraining, count_correct, run_on_rank0, train_classifier
from paragan.eval.frechet import FrechetDistance, Gaussian, frechet_distance
from paragan.eval.sharding import ReduceGroup, broadcast_from_rank0


def intra_frechet(real: Sequence[Gaussian | None], fake: Sequence[Gaussian | None]) -> list[FrechetDistance | None]:
    """The Fréchet distance within each class; None of one that has fewer than two reals or fakes."""
    return [frechet_distance(a, b) if a and b else None for a, b in zip(real, fake, strict=True)]


def accuracies(tally: Tensor) -> tuple[float, list[float | None]]:
    """Of [classes, 2] (right, all): the share that is right, and that of each class; None of one without images."""
    right, there = tally.sum(0).tolist()
    return right / there, [r / n if n else None for r, n in tally.tolist()]


LabelledImages = tuple[Tensor, Tensor]  # images uint8 [N, C, R, R], labels int64 [N]


def train_on_fakes_test_on_reals(
    fakes: LabelledImages,
    reals: LabelledImages,
    classes: int,
    group: ReduceGroup,
    device: torch.device,
    training: ClassifierTraining,
) -> Tensor:
    """[classes, 2] reals that a classifier tells right which was trained on fakes, and all; by rank 0, for all."""

    def train(on_step: Callable[[], None]) -> Tensor:
        return count_correct(train_classifier(*fakes, classes, training, device, on_step), *reals, device)

    tally = run_on_rank0(group, training.num_steps(len(fakes[0])), train)
    return broadcast_from_rank0(group, torch.zeros(classes, 2, dtype=torch.float64) if tally is None else tally)
