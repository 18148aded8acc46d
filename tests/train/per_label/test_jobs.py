"""The games of a run per label: budgets, order, what a rare label starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import tiny_run
from advice import advises
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.train.per_label.jobs import describe_rare_labels, make_jobs
from paragan.train.prepare import prepare

COUNTS = (40, 10, 25)


def images(counts=COUNTS, classes=("ant", "bee", "cat")):
    """Images of a label are of about one brightness: cat is nearer to ant than to bee."""
    dataset = tiny_run.make_dataset()
    labels = np.repeat(np.arange(len(counts)), counts)
    pixels = np.broadcast_to(np.array([100, 240, 130])[labels][:, None, None, None], (len(labels), 8, 8, 1))
    return dataclasses.replace(dataset, images=pixels.astype(np.uint8), labels=labels, classes=classes)


def run(*settings, ranks=1):
    config = tiny_run.make_run("strategy=per-label", "evaluation.metrics=[fd, prdc]", *settings)
    return prepare(config, ranks, images()).run


def make_label_jobs(*settings, dataset=None):
    return make_jobs(run(*settings), dataset or images(), Path("run"))


def test_a_label_is_an_ordinary_run_on_its_images():
    first = make_label_jobs("kimg=3", "seed=7", "output.tick_kimg=3", "objective.r1=2")[1]
    assert (first.label, first.name, first.class_name, first.num_images) == (1, "0001", "bee", 10)
    assert first.run.strategy.name == "sync"
    assert first.run.data.only == 1
    assert not first.run.data.labels
    assert first.run.kimg == pytest.approx(1)
    assert first.run.output.tick_kimg == pytest.approx(1)
    assert first.run.seed == 8
    assert first.run.objective.r1 == 2
    assert first.run.batch == run().batch


def test_scores_that_need_more_images_are_left_out():
    assert [job.run.evaluation.metrics for job in make_label_jobs()] == [("fd", "prdc")] * 3
    few = images((40, 6, 25))
    assert [job.run.evaluation.metrics for job in make_label_jobs(dataset=few)] == [
        ("fd", "prdc"),
        ("fd",),
        ("fd", "prdc"),
    ]


def test_per_class_scores_are_not_of_a_label():
    settings = ("evaluation.metrics=[fd, intra_fd, accuracy]", "evaluation.features=resnet20")
    assert [job.run.evaluation.metrics for job in make_label_jobs(*settings)] == [()] * 3
    assert [job.run.evaluation.metrics for job in make_label_jobs("evaluation.metrics=[fd, intra_fd]")] == [("fd",)] * 3


def test_budgets_are_equal_or_proportional_longest_first():
    assert [(job.label, round(job.run.kimg, 6)) for job in make_label_jobs("kimg=3")] == [(0, 1), (1, 1), (2, 1)]
    by_data = make_label_jobs("kimg=7.5", "strategy.budget_by=data", "strategy.minutes=15")
    assert [(job.label, round(job.run.kimg, 6)) for job in by_data] == [(0, 4), (2, 2.5), (1, 1)]
    assert [round(job.max_seconds) for job in by_data] == [480, 300, 120]


def test_a_budget_is_spent_by_images_or_time():
    job = make_label_jobs("kimg=3", "strategy.minutes=1")[0]
    assert job.run.total_images == 1008
    assert not job.is_complete(992, 19.9)
    assert job.is_complete(1008, 1)
    assert job.is_complete(16, 20)
    assert not make_label_jobs("kimg=3")[0].is_complete(992, 1e9)


def test_a_rare_label_starts_from_the_nearest_common_one():
    cold = make_label_jobs("strategy.rare_below=30")
    assert [job.source_label for job in cold] == [None] * 3
    warm = make_label_jobs("strategy.rare_below=25", "strategy.warm_start=nearest")
    assert [(job.label, job.source_label) for job in warm] == [(0, None), (2, None), (1, 2)]
    assert Path(warm[2].run.init_from) == Path("run/labels/0002").absolute()
    all_rare = make_label_jobs("strategy.rare_below=100", "strategy.warm_start=nearest")
    assert [job.source_label for job in all_rare] == [None] * 3


def test_rare_labels_are_named():
    strategy = run("strategy.rare_below=26").per_label
    assert "bee (10), cat (25)" in describe_rare_labels(strategy, images())
    assert "ant" not in describe_rare_labels(strategy, images())
    assert describe_rare_labels(run("strategy.rare_below=10").per_label, images()) == ""


def test_every_label_has_images_as_advised():
    with pytest.raises(UsageError, match="needs images with classes"):
        make_label_jobs(dataset=dataclasses.replace(images(), labels=None, classes=()))
    with advises("label 1 (bee): has no images. Add some, or remove the class"):
        make_label_jobs(dataset=images((40, 0, 25)))
    for advised in (images((40, 1, 25)), images((40, 25), ("ant", "cat"))):
        assert len(make_label_jobs(dataset=advised)) == len(advised.classes)


def test_every_label_has_a_step_as_advised():
    with advises("--kimg 0.04: over 3 labels leaves 13.3 images for one, and a step takes 16. Use --kimg 0.05 or more"):
        make_label_jobs("kimg=0.04")
    assert len(make_label_jobs("kimg=0.05")) == 3
    by_data = "strategy.budget_by=data"
    with advises(
        "--kimg 0.1: over 3 labels leaves 13.3 images for one, and a step takes 16. Use --kimg 0.12 or more, or a "
        "smaller --batch"
    ):
        make_label_jobs("kimg=0.1", by_data)
    assert len(make_label_jobs("kimg=0.12", by_data)) == 3
    assert len(make_label_jobs("kimg=0.1", by_data, "batch=8")) == 3


@pytest.mark.parametrize("labels", [1, 2, 3, 10])
@pytest.mark.parametrize("ranks", range(1, 13))
def test_ranks_are_assigned_to_labels_in_all_proportions(ranks, labels):
    strategy = run().per_label
    teams = {strategy.ranks_of_label(rank, ranks, labels) for rank in range(ranks)}
    assert sorted(rank for team in teams for rank in team) == list(range(ranks))
    assert len(teams) == min(ranks, labels)
    assert max(map(len, teams)) - min(map(len, teams)) <= 1
    assert all(rank in strategy.ranks_of_label(rank, ranks, labels) for rank in range(ranks))


def test_ranks_per_label_is_respected():
    strategy = run("strategy.ranks_per_label=2", ranks=5).per_label
    assert [list(strategy.ranks_of_label(rank, 5, 10)) for rank in (0, 2, 4)] == [[0, 1], [2, 3, 4], [2, 3, 4]]
    central = run("strategy=DC-CGAN").per_label
    assert (central.per_label_strategy.name, central.ranks_per_label) == ("async", 2)
    assert list(central.ranks_of_label(0, 1, 10)) == [0]
    with pytest.raises(UsageError, match=r"--strategy.ranks_per_label=4: only 2 ranks were started"):
        validate(run("strategy.ranks_per_label=4", ranks=4), 2)
