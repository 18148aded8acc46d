"""Scores of a run's averaged generator, while it trains and afterwards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.comm.process_group import Group
from paragan.comm.world import World
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions
from paragan.core.errors import Interrupted, UsageError
from paragan.core.jsonl import JsonlFile, Row, is_number, read_jsonl
from paragan.data.dataset import Dataset
from paragan.eval import classifier
from paragan.eval.accumulators import FeatureAcc, ShouldAbort, never_abort
from paragan.eval.accumulators import unique_accumulators as readings_of
from paragan.eval.evaluate import (
    ClassLabels,
    EvalProtocol,
    Score,
    compute_feature_stats,
    evaluate,
    protocol_differences,
)
from paragan.eval.feature_stats import FeatureStats
from paragan.eval.features import FeatureSpace, named_space, raw_values, space_from_module
from paragan.eval.metrics import METRICS, check_labels, metric_names, num_fakes
from paragan.eval.reference_stats import load_reference_stats
from paragan.eval.sharding import EvaluationAborted, all_ranks, block_shards
from paragan.models.model import Model, load_model
from paragan.models.sampler import PerLabelSampler, Sampler, prefetch
from paragan.train.averaged_model import averaged_sampler
from paragan.train.callbacks.best_model import BestModelTracker, resolve_best_metric
from paragan.train.console import RunConsole
from paragan.train.session import Session, has_crossed_kimg

BLOCK_IMAGES = 64  # images that are looked at together
MAX_READ_ATTEMPTS = 10  # to read one model on all ranks while a run replaces it
MAX_CACHED_FEATURE_BYTES = 2**28  # bytes of the reals' features that a rank keeps from one time to the next


@dataclass(frozen=True)
class ScoringReference:
    """What fakes are compared with: a space, and what it saw of the reals. Made once, it serves often."""

    space: FeatureSpace
    reals: FeatureStats | None  # where a metric looks at them


@dataclass
class ScoringCallback:
    """An observer: scores at the times the run asks for and at its end, shared by all ranks."""

    folder: Path
    dataset: Dataset
    console: RunConsole
    evaluation: EvaluationOptions
    best_tracker: BestModelTracker
    _cached_reference: tuple[Any, ScoringReference] | None = None  # for which metrics and ranks

    def __call__(self, session: Session) -> None:
        wanted = self.evaluation
        due = has_crossed_kimg(session, wanted.every_kimg) or session.clock.is_done
        missing = tuple(m for m in wanted.metrics if not self._is_scored(m, session.clock.kimg)) if due else ()
        if not missing:
            return
        wanted = dataclasses.replace(wanted, metrics=missing)
        self.console.print(f"scoring {wanted.count:,} fakes: {', '.join(missing)}")
        try:
            with session.stats.time_scoring():
                scores = self._score_session(session, wanted)
                if session.world.is_main:
                    append_scores(self.folder, scores, session.clock.kimg)
                self.best_tracker(session, scores)
        except EvaluationAborted:  # who goes on with the run does it again
            if session.clock.is_done:
                what = f"stopped at its end, {session.clock.kimg:g} kimg, before its scores were taken"
                raise Interrupted(what, same_on_all_ranks=not session.world.is_main) from None
            self.console.print(f"{session.clock.kimg:g} kimg: its scores are left to who goes on")
            return
        if session.clock.is_done and session.world.is_main:  # its line of stats is there already
            beside = session.stats.excluded_times()
            JsonlFile(self.folder / "stats.jsonl").update_last(
                lambda row: {k: row.get(k, 0.0) + s for k, s in beside.items()}
            )
        spent = max(score.seconds for score in scores)
        self.console.print(f"{session.clock.kimg:g} kimg: {format_score_summary(scores)}  (in {spent:.3g} s)")

    def _score_session(self, session: Session, evaluation: EvaluationOptions) -> list[Score]:
        batch_norm = "standing" if session.game.g.batch_coupled_layers else "none"
        with averaged_sampler(session, self.dataset) as sampler:
            protocol = EvalProtocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=session.run.seed)
            group = session.world.all_ranks

            def should_abort(num_scored: int) -> bool:
                self.console.show_scoring_progress(num_scored, evaluation.count)
                return session.is_stopping()

            to = self._make_or_reuse_reference(evaluation, group, sampler, lambda seen: session.is_stopping())
            return score(sampler, self.dataset, evaluation, protocol, group, reference=to, should_abort=should_abort)

    def _is_scored(self, metric: str, kimg: float) -> bool:
        """Whether this moment was scored already (a finished run that is opened again)."""
        return scored_names(self.folder, kimg).issuperset(
            metric_names(metric, make_feature_space(self.evaluation, self.dataset))
        )

    def _make_or_reuse_reference(
        self, evaluation: EvaluationOptions, group: Group, sampler: Sampler | PerLabelSampler, should_abort: ShouldAbort
    ) -> ScoringReference:
        """What was made last time, if it is still right on every rank (they may be other ranks now)."""
        key = (evaluation, group.rank, group.size)
        if (
            all_ranks(group, self._cached_reference is not None and self._cached_reference[0] == key)
            and self._cached_reference
        ):
            return self._cached_reference[1]
        made = make_scoring_reference(evaluation, self.dataset, group, sampler.device, should_abort)
        share = made.reals and made.reals.results.get(FeatureAcc())
        self._cached_reference = None if share and share.own.nbytes > MAX_CACHED_FEATURE_BYTES else (key, made)
        return made


def make_scoring_reference(
    evaluation: EvaluationOptions,
    dataset: Dataset,
    group: Group,
    device: torch.device,
    should_abort: ShouldAbort = never_abort,
) -> ScoringReference:
    """What is needed for these metrics. Every rank calls this: a classifier may have to be trained first."""
    space = prepare_feature_space(evaluation, dataset, group, device)
    metrics = [name for name in evaluation.metrics if METRICS[name].real_accumulators]
    if not metrics:
        return ScoringReference(space, None)
    if evaluation.reference:
        return ScoringReference(space, load_reference_stats(evaluation.reference, space, device))
    how: dict[str, Any] = {"group": group, "batch": BLOCK_IMAGES, "device": device, "should_abort": should_abort}
    labels = ClassLabels(dataset.classes, dataset.labels)
    return ScoringReference(
        space,
        compute_feature_stats(
            dataset.images, space=space, metrics=metrics, labels=labels, data_digest=dataset.fingerprint, **how
        ),
    )


def score(
    sampler: Sampler | PerLabelSampler,
    dataset: Dataset,
    evaluation: EvaluationOptions,
    protocol: EvalProtocol,
    group: Group,
    truncation: float = 1.0,
    reference: ScoringReference | None = None,
    should_abort: ShouldAbort = never_abort,
) -> list[Score]:
    """The scores a run asks for, every rank sampling its share of the fakes."""
    to = reference or _make_scoring_reference(evaluation, dataset, group, sampler.device)
    mine = block_shards(num_fakes(evaluation.metrics, evaluation.count), BLOCK_IMAGES, group.rank, group.size)
    told = bool(sampler.prior.probabilities)

    def sample_labels(rows: range) -> Any:
        return sampler.labels(rows, protocol.seed)

    return evaluate(
        prefetch(sampler, mine, protocol.seed, truncation),
        to.reals,
        space=to.space,
        metrics=list(evaluation.metrics),
        count=evaluation.count,
        group=group,
        batch=BLOCK_IMAGES,
        protocol=_complete_protocol(protocol, dataset, sampler),
        device=sampler.device,
        labels=ClassLabels(dataset.classes, dataset.labels, sample_labels if told else None),
        should_abort=should_abort,
    )


_make_scoring_reference = make_scoring_reference  # under another name where an argument has this one


def check_evaluation(evaluation: EvaluationOptions, dataset: Dataset, best_metric: str = "none") -> None:
    """Refuse what could not be scored, before anything is trained. best: the score that picks the best model."""
    space = make_feature_space(evaluation, dataset)
    resolve_best_metric(best_metric, evaluation.metrics, space)
    for name in evaluation.metrics:
        metric_names(name, space)
        least = METRICS[name].min_images
        if min(evaluation.count, len(dataset.images)) < least:
            raise UsageError(
                f"evaluation.metrics: {name} needs at least {least} images, and there are {len(dataset.images)} reals "
                f"and {evaluation.count} fakes (evaluation.count)"
            )
    num_fakes(evaluation.metrics, evaluation.count)
    check_labels(evaluation.metrics, space, len(dataset.classes) if dataset.labels is not None else 0)
    if evaluation.reference:
        reals = load_reference_stats(evaluation.reference, space)
        for reading in readings_of([METRICS[name].real_accumulators for name in evaluation.metrics]):
            reals.get(reading)


def _check_classes(evaluation: EvaluationOptions, dataset: Dataset, model: Model) -> None:
    """Refuse scores class by class where the classes of the data are others than those G was trained on. A model whose
    classes are numbers may go with any names."""
    labelled = [name for name in evaluation.metrics if METRICS[name].needs_labels]
    numbers = tuple(map(str, range(len(dataset.classes))))
    if labelled and model.classes not in ((), dataset.classes, numbers):
        theirs, mine = (", ".join(names[:5]) + ", ..." * (len(names) > 5) for names in (model.classes, dataset.classes))
        raise UsageError(
            f"metrics: {labelled[0]} goes class by class, and the data have other classes ({len(dataset.classes)}: "
            f"{mine}) than the model ({len(model.classes)}: {theirs}); fd, kid and prdc need none"
        )


def make_feature_space(evaluation: EvaluationOptions, dataset: Dataset) -> FeatureSpace:
    """What a score sees of such images; of numbers, the numbers. A classifier is not trained yet."""
    name = evaluation.features
    if dataset.is_array:
        if name not in ("values", "pixels"):
            raise UsageError(f"evaluation.features={name} sees images, and the data are numbers: use values")
        return raw_values(dataset.shape)
    channels, resolution, _ = dataset.shape
    if name == classifier.SPACE_NAME:
        return classifier.untrained_space(dataset.labels, dataset.classes)
    return (
        space_from_module(name, dataset.shape)
        if ":" in name
        else named_space(name, resolution, channels, evaluation.inception or None)
    )


def prepare_feature_space(
    evaluation: EvaluationOptions, dataset: Dataset, group: Group, device: torch.device
) -> FeatureSpace:
    """The same, to be looked through. Every rank calls this."""
    if evaluation.features != classifier.SPACE_NAME or dataset.is_array:
        return make_feature_space(evaluation, dataset)
    how: dict[str, Any] = {"data_digest": dataset.fingerprint, "group": group, "device": device}
    return classifier.classifier_space(dataset.images, dataset.labels, dataset.classes, **how)


def _complete_protocol(protocol: EvalProtocol, dataset: Dataset, sampler: Sampler | PerLabelSampler) -> EvalProtocol:
    channels, *sides = dataset.shape
    what = f"{sides[0]}x{sides[0]}x{channels}, square crop, Lanczos" if not dataset.is_array else "as they are"
    return dataclasses.replace(
        protocol,
        data=f"{dataset.fingerprint} {what}",
        split="all",
        labels="as in the data" if sampler.prior.probabilities else "none",
    )


def scored_names(folder: Path, kimg: float) -> set[str]:
    """The scores that were taken of a run at a moment; those of truncated samples do not stand for them."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get("kimg") == kimg]
    return {str(row.get("name")) for row in rows if _protocol(row).get("truncation") in (None, 1.0)}


def _protocol(row: Row) -> Mapping[str, Any]:
    """How a score was measured; nothing where another program wrote it and does not say."""
    found = row.get("protocol")
    return found if isinstance(found, Mapping) else {}


def append_scores(folder: Path, scores: Sequence[Score], kimg: float) -> None:
    JsonlFile(folder / "metrics.jsonl").extend(one.to_json(kimg) for one in scores)


def format_score_summary(scores: Sequence[Score]) -> str:
    """fd_pixels 1.23  precision_pixels 0.91 ..."""
    return "  ".join(f"{one.name} {one.value:.4g}" for one in scores)


def sweep_truncations(
    folder: Path,
    run: Run,
    evaluation: EvaluationOptions,
    world: World,
    console: RunConsole,
    data: str | None = None,
    truncations: Sequence[float] = (1.0,),
    seed: int = 0,
    nets: Any = None,
) -> list[list[Score]]:
    """Score the model of a finished (or running) run, under several truncations, the reals seen once. Scores are added
    to its metrics.jsonl, the largest truncation last, and what they may not be compared with is said."""
    if data:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=data))
    images = load_dataset(run)
    check_evaluation(evaluation, images)
    model = load_same_model(world, lambda: load_model(folder, world.device, nets, images))
    _check_classes(evaluation, images, model)
    console.print(f"scoring {evaluation.count:,} fakes: {', '.join(evaluation.metrics)}")
    if evaluation.features == classifier.SPACE_NAME:
        console.print("a classifier of the data is trained first, where none is kept yet: that takes minutes")
    to = make_scoring_reference(evaluation, images, world.all_ranks, world.device)
    found: list[list[Score]] = []
    for truncation in sorted(truncations):
        protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=truncation, seed=seed)
        found.append(score(model.sampler, images, evaluation, protocol, world.all_ranks, truncation, to))
        if world.is_main:
            _write_and_print(folder, found[-1], model.kimg, console)
    if len(found) > 1:
        for line in format_truncation_table(found):
            console.print(line)
    return found


def load_same_model(world: World, load_fn: Callable[[], Model]) -> Model:
    """The model in a folder, the same one on every rank: a run may replace it while they read."""
    for _ in range(MAX_READ_ATTEMPTS):
        model = load_fn()
        if len(set(world.all_gather_str(json.dumps(model.config, sort_keys=True)))) == 1:
            return model
    raise UsageError(f"{model.folder} is another model on every rank: put it on storage they share")


def _write_and_print(folder: Path, scores: Sequence[Score], kimg: float, console: RunConsole) -> None:
    """Write scores down and show them, and what they may not be compared with."""
    former = read_jsonl(folder / "metrics.jsonl")
    append_scores(folder, scores, kimg)
    for one in scores:
        console.print(f"{one.name} {one.value:.4g}" + "".join(f"  ({note})" for note in one.notes))
        if one.per_class:
            console.print("  " + "  ".join(f"{name} {value:.4g}" for name, value in one.per_class.items()))
    for reason, names in _incomparable_scores(scores, former).items():
        console.print(f"not comparable with {', '.join(names)} before: {reason}")


def _incomparable_scores(scores: Sequence[Score], previous_rows: Sequence[Row]) -> dict[str, list[str]]:
    """Why, of scores that may be compared with none of their name; and with which values last."""
    found: dict[str, list[str]] = {}
    for one in scores:
        others = [row for row in previous_rows if row.get("name") == one.name and is_number(row.get("value"))]
        differing = [protocol_differences(one, {**row, "protocol": _protocol(row)}) for row in others]
        if differing and all(differing):
            last = _protocol(others[-1])
            reason = ", ".join(f"{key} {one.protocol.get(key)}, was {last.get(key)}" for key in differing[-1])
            found.setdefault(reason, []).append(f"the {one.name} {others[-1]['value']:.4g}")
    return found


def format_truncation_table(score_rows: Sequence[Sequence[Score]]) -> list[str]:
    """A line a truncation, a column a score."""
    rows = [["truncation", *(one.name for one in score_rows[0])]]
    rows += [
        [f"{scores[0].protocol['truncation']:g}", *(f"{one.value:.4g}" for one in scores)] for scores in score_rows
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
