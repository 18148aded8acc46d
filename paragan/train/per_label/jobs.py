"""The games of a run per label, as plain data: each an ordinary run, on the images of its label."""

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
from paragan.models.model import label_dir
from paragan.optim.optimizers import PlayerOptim
from paragan.strategies.per_label_wcgan import PerLabel

MIN_FAKES_PER_LABEL = 1000  # that a label is scored on


@dataclass(frozen=True)
class Job:
    """One label's game.

    run     : what is trained
    of      : how many images of the label there are
    seconds : of training it may take (0: as many as it wants)
    source  : the label whose finished game it starts from, if any
    """

    label: int
    class_name: str
    run: Run
    num_images: int
    max_seconds: float = 0.0
    source_label: int | None = None

    def describe(self) -> str:
        """A line for people."""
        time = f" or {self.max_seconds:.3g} s of training, whichever ends first" if self.max_seconds else ""
        source = "" if self.source_label is None else f"; from the game of label {self.source_label}"
        return f"label {self.label} ({self.class_name}): {self.num_images:,} images, {self.run.total_images / 1000:g} kimg{time}{source}"

    @property
    def name(self) -> str:
        return f"{self.label:04d}"

    def is_complete(self, images: float, seconds: float) -> bool:
        """Whether a game that has come so far has had its budget."""
        return images >= self.run.total_images or (bool(self.max_seconds) and seconds >= self.max_seconds)


def make_jobs(run: Run, dataset: Dataset, folder: Path) -> list[Job]:
    """The games of a run, the longest first, so that none is begun late; those that start from another's end after all
    others. Unusable where there are no labels, a label has no image, or a budget is less than a step."""
    strategy, labels = run.per_label, dataset.labels
    assert strategy is not None
    if labels is None:
        raise UsageError("--strategy per-label needs images with classes: PATH/<class>/*.png, or an .npz with labels")
    counts = [int(n) for n in np.bincount(labels, minlength=len(dataset.classes))]
    empty = [f"{label} ({dataset.classes[label]})" for label, count in enumerate(counts) if not count]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        raise UsageError(f"label {', '.join(empty[:5])}{more} has no image: add some, or remove the class")
    shares, sources = strategy.budget_fractions(counts), _warm_start_labels(strategy, dataset, counts)
    found = [
        Job(
            label,
            dataset.classes[label],
            _label_run(run, strategy, label, share, counts[label], _source_model_path(folder, source), len(counts)),
            counts[label],
            60 * strategy.minutes * share,
            source,
        )
        for label, (share, source) in enumerate(zip(shares, sources))
    ]
    _check_budget_per_label(run, found, shares)
    return sorted(found, key=lambda job: (job.source_label is not None, -job.run.total_images, job.label))


def describe_jobs(label_jobs: Sequence[Job]) -> str:
    """What every game gets, in a line."""
    runs = sorted((job.run for job in label_jobs), key=lambda run: run.total_images)
    few, many = (f"{run.total_images / 1000:g}" for run in (runs[0], runs[-1]))
    steps = [run.total_rounds for run in (runs[0], runs[-1])]
    most = f"{few} to {many} kimg ({steps[0]:,} to {steps[1]:,} steps of G)"
    each = f"{few} kimg ({steps[0]:,} steps of G) each" if few == many else most
    return f"{len(label_jobs)} games of {each}"


def describe_rare_labels(strategy: PerLabel, dataset: Dataset) -> str:
    """A warning of labels with few images; empty where there are none."""
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes)) if dataset.labels is not None else np.zeros(0)
    few = [
        f"{dataset.classes[label]} ({counts[label]})"
        for label in np.argsort(counts)
        if counts[label] < strategy.rare_below
    ]
    if not few:
        return ""
    listed = ", ".join(few[:8]) + (f" and {len(few) - 8} more" if len(few) > 8 else "")
    help_ = "" if strategy.warm_start == "nearest" else "; --strategy.warm_start=nearest starts them from a neighbour"
    return f"fewer than {strategy.rare_below} images (--strategy.rare_below): {listed}; their generators will repeat them{help_}"


def _label_run(
    run: Run, strategy: PerLabel, label: int, share: float, num_images: int, init_from: str, num_labels: int
) -> Run:
    """The ordinary run of a label: what is given in kimg is of all labels together, and so are the fakes that are
    scored. Its seed is its own."""
    output = run.output
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, only_class=label, labels=False),
        strategy=strategy.per_label_strategy,
        kimg=round(run.kimg * share, 9),
        seed=run.seed + label,
        g=_scale_warm_up(run.g, share),
        d=_scale_warm_up(run.d, share),
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


def _scale_warm_up(player_optim: PlayerOptim, share: float) -> PlayerOptim:
    return dataclasses.replace(player_optim, warm_up_kimg=player_optim.warm_up_kimg * share)


def _label_evaluation(evaluation: EvaluationOptions, share: float, num_images: int) -> EvaluationOptions:
    """The scores that so few reals of one label allow, on a share of the fakes."""
    fakes = min(evaluation.count, max(MIN_FAKES_PER_LABEL, math.ceil(evaluation.count * share)))
    known = {name: metric for name, metric in METRICS.items() if not metric.needs_labels and "50k" not in name}
    free = tuple(m for m in evaluation.metrics if m in known and min(fakes, num_images) >= known[m].min_images)
    kept = () if evaluation.features == classifier.SPACE_NAME else free  # which tells labels apart
    return dataclasses.replace(
        evaluation, metrics=kept, count=fakes, every_kimg=evaluation.every_kimg * share, reference=""
    )


def _source_model_path(folder: Path, label: int | None) -> str:
    return "" if label is None else str(label_dir(folder / "labels", label).absolute())


def _warm_start_labels(strategy: PerLabel, dataset: Dataset, counts: Sequence[int]) -> list[int | None]:
    """For every rare label the one, not rare, whose mean image is nearest; None for all others."""
    common = [label for label, count in enumerate(counts) if count >= strategy.rare_below]
    if strategy.warm_start == "none" or not common or dataset.labels is None:
        return [None] * len(counts)
    means = np.stack(
        [dataset.images[dataset.labels == label].mean(0, np.float64).ravel() for label in range(len(counts))]
    )
    nearest = [min(common, key=lambda c: float(np.linalg.norm(means[c] - mean))) for mean in means]
    return [None if count >= strategy.rare_below else near for count, near in zip(counts, nearest)]


def _check_budget_per_label(run: Run, label_jobs: Sequence[Job], shares: Sequence[float]) -> None:
    least = min(shares)
    if 1000 * run.kimg * least < run.round_images:
        need = math.ceil(run.round_images / least / 10) / 100
        raise UsageError(
            f"--kimg {run.kimg:g} over {len(label_jobs)} labels leaves {1000 * run.kimg * least:.3g} images for one, "
            f"and a step takes {run.round_images}: use --kimg {need:g} or more, or a smaller --batch"
        )
