"""From the run that was asked for to one that can be trained: validated, its data loaded, every field resolved.

The command line, the trainer, the workers of per-label runs and the Python interface all come through here, so that
each refuses the same runs with the same words.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paragan.comm.flat_params import check_fragments
from paragan.comm.world import World
from paragan.config.resolve import load_dataset, make_spec, resolve
from paragan.config.run import Run
from paragan.config.sections import InputFingerprints
from paragan.config.user_code import conditioning_input_of, is_user_defined
from paragan.config.validate import check_d_conditioning, check_gradient_penalty, check_weight_clip, validate
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.eval.metrics import check_pairs
from paragan.losses.adversarial import Adversarial
from paragan.losses.distribution_matching import DistributionMatching
from paragan.models.autoencoder import output_converter
from paragan.models.diffusion_teacher import load_denoiser, student_nets, teacher_weights_dir
from paragan.models.model import find_init_model_dir
from paragan.models.teacher_encoding import check_same_encoding
from paragan.models.weights_fingerprint import weights_fingerprint
from paragan.nets import DenoiserConfig, Spec
from paragan.nets.conditioning import resolve_d_conditioning
from paragan.strategies.per_label_wcgan import PerLabel
from paragan.train.build import build_game, build_networks, make_teacher, trained_parameters
from paragan.train.callbacks.scoring import check_evaluation
from paragan.train.loggers.create_logger import check_loggers
from paragan.train.rank_agreement import (
    LOAD_TIMEOUT_S,
    check_same_config,
    check_same_data,
    check_same_versions,
    on_all_ranks,
)
from paragan.train.user_code_check import check_losses


@dataclass(frozen=True)
class Prepared:
    """A run whose fields are all resolved, and its data."""

    run: Run
    dataset: Dataset

    @property
    def spec(self) -> Spec:
        """What the networks are built for."""
        return make_spec(self.run.data, self.dataset)


def prepare(run: Run, ranks: int = 1, dataset: Dataset | None = None, *, check_parts: bool = True) -> Prepared:
    """Validate a run, load its data, and fill in every field that follows from them.

    Args:
        ranks: how many ranks train it.
        dataset: its data, if they are loaded already.
        check_parts: also refuse networks, objectives, scores and teachers that cannot work; networks and objectives of
            the user, and those whose G is given data, are tried on a batch. False where the networks come later
            (`Estimator`).

    Raises:
        UsageError: if it cannot be trained or scored.
    """
    validate(run, ranks)
    check_loggers(run.output.loggers)
    if dataset is None:
        dataset = load_dataset(run.data)
    if dataset.encoding and not dataset.open_originals:  # of `load_data`, which does not say whose code may run
        raise UsageError(
            f"dataset: latents of {dataset.encoding.decoder} need their options. Use paragan.DataOptions(path) as "
            "data, and leave dataset out"
        )
    output_converter(dataset)  # refuses latents without their decoder
    if run.distill_from:
        check_same_encoding(Path(run.distill_from), dataset.encoding)
    run = with_nets_of_teacher(run, make_spec(run.data, dataset))
    run = replace(resolve(run, dataset), fingerprints=fingerprint_inputs(run, dataset))
    if check_parts:
        _check_parts(run, dataset)
        if run.per_label and dataset.classes:
            _check_ranks_of_labels(run.per_label, run.lanes, ranks, len(dataset.classes))
    return Prepared(run, dataset)


def with_nets_of_teacher(run: Run, spec: Spec) -> Run:
    """Return a distillation whose networks are those of its teacher; any other run as it is.

    Args:
        run: with or without a teacher.
        spec: of its data.

    Raises:
        UsageError: the teacher is no diffusion model, or of other data.
    """
    if not (
        isinstance(run.objective, DistributionMatching) and run.distill_from and isinstance(run.nets, DenoiserConfig)
    ):
        return run
    nets = student_nets(Path(run.distill_from), spec)
    if run.nets == nets:
        return run
    return replace(run, nets=nets, reasons=(*run.reasons, f"networks: those of the teacher in {run.distill_from}"))


def prepare_on_all_ranks(
    run: Run, world: World, dataset: Dataset | None = None, *, check_parts: bool = True
) -> Prepared:
    """Prepare a run on every rank of a world. All raise if one cannot, with the reasons of all.

    Raises:
        UsageError: a rank cannot prepare it, or ranks have other settings, data or versions than rank 0.
    """
    check_same_versions(world)
    check_same_config(run, world)
    prepared = on_all_ranks(world, lambda: prepare(run, world.size, dataset, check_parts=check_parts), LOAD_TIMEOUT_S)
    check_same_data(prepared.dataset, run.data.redacted_path, world)
    check_same_config(prepared.run, world)
    return prepared


def fingerprint_inputs(run: Run, dataset: Dataset) -> InputFingerprints:
    """Return the fingerprints of what a run reads; "" for what it does not read, or what cannot be read any more."""
    fingerprints = {"init_from": "", "distill_from": ""}
    for name, find_dir in (("init_from", find_init_model_dir), ("distill_from", teacher_weights_dir)):
        path = getattr(run, name)
        with contextlib.suppress(UsageError):
            fingerprints[name] = weights_fingerprint(find_dir(Path(path))) if path else ""
    return InputFingerprints(data=dataset.fingerprint, **fingerprints)


def _check_ranks_of_labels(strategy: PerLabel, lanes: int, ranks: int, labels: int) -> None:
    """Raise UsageError if the ranks of a label cannot train it together."""
    teams = {strategy.ranks_of_label(rank, ranks, labels) for rank in range(ranks)}
    for size in sorted({len(team) for team in teams}, reverse=True):
        if size > lanes:
            raise UsageError(
                f"--lanes {lanes}: {size} ranks of a label cannot share them. Use --lanes {size} --batch {size} or "
                f"more, or at most {lanes * len(teams)} ranks"
            )
        strategy.per_label_strategy.check(size)


def _check_parameters(run: Run, spec: Spec) -> None:
    """Raise UsageError if a group of a player has no parameters, or a player has fewer parameters than fragments."""
    fragments = run.strategy.num_fragments
    if fragments == 1 and not (run.g.groups or run.d.groups):
        return
    networks = build_networks(run, replace(spec, classes=0) if run.per_label else spec, CPU)
    parameters = {"G": trained_parameters(networks.g), "D": trained_parameters(networks.d)}
    smaller = min(parameters, key=lambda name: len(parameters[name]))
    check_fragments(fragments, len(parameters[smaller]), smaller)
    for section, player_optim in (("g", run.g), ("d", run.d)):
        player_optim.select_parameters(section, parameters[section.upper()])


def _check_parts(run: Run, dataset: Dataset) -> None:
    user_defined = is_user_defined(run.nets, run.objective)
    if not user_defined:
        check_weight_clip(run, run.nets.spectral)
        check_gradient_penalty(run, getattr(run.nets, "batch_norm", False))
        nets: Any = run.nets
        # each game of a per-label run has no labels, and is resolved by itself
        if isinstance(run.objective, Adversarial) and hasattr(nets, "g_conditioning") and not run.per_label:
            check_d_conditioning(run.objective, resolve_d_conditioning(nets, make_spec(run.data, dataset)))
    if not user_defined or run.per_label:
        _check_parameters(run, make_spec(run.data, dataset))
    check_evaluation(run.evaluation, dataset, run.output.best_metric)
    is_paired = conditioning_input_of(run.nets) is not None and not run.per_label
    check_pairs(run.evaluation.metrics, dataset.sample_rate if is_paired else None)
    if run.distill_from and isinstance(run.objective, DistributionMatching):
        load_denoiser(Path(run.distill_from), make_spec(run.data, dataset))
    elif run.distill_from:
        make_teacher(run, dataset, CPU)
    if (user_defined and not run.per_label) or is_paired:
        trial = replace(run, device=replace(run.device, compile=False), distill_from="")
        networks = build_networks(trial, make_spec(run.data, dataset), CPU)
        game = build_game(trial, networks, dataset, CPU)  # which tries the user's own
        if not user_defined:
            check_losses(game, dataset)
