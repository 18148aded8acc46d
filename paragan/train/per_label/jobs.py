"""The jobs of a per-label run, as plain data: one ordinary run for each label, on the images of that label."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.eval import classifier
from paragan.eval.metrics import METRICS
from paragan.models.per_label_layout import label_dir
from paragan.optim.optimizers import PlayerOptim
from paragan.strategies.per_label_wcgan import PerLabel

MIN_FAKES_PER_LABEL = 1000  # for the scores of a label


@dataclass(frozen=True)
class Job:
    """The training of one label.

    run          : what is trained
    num_images   : images of the label
    max_seconds  : of training (0: no limit)
    source_label : the label from whose finished model it starts, if any
    """

    label: int
    class_name: str
    run: Run
    num_images: int
    max_seconds: float = 0.0
    source_label: int | None = None

    def describe(self) -> str:
        """Return a line for the console."""
        text = f"label {self.label} ({self.class_name}): {self.num_images:,} images"
        text += f", {self.run.total_images / 1000:g} kimg"
        if self.max_seconds:
            text += f" or {self.max_seconds:.3g} s of training, whichever ends first"
        if self.source_label is not None:
            text += f"; from the model of label {self.source_label}"
        return text

    @property
    def name(self) -> str:
        """Its name in the queue."""
        return f"{self.label:04d}"

    def is_complete(self, images: float, seconds: float) -> bool:
        """Return True if training with this many images and seconds has used the budget."""
        return images >= self.run.total_images or (bool(self.max_seconds) and seconds >= self.max_seconds)


def make_jobs(run: Run, dataset: Dataset, folder: Path) -> list[Job]:
    """Make the jobs of a run, the longest first, so that none starts late; those that start from another's model last.

    Args:
        folder: of the run, where models to start from will be.

    Raises:
        UsageError: there are no labels, a label has no images, or a budget is less than a step.
    """
    strategy = run.per_label
    labels = dataset.labels
    assert strategy is not None
    if labels is None:
        raise UsageError(
            "--strategy per-label: needs images with classes. Use PATH/<class>/*.png, or an .npz with labels"
        )
    counts = [int(n) for n in np.bincount(labels, minlength=len(dataset.classes))]
    empty = [f"{label} ({dataset.classes[label]})" for label, count in enumerate(counts) if not count]
    if empty:
        raise UsageError(f"label {_list_names(empty, 5)}: has no images. Add some, or remove the class")
    shares = strategy.budget_fractions(counts)
    source_labels = _warm_start_labels(strategy, dataset, counts)
    jobs: list[Job] = []
    for label, (share, source_label) in enumerate(zip(shares, source_labels)):
        init_from = "" if source_label is None else str(label_dir(folder / "labels", source_label).absolute())
        label_run = _label_run(run, strategy, label, share, counts[label], init_from, len(counts))
        max_seconds = 60 * strategy.minutes * share
        jobs.append(Job(label, dataset.classes[label], label_run, counts[label], max_seconds, source_label))
    _check_budget_per_label(run, jobs, shares)
    return sorted(jobs, key=lambda job: (job.source_label is not None, -job.run.total_images, job.label))


def _list_names(names: Sequence[str], max_names: int) -> str:
    """Join names: "a, b and 3 more"."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def describe_jobs(label_jobs: Sequence[Job]) -> str:
    """Return a line that says how long each label is trained."""
    runs = sorted((job.run for job in label_jobs), key=lambda run: run.total_images)
    shortest = runs[0]
    longest = runs[-1]
    min_kimg = f"{shortest.total_images / 1000:g}"
    max_kimg = f"{longest.total_images / 1000:g}"
    if min_kimg == max_kimg:
        return f"{len(label_jobs)} games of {min_kimg} kimg ({shortest.total_rounds:,} steps of G) each"
    steps = f"{shortest.total_rounds:,} to {longest.total_rounds:,} steps of G"
    return f"{len(label_jobs)} games of {min_kimg} to {max_kimg} kimg ({steps})"


def describe_rare_labels(strategy: PerLabel, dataset: Dataset) -> str:
    """Return a warning of labels with few images; "" if there are none."""
    if dataset.labels is None:
        return ""
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes))
    rare = [
        f"{dataset.classes[label]} ({counts[label]})"
        for label in np.argsort(counts)
        if counts[label] < strategy.rare_below
    ]
    if not rare:
        return ""
    text = f"fewer than {strategy.rare_below} images (--strategy.rare_below): {_list_names(rare, 8)}"
    text += "; their generators will repeat them"
    if strategy.warm_start != "nearest":
        text += "; --strategy.warm_start=nearest starts them from a similar label"
    return text


def _label_run(
    run: Run, strategy: PerLabel, label: int, share: float, num_images: int, init_from: str, num_labels: int
) -> Run:
    """Return the ordinary run of a label, with a seed of its own.

    Lengths in kimg and the number of scored fakes in `run` are of all labels together.
    """
    output = run.output
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, only=label, labels=False),
        strategy=strategy.per_label_strategy,
        kimg=round(run.kimg * share, 9),
        seed=run.seed + label,
        g=_scale_kimg(run.g, share),
        d=_scale_kimg(run.d, share),
        init_from=init_from or run.init_from,
        evaluation=_label_evaluation(run.evaluation, share, num_images),
        output=dataclasses.replace(
            output,
            tick_kimg=output.tick_kimg / num_labels,
            fakes_kimg=output.fakes_kimg / num_labels,
            checkpoint_kimg=output.checkpoint_kimg / num_labels,
            best_metric=output.best_metric if output.best_metric == "none" else "auto",
        ),
    )


def _scale_kimg(player_optim: PlayerOptim, share: float) -> PlayerOptim:
    """Return the settings with a share of all their times."""
    groups = [
        group if group.freeze_from_kimg is None else dataclasses.replace(group, freeze_from_kimg=kimg * share)
        for group in player_optim.groups
        for kimg in [group.freeze_from_kimg or 0]
    ]
    return dataclasses.replace(
        player_optim,
        warm_up_kimg=player_optim.warm_up_kimg * share,
        lr_half_life_kimg=player_optim.lr_half_life_kimg * share,
        groups=tuple(groups),
    )


def _label_evaluation(evaluation: EvaluationOptions, share: float, num_images: int) -> EvaluationOptions:
    """Return the metrics that one label's reals allow, on a share of the fakes."""
    num_fakes = min(evaluation.count, max(MIN_FAKES_PER_LABEL, math.ceil(evaluation.count * share)))
    metrics: list[str] = []
    if evaluation.features != classifier.SPACE_NAME:  # which tells labels apart
        for name in evaluation.metrics:
            metric = METRICS.get(name)
            if metric is None or metric.needs_labels or "50k" in name:
                continue
            if min(num_fakes, num_images) >= metric.min_images:
                metrics.append(name)
    return dataclasses.replace(
        evaluation,
        metrics=tuple(metrics),
        count=num_fakes,
        every_kimg=evaluation.every_kimg * share,
        reference="",
    )


def _warm_start_labels(strategy: PerLabel, dataset: Dataset, counts: Sequence[int]) -> list[int | None]:
    """Return, for every rare label, the label that is not rare with the nearest mean image; None for all others."""
    common = [label for label, count in enumerate(counts) if count >= strategy.rare_below]
    if strategy.warm_start == "none" or not common or dataset.labels is None:
        return [None] * len(counts)
    means = np.stack(
        [dataset.images[dataset.labels == label].mean(0, np.float64).ravel() for label in range(len(counts))]
    )
    sources: list[int | None] = []
    for label, count in enumerate(counts):
        distances = {other: float(np.linalg.norm(means[other] - means[label])) for other in common}
        sources.append(None if count >= strategy.rare_below else min(common, key=distances.__getitem__))
    return sources


def _check_budget_per_label(run: Run, label_jobs: Sequence[Job], shares: Sequence[float]) -> None:
    smallest = min(shares)
    images = 1000 * run.kimg * smallest
    if images < run.round_images:
        needed_kimg = math.ceil(run.round_images / smallest / 10) / 100
        raise UsageError(
            f"--kimg {run.kimg:g}: over {len(label_jobs)} labels leaves {images:.3g} images for one, and a step takes "
            f"{run.round_images}. Use --kimg {needed_kimg:g} or more, or a smaller --batch"
        )
