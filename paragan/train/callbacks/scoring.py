"""Score the averaged generator of a run while it trains, and models of run folders afterwards.

Every rank samples its share of the fakes. Scores go to metrics.jsonl with the protocol by which they were measured;
only scores of equal protocols are compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paragan.comm.process_group import Group
from paragan.comm.world import World
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions
from paragan.core.errors import Interrupted, RunError, UsageError
from paragan.core.image_shape import ImageSize
from paragan.core.jsonl import JsonlFile, Row, is_number, read_jsonl
from paragan.data.dataset import Dataset
from paragan.eval import classifier
from paragan.eval.accumulators import FeatureAcc, PairedReals, ShouldAbort, never_abort, unique_accumulators
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
from paragan.eval.metrics import METRICS, check_class_counts, check_labels, check_pairs, metric_names, num_fakes
from paragan.eval.reference_stats import check_image_shape, load_reference_stats
from paragan.eval.sharding import EvaluationAborted, all_ranks, block_shards
from paragan.models.model import Model, load_model
from paragan.models.sampler import DataSource, PerLabelSampler, Sampler, prefetch
from paragan.train.averaged_model import averaged_sampler
from paragan.train.callbacks.best_model import BestModelTracker, resolve_best_metric
from paragan.train.console import RunConsole
from paragan.train.loggers.logger import Logger
from paragan.train.rank_agreement import LOAD_TIMEOUT_S, check_same_data, check_same_versions, on_all_ranks
from paragan.train.saved_run import scored_data_options
from paragan.train.session import Session, has_crossed_kimg

BLOCK_IMAGES = 64  # images of a forward pass
MAX_READ_ATTEMPTS = 10  # to read the same model on all ranks while a run replaces it
MAX_CACHED_FEATURE_BYTES = 2**28  # of the reals, that a rank keeps between two scorings


@dataclass(frozen=True)
class ScoringReference:
    """What fakes are compared with: a feature space, and statistics of the reals if a metric needs them. Reusable."""

    space: FeatureSpace
    reals: FeatureStats | None


@dataclass
class ScoringCallback:
    """Scores at the times the run asks for, and at its end; all ranks take part.

    A stop that is requested meanwhile is not delayed: the scores are left to the run that resumes.
    """

    folder: Path
    dataset: Dataset
    console: RunConsole
    evaluation: EvaluationOptions
    best_tracker: BestModelTracker
    logger: Logger = field(default_factory=Logger)
    _cached_reference: tuple[Any, ScoringReference] | None = None  # (evaluation, rank, ranks) and its reference

    def __call__(self, session: Session) -> None:
        evaluation = self.evaluation
        kimg = session.clock.kimg
        if not (has_crossed_kimg(session, evaluation.every_kimg) or session.clock.is_done):
            return
        missing = tuple(metric for metric in evaluation.metrics if not self._is_scored(metric, kimg))
        if not missing:
            return
        evaluation = dataclasses.replace(evaluation, metrics=missing)
        self.console.print(f"scoring {evaluation.count:,} fakes: {', '.join(missing)}")
        try:
            with session.stats.time_scoring():
                scores = self._score_session(session, evaluation)
                if session.world.is_main:
                    append_scores(self.folder, scores, kimg)
                    self.logger.on_scores(successful_values(scores), session.clock.images)
                self.best_tracker(session, scores)
        except UsageError as error:  # fakes that cannot be scored, such as images of NaN
            self.console.print(f"{kimg:g} kimg: could not be scored: {error}")
            return
        except EvaluationAborted:  # the run that resumes does it again
            if session.clock.is_done:
                message = f"stopped at its end, {kimg:g} kimg, before its scores were measured"
                raise Interrupted(message, same_on_all_ranks=not session.world.is_main) from None
            self.console.print(f"{kimg:g} kimg: scoring was stopped; the run that resumes does it")
            return
        if session.clock.is_done and session.world.is_main:  # the last line of stats was written before
            times = session.stats.excluded_times()
            JsonlFile(self.folder / "stats.jsonl").update_last(
                lambda row: {key: row.get(key, 0.0) + seconds for key, seconds in times.items()}
            )
        seconds = max(score.seconds for score in scores)
        self.console.print(f"{kimg:g} kimg: {format_score_summary(scores)}  (in {seconds:.3g} s)")
        for line in format_failures(scores):
            self.console.print(line)

    def _score_session(self, session: Session, evaluation: EvaluationOptions) -> list[Score]:
        batch_norm = "standing" if session.game.g.batch_coupled_layers else "none"
        with averaged_sampler(session, self.dataset) as sampler:
            protocol = EvalProtocol(batch_norm=batch_norm, ema=True, truncation=1.0, seed=session.run.seed)
            group = session.world.all_ranks

            def should_abort(num_scored: int) -> bool:
                self.console.show_scoring_progress(num_scored, evaluation.count)
                return session.is_stopping()

            reference = self._make_or_reuse_reference(
                evaluation, group, sampler, lambda num_scored: session.is_stopping()
            )
            return score(
                sampler, self.dataset, evaluation, protocol, group, reference=reference, should_abort=should_abort
            )

    def _is_scored(self, metric: str, kimg: float) -> bool:
        """Return True if a metric was measured at this moment before (a finished run that is opened again)."""
        names = metric_names(metric, make_feature_space(self.evaluation, self.dataset))
        return scored_names(self.folder, kimg).issuperset(names)

    def _make_or_reuse_reference(
        self, evaluation: EvaluationOptions, group: Group, sampler: Sampler | PerLabelSampler, should_abort: ShouldAbort
    ) -> ScoringReference:
        """Return the reference of the last scoring, if it is still right on every rank: they may be others now."""
        key = (evaluation, group.rank, group.size)
        cached = self._cached_reference
        is_valid = cached is not None and cached[0] == key
        if all_ranks(group, is_valid) and cached:
            return cached[1]
        reference = make_scoring_reference(evaluation, self.dataset, group, sampler.device, should_abort)
        features = reference.reals and reference.reals.results.get(FeatureAcc())
        is_too_large = bool(features) and features.local.nbytes > MAX_CACHED_FEATURE_BYTES
        self._cached_reference = None if is_too_large else (key, reference)
        return reference


def make_scoring_reference(
    evaluation: EvaluationOptions,
    dataset: Dataset,
    group: Group,
    device: torch.device,
    should_abort: ShouldAbort = never_abort,
) -> ScoringReference:
    """Make the reference for some metrics. Every rank calls this: a classifier may have to be trained first."""
    reals_data = _scored_reals(evaluation, dataset)
    space = prepare_feature_space(evaluation, reals_data, group, device)
    metrics = [name for name in evaluation.metrics if METRICS[name].real_accumulators]
    if not metrics:
        return ScoringReference(space, None)
    if evaluation.reference:
        return ScoringReference(space, load_reference_stats(evaluation.reference, space, device))
    reals = compute_feature_stats(
        reals_data.images,
        space=space,
        metrics=metrics,
        group=group,
        batch=BLOCK_IMAGES,
        device=device,
        labels=ClassLabels(reals_data.classes, reals_data.labels),
        data_digest=reals_data.fingerprint,
        should_abort=should_abort,
    )
    return ScoringReference(space, reals)


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
    """Measure the scores that `evaluation` asks for. Every rank calls this and samples its share of the fakes.

    Args:
        protocol: how fakes are made; completed with what is said of the data.
        truncation: scale of the latents' truncation (1: none).
        reference: from `make_scoring_reference`; made here if None.
        should_abort: called with the number of fakes scored; if it is True on all ranks, EvaluationAborted is raised.
    """
    if reference is None:
        reference = make_scoring_reference(evaluation, dataset, group, sampler.device)
    dataset = _scored_reals(evaluation, dataset)
    shards = block_shards(num_fakes(evaluation.metrics, evaluation.count), BLOCK_IMAGES, group.rank, group.size)

    def sample_labels(rows: range) -> Any:
        return sampler.labels(rows, protocol.seed)

    is_conditional = bool(sampler.prior.probabilities)
    return evaluate(
        prefetch(sampler, shards, protocol.seed, truncation),
        reference.reals,
        space=reference.space,
        metrics=list(evaluation.metrics),
        count=evaluation.count,
        group=group,
        batch=BLOCK_IMAGES,
        protocol=_complete_protocol(protocol, dataset, sampler),
        device=sampler.device,
        labels=ClassLabels(dataset.classes, dataset.labels, sample_labels if is_conditional else None),
        pairs=paired_reals(sampler),
        should_abort=should_abort,
    )


def _scored_reals(evaluation: EvaluationOptions, dataset: Dataset) -> Dataset:
    """Return the data that samples are compared with: of latents the images, unless statistics stand for them."""
    return dataset if evaluation.reference else dataset.originals


def paired_reals(sampler: Sampler | PerLabelSampler) -> PairedReals | None:
    """Return the reals that the samples are made from, or None if G takes latents or there is a G for each label."""
    if isinstance(sampler, PerLabelSampler) or not isinstance(sampler.source, DataSource):
        return None
    source = sampler.source
    return PairedReals(lambda rows: sampler.to_output(source.reals(rows)), source.dataset.sample_rate)


def check_evaluation(evaluation: EvaluationOptions, dataset: Dataset, best_metric: str = "none") -> None:
    """Refuse, before training, what could not be scored.

    Args:
        best_metric: the score by which the best model is chosen.

    Raises:
        UsageError: names the field.
    """
    space = make_feature_space(evaluation, dataset)
    resolve_best_metric(best_metric, evaluation.metrics, space)
    if evaluation.metrics:
        dataset = _scored_reals(evaluation, dataset)
    for name in evaluation.metrics:
        metric_names(name, space)
        min_images = METRICS[name].min_images
        if min(evaluation.count, len(dataset.images)) < min_images:
            raise UsageError(
                f"evaluation.metrics={name}: needs at least {min_images} images, and there are {len(dataset.images)} "
                f"reals and {evaluation.count} fakes (evaluation.count)"
            )
    num_fakes(evaluation.metrics, evaluation.count)
    check_labels(evaluation.metrics, space, len(dataset.classes) if dataset.labels is not None else 0)
    check_class_counts(evaluation.metrics, dataset.labels)
    if evaluation.reference:
        reals = load_reference_stats(evaluation.reference, space)
        if dataset.shows_images:
            check_image_shape(reals, evaluation.reference, dataset.sample_shape, "evaluation.reference")
        for accumulator in unique_accumulators([METRICS[name].real_accumulators for name in evaluation.metrics]):
            reals.get(accumulator)


def _check_classes(evaluation: EvaluationOptions, dataset: Dataset, model: Model) -> None:
    """Refuse scores class by class if the data have other classes than the model; numbers go with any names."""
    per_class = [name for name in evaluation.metrics if METRICS[name].needs_labels]
    numbers = tuple(map(str, range(len(dataset.classes))))
    if per_class and model.classes not in ((), dataset.classes, numbers):
        raise UsageError(
            f"evaluation.metrics={per_class[0]}: goes class by class, and the data have other classes "
            f"({_list_classes(dataset.classes)}) than the model ({_list_classes(model.classes)}). Use fd, kid or prdc"
        )


def _list_classes(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 5 else ""
    return f"{len(names)}: {', '.join(names[:5])}{more}"


def make_feature_space(evaluation: EvaluationOptions, dataset: Dataset) -> FeatureSpace:
    """Return the feature space of these data; a classifier in it is not trained yet. For arrays, their values."""
    name = evaluation.features
    if not dataset.shows_images:
        if name not in ("values", "pixels"):
            raise UsageError(f"evaluation.features={name}: needs images, and the data are arrays. Use values")
        return raw_values(dataset.shape)
    channels, height, width = dataset.sample_shape
    if name == classifier.SPACE_NAME:
        return classifier.untrained_space(dataset.labels, dataset.classes)
    if ":" in name:
        return space_from_module(name, dataset.sample_shape)
    return named_space(name, ImageSize(width, height).resolution, channels, evaluation.inception or None)


def prepare_feature_space(
    evaluation: EvaluationOptions, dataset: Dataset, group: Group, device: torch.device
) -> FeatureSpace:
    """Return the feature space ready for use. Every rank calls this: its classifier is trained if it is not cached."""
    uses_features = not all(METRICS[name].is_paired for name in evaluation.metrics)
    if evaluation.features != classifier.SPACE_NAME or not dataset.shows_images or not uses_features:
        return make_feature_space(evaluation, dataset)
    return classifier.classifier_space(
        dataset.images,
        dataset.labels,
        dataset.classes,
        data_digest=dataset.fingerprint,
        group=group,
        device=device,
    )


def _complete_protocol(protocol: EvalProtocol, dataset: Dataset, sampler: Sampler | PerLabelSampler) -> EvalProtocol:
    """Add what a protocol says of the data."""
    preprocessing = "as they are"
    if not dataset.is_array:
        channels, _, _ = dataset.shape
        crop = "square crop" if dataset.size.is_square else "centre crop"
        preprocessing = f"{dataset.size.width}x{dataset.size.height}x{channels}, {crop}, Lanczos"
    return dataclasses.replace(
        protocol,
        data=f"{dataset.fingerprint} {preprocessing}",
        split="all",
        labels="as in the data" if sampler.prior.probabilities else "none",
    )


def scored_names(folder: Path, kimg: float) -> set[str]:
    """Return the scores of a run that were measured at a moment; those of truncated samples do not count."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get("kimg") == kimg]
    return {str(row.get("name")) for row in rows if _protocol(row).get("truncation") in (None, 1.0)}


def _protocol(row: Row) -> Mapping[str, Any]:
    """Return how a score was measured; {} if another program wrote the line and does not say."""
    protocol = row.get("protocol")
    return protocol if isinstance(protocol, Mapping) else {}


def append_scores(folder: Path, scores: Sequence[Score], kimg: float) -> None:
    """Append scores to metrics.jsonl."""
    JsonlFile(folder / "metrics.jsonl").extend(score.to_json(kimg) for score in scores)


def successful_values(scores: Sequence[Score]) -> dict[str, float]:
    """Return the values of the scores that could be computed, by name."""
    return {score.name: score.value for score in scores if not score.failure}


def format_score_summary(scores: Sequence[Score]) -> str:
    """Format scores: "fd_pixels 1.23  precision_pixels 0.91"."""
    return "  ".join(f"{score.name} {score.value:.4g}" for score in scores if not score.failure)


def format_scores_with_notes(scores: Sequence[Score]) -> list[str]:
    """Return a line for each score that could be computed, and below it one for those of its classes."""
    lines: list[str] = []
    for score in scores:
        if score.failure:
            continue
        notes = "".join(f"  ({note})" for note in score.notes)
        lines.append(f"{score.name} {score.value:.4g}{notes}")
        if score.per_class:
            lines.append("  " + "  ".join(f"{name} {value:.4g}" for name, value in score.per_class.items()))
    return lines


def format_failures(scores: Sequence[Score]) -> list[str]:
    """Return a line for each score that could not be computed."""
    return [f"{score.name} could not be computed: {score.failure}" for score in scores if score.failure]


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
    """Score the model in a folder under several truncations; the reals are read once. Every rank calls this.

    Scores are appended to the folder's metrics.jsonl, the largest truncation last. Earlier scores that they may not be
    compared with are named.

    Args:
        data: other data to score against; images, also where G makes latents.

    Returns:
        The scores by truncation, smallest first.

    Raises:
        RunError: after the others were written, if a score could not be computed.
    """
    decoder = run.data.decoder
    run = dataclasses.replace(run, data=scored_data_options(folder, run.data, data))
    check_same_versions(world)
    dataset = on_all_ranks(world, lambda: load_dataset(run.data), LOAD_TIMEOUT_S)
    check_same_data(dataset, run.data.redacted_path, world)
    check_evaluation(evaluation, dataset)
    model = load_same_model(world, lambda: load_model(folder, world.device, nets, dataset, decoder))
    _check_classes(evaluation, dataset, model)
    pairs = paired_reals(model.sampler)
    check_pairs(evaluation.metrics, pairs.sample_rate if pairs else None)
    console.print(f"scoring {evaluation.count:,} fakes: {', '.join(evaluation.metrics)}")
    if evaluation.features == classifier.SPACE_NAME and not all(METRICS[m].is_paired for m in evaluation.metrics):
        console.print("a classifier of the data is trained first, unless it is cached: that takes minutes")
    reference = make_scoring_reference(evaluation, dataset, world.all_ranks, world.device)
    results: list[list[Score]] = []
    failures: list[str] = []
    for truncation in sorted(truncations):
        protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=truncation, seed=seed)
        scores = score(model.sampler, dataset, evaluation, protocol, world.all_ranks, truncation, reference)
        results.append(scores)
        failures += format_failures(scores)
        if world.is_main:
            _write_and_print(folder, scores, model.kimg, console)
    if len(results) > 1:
        for line in format_truncation_table(results):
            console.print(line)
    if failures:
        raise RunError(f"{'; '.join(dict.fromkeys(failures))}. The other scores are written", same_on_all_ranks=True)
    return results


def load_same_model(world: World, load_fn: Callable[[], Model]) -> Model:
    """Load the same model on every rank: a run may replace it while they read.

    Raises:
        UsageError: ranks do not read the same model.
    """
    for _ in range(MAX_READ_ATTEMPTS):
        model = load_fn()
        if len(set(world.all_gather_str(json.dumps(model.config, sort_keys=True)))) == 1:
            return model
    raise UsageError(f"{model.folder}: ranks read different models. Use storage that all ranks share")


def _write_and_print(folder: Path, scores: Sequence[Score], kimg: float, console: RunConsole) -> None:
    """Append scores to metrics.jsonl, print them, and print which earlier ones they may not be compared with."""
    previous_rows = read_jsonl(folder / "metrics.jsonl")
    append_scores(folder, scores, kimg)
    for line in format_scores_with_notes(scores):
        console.print(line)
    for reason, names in _incomparable_scores(scores, previous_rows).items():
        console.print(f"not comparable with {', '.join(names)} before: {reason}")


def _incomparable_scores(scores: Sequence[Score], previous_rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return reason -> earlier scores, of the scores that are comparable with none of their name."""
    names_by_reason: dict[str, list[str]] = {}
    for score in scores:
        rows = [row for row in previous_rows if row.get("name") == score.name and is_number(row.get("value"))]
        differences = [protocol_differences(score, {**row, "protocol": _protocol(row)}) for row in rows]
        if differences and all(differences):
            last = _protocol(rows[-1])
            reason = ", ".join(f"{key} {score.protocol.get(key)}, was {last.get(key)}" for key in differences[-1])
            names_by_reason.setdefault(reason, []).append(f"the {score.name} {rows[-1]['value']:.4g}")
    return names_by_reason


def format_truncation_table(score_rows: Sequence[Sequence[Score]]) -> list[str]:
    """Return the lines of a table with a row for each truncation and a column for each score."""
    rows = [["truncation", *(score.name for score in score_rows[0])]]
    for scores in score_rows:
        rows.append([f"{scores[0].protocol['truncation']:g}", *(f"{score.value:.4g}" for score in scores)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
