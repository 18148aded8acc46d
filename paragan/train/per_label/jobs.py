"""The games of a run per label, as plain data: each an ordinary run, on the images of its label."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paragan.config.run import Run
from paragan.config.sections import Evaluation
from paragan.core.errors import Unusable
from paragan.data.dataset import Images
from paragan.eval import classifier
from paragan.eval.metrics import METRICS
from paragan.models.model import part
from paragan.optim.optimizers import Side
from paragan.strategies.per_label_wcgan import PerLabel

LEAST_FAKES = 1000  # that a label is scored on


@dataclass(frozen=True)
class Job:
    """One label's game.

    run     : what is trained
    of      : how many images of the label there are
    seconds : of training it may take (0: as many as it wants)
    source  : the label whose finished game it starts from, if any
    """

    label: int
    title: str
    run: Run
    of: int
    seconds: float = 0.0
    source: int | None = None

    def told(self) -> str:
        """A line for people."""
        time = f" or {self.seconds:.3g} s of training, whichever ends first" if self.seconds else ""
        source = "" if self.source is None else f"; from the game of label {self.source}"
        return f"label {self.label} ({self.title}): {self.of:,} images, {self.run.images / 1000:g} kimg{time}{source}"

    @property
    def name(self) -> str:
        return f"{self.label:04d}"

    def done(self, images: float, seconds: float) -> bool:
        """Whether a game that has come so far has had its budget."""
        return images >= self.run.images or (bool(self.seconds) and seconds >= self.seconds)


def jobs(run: Run, images: Images, folder: Path) -> list[Job]:
    """The games of a run, the longest first, so that none is begun late; those that start from another's end after all
    others. Unusable where there are no labels, a label has no image, or a budget is less than a step."""
    strategy, labels = run.per_label, images.labels
    assert strategy is not None
    if labels is None:
        raise Unusable("--strategy per-label needs images with classes: PATH/<class>/*.png, or an .npz with labels")
    counts = [int(n) for n in np.bincount(labels, minlength=len(images.classes))]
    empty = [f"{label} ({images.classes[label]})" for label, count in enumerate(counts) if not count]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        raise Unusable(f"label {', '.join(empty[:5])}{more} has no image: add some, or remove the class")
    shares, sources = strategy.shares(counts), _sources(strategy, images, counts)
    found = [
        Job(
            label,
            images.classes[label],
            _game(run, strategy, label, share, counts[label], _model_of(folder, source), len(counts)),
            counts[label],
            60 * strategy.minutes * share,
            source,
        )
        for label, (share, source) in enumerate(zip(shares, sources))
    ]
    _refuse_too_short(run, found, shares)
    return sorted(found, key=lambda job: (job.source is not None, -job.run.images, job.label))


def told(found: Sequence[Job]) -> str:
    """What every game gets, in a line."""
    runs = sorted((job.run for job in found), key=lambda run: run.images)
    few, many = (f"{run.images / 1000:g}" for run in (runs[0], runs[-1]))
    steps = [run.rounds for run in (runs[0], runs[-1])]
    most = f"{few} to {many} kimg ({steps[0]:,} to {steps[1]:,} steps of G)"
    each = f"{few} kimg ({steps[0]:,} steps of G) each" if few == many else most
    return f"{len(found)} games of {each}"


def rare(strategy: PerLabel, images: Images) -> str:
    """A warning of labels with few images; empty where there are none."""
    counts = np.bincount(images.labels, minlength=len(images.classes)) if images.labels is not None else np.zeros(0)
    few = [
        f"{images.classes[label]} ({counts[label]})" for label in np.argsort(counts) if counts[label] < strategy.rare
    ]
    if not few:
        return ""
    listed = ", ".join(few[:8]) + (f" and {len(few) - 8} more" if len(few) > 8 else "")
    help_ = "" if strategy.warm_start == "nearest" else "; --strategy.warm_start=nearest starts them from a neighbour"
    return f"fewer than {strategy.rare} images (--strategy.rare): {listed}; their generators will repeat them{help_}"


def _game(run: Run, strategy: PerLabel, label: int, share: float, count: int, source: str, labels: int) -> Run:
    """The ordinary run of a label: what is given in kimg is of all labels together, and so are the fakes that are
    scored. Its seed is its own."""
    output = run.output
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, only=label, labels=False),
        strategy=strategy.within,
        kimg=round(run.kimg * share, 9),
        seed=run.seed + label,
        g=_warmed(run.g, share),
        d=_warmed(run.d, share),
        init_from=source or run.init_from,
        evaluation=_scored(run.evaluation, share, count),
        output=dataclasses.replace(
            output,
            tick_kimg=output.tick_kimg / labels,
            fakes_kimg=output.fakes_kimg / labels,
            checkpoint_kimg=output.checkpoint_kimg / labels,
            best=output.best if output.best == "none" else "auto",
        ),
    )


def _warmed(side: Side, share: float) -> Side:
    return dataclasses.replace(side, warm_up_kimg=side.warm_up_kimg * share)


def _scored(wanted: Evaluation, share: float, count: int) -> Evaluation:
    """The scores that so few reals of one label allow, on a share of the fakes."""
    fakes = min(wanted.count, max(LEAST_FAKES, math.ceil(wanted.count * share)))
    known = {name: metric for name, metric in METRICS.items() if not metric.labelled and "50k" not in name}
    free = tuple(m for m in wanted.metrics if m in known and min(fakes, count) >= known[m].least)
    kept = () if wanted.features == classifier.NAME else free  # which tells labels apart
    return dataclasses.replace(wanted, metrics=kept, count=fakes, every_kimg=wanted.every_kimg * share, reference="")


def _model_of(folder: Path, label: int | None) -> str:
    return "" if label is None else str(part(folder / "labels", label).absolute())


def _sources(strategy: PerLabel, images: Images, counts: Sequence[int]) -> list[int | None]:
    """For every rare label the one, not rare, whose mean image is nearest; None for all others."""
    common = [label for label, count in enumerate(counts) if count >= strategy.rare]
    if strategy.warm_start == "none" or not common or images.labels is None:
        return [None] * len(counts)
    means = np.stack(
        [images.images[images.labels == label].mean(0, np.float64).ravel() for label in range(len(counts))]
    )
    nearest = [min(common, key=lambda c: float(np.linalg.norm(means[c] - mean))) for mean in means]
    return [None if count >= strategy.rare else near for count, near in zip(counts, nearest)]


def _refuse_too_short(run: Run, found: Sequence[Job], shares: Sequence[float]) -> None:
    least = min(shares)
    if 1000 * run.kimg * least < run.round:
        need = math.ceil(run.round / least / 10) / 100
        raise Unusable(
            f"--kimg {run.kimg:g} over {len(found)} labels leaves {1000 * run.kimg * least:.3g} images for one, "
            f"and a step takes {run.round}: use --kimg {need:g} or more, or a smaller --batch"
        )
