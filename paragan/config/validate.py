"""Refuse a run whose fields do not fit each other, before anything is made or loaded."""

from __future__ import annotations

from typing import Any

from paragan.config.run import Run
from paragan.core.devices import find_cpp_compiler, resolve_device_kind
from paragan.core.errors import UsageError
from paragan.data.open_source import SOURCE_FORMATS_HINT
from paragan.losses.adversarial import Adversarial
from paragan.losses.augment import ADA


def validate(run: Run, ranks: int = 1) -> None:
    """Refuse what cannot work, before anything is made."""
    for name, batch in (("--batch", run.batch), ("--g_batch", run.g_batch)):
        if batch % run.lanes:
            down = batch - batch % run.lanes or run.lanes
            raise UsageError(
                f"{name} {batch} does not divide into --lanes {run.lanes}: try {name} {down} or {down + run.lanes}"
            )
    if ranks > run.lanes and not run.per_label:
        raise UsageError(f"{ranks} ranks cannot share --lanes {run.lanes}: start at most {run.lanes} ranks")
    run.strategy.check(ranks)
    if run.device.kind == "mps" and ranks > 1:
        raise UsageError(f"--device.kind=mps is one device, and there are {ranks} ranks: start one, or use cpu")
    if run.device.capture_passes:
        _refuse_graph(run, ranks)
    if run.device.tune == "measured":
        _refuse_measuring(run)
    if run.on_divergence.is_enabled:
        _refuse_guard(run, ranks)
    if run.ramp:
        check_ramp(run)
    check_objective(run)
    if run.distill_from and run.per_label:
        raise UsageError(
            f"teacher={run.distill_from} teaches one generator, and --strategy {run.strategy.name} has many"
        )
    if not run.data.path:
        raise UsageError(f"{run.recipe} needs --data D: {SOURCE_FORMATS_HINT}, or an address of such")


def _refuse_guard(run: Run, ranks: int) -> None:
    """Going back is for ranks that are all there."""
    if not run.health.enabled:
        raise UsageError("--on-divergence rollback goes by what --health=off does not look at: leave --health out")
    if ranks > 1 and run.strategy.survives_rank_loss:
        name = run.strategy.name
        raise UsageError(
            f"--on-divergence rollback needs all ranks, and --strategy {name} goes on without some: use "
            "--strategy.peer_timeout_s=0"
        )


def _refuse_measuring(run: Run) -> None:
    """What is measured is decided once, for ranks that are all there."""
    if run.strategy.auto_request:
        raise UsageError(
            "--device.tune=measured and --strategy auto do not decide together: take the fields that `paragan "
            "plan --tune` names, or the strategy that `paragan plan` does"
        )
    if run.per_label or run.strategy.survives_rank_loss:
        raise UsageError(
            f"--device.tune=measured decides before the first round for all ranks, and with --strategy "
            f"{run.strategy.name} they come and go: take the fields that `paragan plan --tune` names"
        )


def _refuse_graph(run: Run, ranks: int) -> None:
    """Recorded passes are the same kernels on the same memory every time."""
    strategy = run.strategy
    kind = resolve_device_kind(run.device.kind)
    lacking = kind == "cpu" and not find_cpp_compiler()
    reasons = {
        "records passes on CUDA and on CPUs": kind not in ("cuda", "cpu"),
        "needs a C++ compiler on a CPU (g++, or what CXX names), and there is none": lacking,
        f"is for one rank: with {ranks} gradients leave under backward": ranks > 1,
        f"needs --strategy sync with order=alternating, not {run.strategy.name}": not strategy.supports_graph_capture,
        "and --device.compile=true are two ways to the same: choose one": run.device.compile,
        "and a teacher, loaded when it is asked for, do not go together": bool(run.distill_from),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"--device.capture_passes=true {reason}; leave it false")


def check_objective(run: Run) -> None:
    """What the record of a run tells before its data are there."""
    objective: Any = run.objective
    if not isinstance(objective, Adversarial):
        return  # the user's own
    objective.check()
    if objective.latent_perturbation and run.strategy.reuses_fakes:
        raise UsageError(
            f"objective.zcr={objective.zcr:g} needs fakes of nearby latents, and with --strategy {run.strategy.name} D "
            "trains on the images of G's own turn: use objective.zcr=0 and objective.zcr_g=0, or --strategy sync"
        )
    if objective.is_paired and run.g_batch not in (0, run.batch):
        raise UsageError(
            f"objective.loss={objective.loss} compares every fake with a real: --g_batch {run.g_batch} must be --batch "
            f"{run.batch}, or left out"
        )
    images = min(run.batch, run.g_batch or run.batch) // run.lanes
    if objective.contrastive and images < 2:
        raise UsageError(
            f"objective.contrastive compares the images of a lane, and with --batch {run.batch} and --lanes "
            f"{run.lanes} there is one: use --lanes {max(1, run.lanes // 4)}, or a larger batch"
        )
    if objective.required_d_conditioning and run.per_label:
        raise UsageError(
            f"objective.{objective.required_d_conditioning} teaches D labels, and under --strategy {run.strategy.name} "
            f"each D sees one: use objective.{objective.required_d_conditioning}=0"
        )


def check_labels_available(objective: Any, has_labels: bool) -> None:
    """Labels that are to be learnt where none are told."""
    if isinstance(objective, Adversarial) and objective.required_d_conditioning and not has_labels:
        raise UsageError(
            f"objective.{objective.required_d_conditioning} needs labels, and there are none, or "
            f"--data.labels=false hides them: use objective.{objective.required_d_conditioning}=0"
        )


def check_objective_for_arrays(objective: Any) -> None:
    """What changes images where the data are numbers."""
    if not isinstance(objective, Adversarial):
        return
    for field, value, none in (
        ("augment", objective.augment.name, "none"),
        ("cr", objective.cr, 0),
        ("bcr", objective.bcr, 0),
    ):
        if value != none:
            raise UsageError(f"objective.{field}={value} changes images, and the data are numbers: use {field}={none}")


def check_d_conditioning(objective: Adversarial, d_conditioning: str) -> None:
    """A D of ours that says more than is listened to, or less. d_conditioning: how it is told the label."""
    more = d_conditioning if d_conditioning in ("classifier", "contrastive") else ""
    wanted = objective.required_d_conditioning
    if wanted and wanted != more:
        raise UsageError(
            f"objective.{wanted} is of what a D with nets.d_conditioning={wanted} says, and this is {d_conditioning}: "
            f"use --nets.d_conditioning={wanted} where the networks have it, or objective.{wanted}=0"
        )
    if more and not wanted:
        raise UsageError(
            f"nets.d_conditioning={more}: nothing would train that head or tell D the labels; use --objective.{more}=1"
        )


def check_gradient_penalty(objective: Any, d_has_batch_norm: bool) -> None:
    """A bound on each image's own slope, where what D says of one depends on the others (Gulrajani et al. 2017, 4).
    mixes: whether D has batch norm."""
    if d_has_batch_norm and isinstance(objective, Adversarial) and objective.gp:
        raise UsageError(
            f"objective.gp={objective.gp:g} is of each image's own slope, and D normalises over the batch: use a D "
            "without batch norm (--nets.batch_norm=false), or objective.gp=0"
        )


def check_weight_clip(objective: Any, d_has_spectral_norm: bool) -> None:
    """Weights that are clipped where something else bounds D already. spectral: whether D has spectral norm."""
    if not isinstance(objective, Adversarial) or not objective.clip:
        return
    if d_has_spectral_norm:
        raise UsageError(
            f"objective.clip={objective.clip:g} bounds weights that spectral norm rescales: use --nets.spectral=false "
            "(a D without it), or objective.clip=0"
        )
    if objective.gp:
        raise UsageError(
            f"objective.clip={objective.clip:g} and objective.gp={objective.gp:g} are two ways to bound the slopes of "
            "D: use objective.gp=0, or objective.clip=0"
        )


def describe_unreached_stages(run: Run) -> str:
    """What to say of stages that begin after the end; nothing where all are reached."""
    late = [f"{start / 1000:g}:{batch}" for start, batch in run.stages if start >= run.total_images]
    return f"--ramp {','.join(late)} begins after the end, --kimg {run.kimg:g}" if late else ""


def check_ramp(run: Run) -> None:
    """Unusable where a batch cannot grow."""
    before, told = -1.0, ",".join(f"{kimg:g}:{batch}" for kimg, batch in run.ramp)
    for kimg, batch in run.ramp:
        if kimg <= before:
            raise UsageError(f"--ramp {told}: times rise, from one stage to the next: 100:128,400:256")
        if batch % run.lanes:
            down = batch - batch % run.lanes or run.lanes
            raise UsageError(
                f"--ramp {told}: {batch} does not divide into --lanes {run.lanes}: try {down} or {down + run.lanes}"
            )
        if run.g_batch and batch * run.g_batch % (run.batch * run.lanes):
            raise UsageError(f"--ramp {told}: --g_batch {run.g_batch} does not grow with {batch} in whole lanes")
        before = kimg
    ada = isinstance(run.objective, Adversarial) and isinstance(run.objective.augment, ADA)
    reasons = {
        f"--strategy {run.strategy.name} needs rounds of one size": not run.strategy.supports_batch_ramp,
        "--device.capture_passes=true records passes of one size": run.device.capture_passes,
        "objective.augment=ada counts in steps of one size": ada,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"--ramp {told}: {reason}: leave one of them out")
