"""Refuse a run whose fields contradict each other, before anything is built or loaded.

What depends on the kind of strategy is asked of the strategy. Checks that need the data or the networks are
functions of their own, which `resolve` and `prepare` call."""

from __future__ import annotations

import math
from typing import Any

from paragan.config.run import Run
from paragan.config.user_code import is_user_defined
from paragan.core.devices import find_cpp_compiler, resolve_device_kind
from paragan.core.errors import UsageError
from paragan.data.open_source import SOURCE_FORMATS_HINT
from paragan.losses.adversarial import Adversarial
from paragan.losses.augment import ADA
from paragan.losses.denoising import Denoising
from paragan.losses.distribution_matching import DistributionMatching
from paragan.losses.reconstruction import Reconstruction
from paragan.nets import DenoiserConfig
from paragan.nets.spec import Spec


def validate(run: Run, ranks: int = 1) -> None:
    """Raise UsageError if a run cannot work on so many ranks."""
    for name, batch in (("--batch", run.batch), ("--g_batch", run.g_batch)):
        if batch % run.lanes:
            down = batch - batch % run.lanes or run.lanes
            lanes = _nearest_lanes(run)
            or_lanes = f", or --lanes {lanes}" if lanes >= ranks or run.per_label else ""
            raise UsageError(
                f"{name} {batch}: does not divide into --lanes {run.lanes}. "
                f"Use {name} {down} or {down + run.lanes}{or_lanes}"
            )
    if ranks > run.lanes and not run.per_label:
        raise UsageError(f"--lanes {run.lanes}: {ranks} ranks cannot share them. Start at most {run.lanes} ranks")
    run.strategy.check(ranks)
    _check_sync_mode(run)
    if run.device.kind == "mps" and ranks > 1:
        raise UsageError(f"--device.kind=mps: is one device, and {ranks} ranks were started. Start one, or use cpu.")
    if run.device.capture_passes:
        _check_capture(run, ranks)
    if run.device.tune == "measured":
        _check_measured_tuning(run)
    if run.on_divergence.is_enabled:
        _check_rollback(run, ranks)
    if run.ramp:
        check_ramp(run)
    check_objective(run)
    _check_player_optims(run, ranks)
    if run.distill_from and run.per_label:
        raise UsageError(
            f"distill_from={run.distill_from}: is for one generator, and --strategy {run.strategy.name} has "
            "several. Leave one of them out."
        )
    if isinstance(run.objective, DistributionMatching) and not run.distill_from:
        raise UsageError(
            f"{run.recipe} needs --teacher MODEL: a run of `paragan train diffusion`, or the folder of a diffusers "
            "pipeline"
        )
    if not run.data.path:
        raise UsageError(f"{run.recipe} needs --data D: {SOURCE_FORMATS_HINT}, or the address of one")


def _check_sync_mode(run: Run) -> None:
    """Raise UsageError if ranks cannot agree after every `sync_period` rounds as the run says."""
    period = run.strategy.step_period
    mode = run.strategy.sync_mode
    owner = "strategy.per_label_strategy" if run.per_label else "strategy"
    if mode != "parameters" and run.strategy.sync_period == 1:
        raise UsageError(
            f"{owner}.sync_mode={mode}: has no effect with {owner}.sync_period=1. Use --{owner}.sync_period=2 or "
            f"more, or --{owner}.sync_mode=parameters."
        )
    if period == 1:
        return
    if run.d_steps > 1:
        raise UsageError(
            f"{owner}.sync_mode=accumulate: sums one gradient of D in a round, and d_steps is {run.d_steps}. Use "
            f"--d_steps=1, or --{owner}.sync_mode=parameters."
        )
    rounds = run.total_rounds
    if period > rounds:
        raise UsageError(
            f"{owner}.sync_period={period}: with {owner}.sync_mode=accumulate optimizers step after every period, and "
            f"the run has {rounds} rounds. Use --{owner}.sync_period={max(1, rounds)} or less, or a larger --kimg."
        )


def _check_player_optims(run: Run, ranks: int) -> None:
    """Raise UsageError if the settings of a player's optimizer contradict each other, or the strategy."""
    strategy = run.per_label.per_label_strategy if run.per_label else run.strategy
    for section, player_optim in (("g", run.g), ("d", run.d)):
        player_optim.check(section)
        optimizer = player_optim.optimizer
        if strategy.shard_optimizer and not optimizer.elementwise:
            raise UsageError(
                f"{section}.optimizer={optimizer.name}: is not known to step every number by itself, and "
                "strategy.shard_optimizer=true divides layers among ranks. Use "
                f"--{section}.optimizer=adam, or --strategy.shard_optimizer=false"
            )
        for i, group in enumerate(player_optim.groups):
            if ranks > 1 and strategy.replicas_drift and group.freeze_from_kimg is not None:
                raise UsageError(
                    f"{section}.groups.{i}.freeze_from_kimg={group.freeze_from_kimg:g}: ranks hold different weights "
                    f"under --strategy {run.strategy.name} as it is set, and frozen ones would never agree. Use "
                    "--strategy sync, or leave freeze_from_kimg out"
                )


def _check_rollback(run: Run, ranks: int) -> None:
    """A rollback needs all ranks."""
    if not run.health.enabled:
        raise UsageError(
            "--on-divergence=rollback: needs the health monitor, which --health=off disables. Use --health=on, "
            "or --on-divergence=none."
        )
    if ranks > 1 and run.strategy.survives_rank_loss:
        name = run.strategy.name
        raise UsageError(
            f"--on-divergence=rollback: needs all ranks, and --strategy {name} goes on without lost ones. Use "
            "--strategy.peer_timeout_s=0."
        )


def _check_measured_tuning(run: Run) -> None:
    """Settings are measured once, for all ranks."""
    if run.strategy.auto_request:
        raise UsageError(
            "--device.tune=measured: does not decide together with --strategy auto. Take the fields that `paragan "
            "plan --tune` names, or the strategy that `paragan plan` does"
        )
    if run.per_label or run.strategy.survives_rank_loss:
        raise UsageError(
            f"--device.tune=measured: decides before the first round for all ranks, and with --strategy "
            f"{run.strategy.name} they come and go. Take the fields that `paragan plan --tune` names"
        )


def _check_capture(run: Run, ranks: int) -> None:
    """Captured passes run the same kernels on the same memory every time."""
    strategy = run.strategy
    kind = resolve_device_kind(run.device.kind)
    lacks_compiler = kind == "cpu" and not find_cpp_compiler()
    reasons = {
        "works on CUDA and on CPUs": kind not in ("cuda", "cpu"),
        "needs a C++ compiler on a CPU (g++, or what CXX names), and there is none": lacks_compiler,
        f"is for one rank: with {ranks}, gradients are sent during backward": ranks > 1,
        f"needs --strategy sync with order=alternating, not {run.strategy.name}": not strategy.supports_graph_capture,
        "does not work with --device.compile=true": run.device.compile,
        "does not work with --distill_from": bool(run.distill_from),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"--device.capture_passes=true: {reason}. Leave it false")


def check_objective(run: Run) -> None:
    """Raise UsageError if the objective does not fit the run, as far as that is known without the data."""
    objective: Any = run.objective
    if isinstance(objective, Adversarial | Reconstruction):
        objective.check()
    if run.d.is_late:
        _check_late_start(run)
    if isinstance(run.nets, DenoiserConfig) or isinstance(objective, Denoising | DistributionMatching):
        _check_diffusion(run)
    if isinstance(objective, Reconstruction) and not hasattr(run.nets, "conditioning_input"):
        raise UsageError(
            f"objective=reconstruction: compares what G makes of real data with these, and --nets={run.nets.name} "
            "makes images from latents. Use --nets=vq-autoencoder, or networks of your own with conditioning_input"
        )
    if not isinstance(objective, Adversarial):
        return
    levels = getattr(run.nets, "stages", 1)
    if levels != objective.noise_levels and not is_user_defined(run.nets):
        raise UsageError(
            f"objective.noise_levels={objective.noise_levels}: --nets={run.nets.name} makes {levels} images of "
            f"a latent. Use objective.noise_levels={levels}"
        )
    if objective.latent_perturbation and run.strategy.reuses_fakes:
        raise UsageError(
            f"objective.zcr={objective.zcr:g}: needs fakes of nearby latents, and with --strategy {run.strategy.name} "
            "D trains on the images of G's own turn. Use objective.zcr=0 and objective.zcr_g=0, or --strategy sync"
        )
    if objective.is_paired and run.g_batch not in (0, run.batch):
        raise UsageError(
            f"objective.loss={objective.loss} compares every fake with a real: --g_batch {run.g_batch} must be --batch "
            f"{run.batch}, or left out"
        )
    images = min(run.batch, run.g_batch or run.batch) // run.lanes
    if objective.contrastive and images < 2:
        raise UsageError(
            f"objective.contrastive={objective.contrastive:g}: compares the images of a lane, and with "
            f"--batch {run.batch} and --lanes {run.lanes} there is one. Use --lanes {max(1, run.lanes // 4)}, or a "
            "larger batch"
        )
    if objective.required_d_conditioning and run.per_label:
        raise UsageError(
            f"objective.{objective.required_d_conditioning}: teaches D labels, and under --strategy "
            f"{run.strategy.name} each D sees one. Use objective.{objective.required_d_conditioning}=0"
        )


def _check_diffusion(run: Run) -> None:
    """Raise UsageError if networks and objective of a diffusion model, or of its distillation, are not both of one."""
    objective: Any = run.objective
    nets: Any = run.nets
    if not isinstance(nets, DenoiserConfig) and not is_user_defined(nets):
        raise UsageError(
            f"objective={objective.name}: trains a denoiser, and --nets={nets.name} has none. Use --nets=edm"
        )
    if isinstance(objective, Denoising):
        if not run.strategy.supports_late_start or run.strategy.step_period > 1:
            raise UsageError(
                f"--strategy={run.strategy.name}: trains two players, and objective=denoising has one. Use "
                "--strategy=sync"
            )
        return
    if not isinstance(objective, DistributionMatching):
        raise UsageError(
            f"--nets={nets.name}: is a diffusion model, and objective={objective.name} is of two players. Use "
            "--objective=denoising"
        )
    if nets.steps != 1 or nets.critic != "score":
        raise UsageError(
            f"nets.steps={nets.steps} nets.critic={nets.critic}: distillation trains a generator of one step. Use "
            "--nets.steps=1 --nets.critic=score"
        )


def _check_late_start(run: Run) -> None:
    """Raise UsageError if rounds cannot train G alone at first."""
    field = f"d.start_kimg={run.d.start_kimg:g}"
    if not run.d.start_kimg:
        field = f"d.weight_warm_up_kimg={run.d.weight_warm_up_kimg:g}"
    if isinstance(run.objective, Adversarial):
        raise UsageError(
            f"{field}: without D this objective leaves G no loss. Use objective=reconstruction, or "
            "--d.start_kimg=0 --d.weight_warm_up_kimg=0"
        )
    reasons = {
        f"every round of --strategy={run.strategy.name} trains both players": not run.strategy.supports_late_start,
        "strategy.sync_mode=accumulate sums gradients over rounds of one kind": run.strategy.step_period > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"{field}: {reason}. Use --d.start_kimg=0 --d.weight_warm_up_kimg=0")
    if 1000 * run.d.start_kimg >= run.total_images:
        raise UsageError(f"{field}: the run ends at --kimg={run.kimg:g}. Use --d.start_kimg={run.kimg / 2:g}")


def check_labels_available(objective: Any, has_labels: bool) -> None:
    """Raise UsageError if D shall learn labels and there are none."""
    if isinstance(objective, Adversarial) and objective.required_d_conditioning and not has_labels:
        raise UsageError(
            f"objective.{objective.required_d_conditioning}: needs labels, and there are none, or "
            f"--data.labels=false hides them. Use objective.{objective.required_d_conditioning}=0"
        )


def check_objective_for_data(objective: Any, spec: Spec) -> None:
    """Raise UsageError if the objective is of other data than those that `spec` describes."""
    if isinstance(objective, Reconstruction):
        objective.check_waves(spec.shape, spec.sample_rate)
    if not isinstance(objective, Adversarial) or not spec.array_shape:
        return
    for field, value, disabled in (
        ("augment", objective.augment.name, "none"),
        ("cr", objective.cr, 0),
        ("bcr", objective.bcr, 0),
    ):
        if value != disabled:
            raise UsageError(
                f"objective.{field}={value}: transforms images, and the data are arrays. Use "
                f"objective.{field}={disabled}."
            )


def check_d_conditioning(objective: Adversarial, d_conditioning: str) -> None:
    """Raise UsageError if a built-in D has a head for labels that no loss trains, or lacks one.

    Args:
        d_conditioning: how D is conditioned on labels.
    """
    head = d_conditioning if d_conditioning in ("classifier", "contrastive") else ""
    required = objective.required_d_conditioning
    if required and required != head:
        raise UsageError(
            f"objective.{required}: needs nets.d_conditioning={required}, not {d_conditioning}. Use "
            f"--nets.d_conditioning={required} if the networks have it, or objective.{required}=0."
        )
    if head and not required:
        raise UsageError(f"nets.d_conditioning={head}: no loss trains this head. Use --objective.{head}=1")


def check_gradient_penalty(run: Run, d_has_batch_norm: bool) -> None:
    """Raise UsageError for a gradient penalty on a D with batch norm.

    The penalty is of each image alone, and batch norm makes images depend on each other (Gulrajani et al. 2017,
    section 4).
    """
    objective = run.objective
    if d_has_batch_norm and isinstance(objective, Adversarial) and objective.gp:
        option = "" if is_user_defined(run.nets) else " (--nets.batch_norm=false)"
        raise UsageError(
            f"objective.gp={objective.gp:g}: penalises each image alone, and D normalises over the batch. Use a D "
            f"without batch norm{option}, or objective.gp=0."
        )


def check_weight_clip(run: Run, d_has_spectral_norm: bool) -> None:
    """Raise UsageError for a weight clip on a D that something else bounds already."""
    objective = run.objective
    if not isinstance(objective, Adversarial) or not objective.clip:
        return
    if d_has_spectral_norm:
        option = "" if is_user_defined(run.nets) else " (--nets.spectral=false)"
        raise UsageError(
            f"objective.clip={objective.clip:g}: clips weights that spectral norm rescales. Use a D without "
            f"it{option}, or objective.clip=0."
        )
    if objective.gp:
        raise UsageError(
            f"objective.clip={objective.clip:g}: objective.gp={objective.gp:g} bounds the slopes of D too. "
            "Use objective.gp=0, or objective.clip=0"
        )


def _nearest_lanes(run: Run) -> int:
    """Return the largest number of lanes, at most that of the run, that divides both of its batches."""
    both = math.gcd(run.batch, run.g_batch)
    return next(lanes for lanes in range(min(run.lanes, both), 0, -1) if both % lanes == 0)


def describe_unused_length(run: Run) -> list[str]:
    """Return notes on stages of the ramp that begin after the end, and on last rounds without a step."""
    notes = list[str]()
    late = [f"{start / 1000:g}:{batch}" for start, batch in run.stages if start >= run.total_images]
    if late:
        notes.append(f"--ramp {','.join(late)} begins after the end, --kimg {run.kimg:g}")
    period = run.strategy.step_period
    unused = run.total_rounds % period
    if unused:
        notes.append(
            f"the last {unused} of {run.total_rounds:,} rounds take no step: with sync_mode=accumulate optimizers step "
            f"after every {period} rounds"
        )
    return notes


def check_ramp(run: Run) -> None:
    """Raise UsageError if the batch cannot grow as the ramp says."""
    before = -1.0
    ramp = ",".join(f"{kimg:g}:{batch}" for kimg, batch in run.ramp)
    for kimg, batch in run.ramp:
        if kimg <= before:
            raise UsageError(f"--ramp {ramp}: times must increase from stage to stage, as in 100:128,400:256")
        if batch % run.lanes:
            down = batch - batch % run.lanes or run.lanes
            raise UsageError(
                f"--ramp {ramp}: {batch} does not divide into --lanes {run.lanes}. Use {down} or {down + run.lanes}"
            )
        if run.g_batch and batch * run.g_batch % (run.batch * run.lanes):
            raise UsageError(f"--ramp {ramp}: --g_batch {run.g_batch} does not grow with {batch} in whole lanes")
        before = kimg
    ada = isinstance(run.objective, Adversarial) and isinstance(run.objective.augment, ADA)
    reasons = {
        f"--strategy {run.strategy.name} needs rounds of one size": not run.strategy.supports_batch_ramp,
        "--device.capture_passes=true captures passes of one size": run.device.capture_passes,
        "objective.augment=ada adapts in steps of one size": ada,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"--ramp {ramp}: {reason}. Leave one of them out")
