"""Scores on an accelerator equal those on the CPU, and the host waits for it as often as there are batches, or less."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import standin
from paragan.eval.classifier import ClassifierTraining, classifier_space
from paragan.eval.evaluate import ClassLabels, Score, evaluate
from paragan.eval.features import FeatureSpace, module_features, pixels

NAMES = ("a", "b", "c")
BATCH = 64
RNG = np.random.default_rng(0)
REALS = RNG.integers(0, 256, (192, 8, 8, 1), np.uint8)
FAKES = torch.from_numpy(RNG.integers(0, 256, (128, 1, 8, 8), np.uint8))
NUM_BATCHES = (len(REALS) + len(FAKES)) // BATCH
LABELS = ClassLabels(NAMES, np.arange(len(REALS)) % 3, lambda rows: np.asarray(rows) % 3)
TRAINING = ClassifierTraining(max_images=100, max_samples=200)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, images):
        return self.layer(images.flatten(1).float())


def classifier(device: torch.device) -> FeatureSpace:
    labels = LABELS.reals
    return classifier_space(REALS, labels, NAMES, data_digest=device.type, device=device, training=TRAINING)


def scores_of(space: FeatureSpace, metrics: list[str], device: torch.device) -> list[Score]:
    return evaluate(
        lambda rows: FAKES[rows.start : rows.stop],
        REALS,
        space=space,
        metrics=metrics,
        count=len(FAKES),
        batch=BATCH,
        device=device,
        labels=LABELS,
    )


def values(scores: list[Score]) -> list[tuple[object, ...]]:
    assert not any(score.failure for score in scores)
    return [(score.name, score.value, score.error, score.per_class, score.notes) for score in scores]


SPACES = {"pixels": lambda device: pixels(8, 1), "module": lambda device: module_features("mine", Linear(), 5)}


@pytest.mark.parametrize("make_space", SPACES.values(), ids=SPACES)
def test_scores_of_features_equal_those_of_the_cpu(make_space):
    device = standin.install()
    torch.manual_seed(0)
    space = make_space(device)
    metrics = ["fd", "kid", "prdc", "intra_fd"]
    expected = values(scores_of(space, metrics, torch.device("cpu")))
    space.module.to(device)
    with standin.recording() as waits:
        assert values(scores_of(space, metrics, device)) == expected
    assert_few_waits(waits, gaussians=2 + 2 * len(NAMES))


def test_a_classifier_is_trained_and_scores_as_on_the_cpu():
    device = standin.install()
    space = classifier(torch.device("cpu"))
    metrics = ["accuracy", "is1", "kid"]
    expected = values(scores_of(space, metrics, torch.device("cpu")))
    with standin.recording() as waits:
        space = classifier(device)
    assert sum(wait.name == "copy to the device" for wait in waits) == len(space.module.state_dict())
    space.module.to(device)
    with standin.recording() as waits:
        assert values(scores_of(space, metrics, device)) == expected
    assert_few_waits(waits, gaussians=0)


def assert_few_waits(waits: list[standin.syncs.Sync], gaussians: int) -> None:
    """Besides one for each Gaussian that goes to the host, there are no more waits than batches."""
    copied = [wait for wait in waits if wait.line.startswith("paragan/eval/frechet.py")]
    assert len(copied) == gaussians
    assert len(waits) - len(copied) <= NUM_BATCHES, [*map(str, waits)]
