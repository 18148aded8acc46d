"""Objectives that a run cannot play as it says: each would be trained silently as something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Unusable
from ..losses.adversarial import Adversarial
from ..strategies.asynchronous import Async

if TYPE_CHECKING:
    from .run import Run


def refuse_unfit_objective(run: Run) -> None:
    """What the record of a run tells before its data are there."""
    objective: Any = run.objective
    if not isinstance(objective, Adversarial):
        return  # the user's own
    objective.check()
    within = run.per_label.within if run.per_label else run.strategy
    if objective.nearby and isinstance(within, Async):
        raise Unusable(
            f"objective.zcr needs fakes of nearby latents, and with --strategy {within.name} D draws what G posted: "
            "use objective.zcr=0 and objective.zcr_g=0, or --strategy sync"
        )
    if objective.paired and run.g_batch not in (0, run.batch):
        raise Unusable(
            f"objective.loss={objective.loss} compares every fake with a real: --g_batch {run.g_batch} must be --batch "
            f"{run.batch}, or left out"
        )
    images = min(run.batch, run.g_batch or run.batch) // run.lanes
    if objective.contrastive and images < 2:
        raise Unusable(
            f"objective.contrastive compares the images of a lane, and with --batch {run.batch} and --lanes "
            f"{run.lanes} there is one: use --lanes {max(1, run.lanes // 4)}, or a larger batch"
        )
    if objective.conditioning and run.per_label:
        raise Unusable(
            f"objective.{objective.conditioning} teaches D labels, and under --strategy {run.per_label.name} each D "
            f"sees one: use objective.{objective.conditioning}=0"
        )


def refuse_untold(objective: Any, labelled: bool) -> None:
    """Labels that are to be learnt where none are told."""
    if isinstance(objective, Adversarial) and objective.conditioning and not labelled:
        raise Unusable(
            f"objective.{objective.conditioning} needs labels, and there are none, or --data.labels=false hides them: "
            f"use objective.{objective.conditioning}=0"
        )


def refuse_numbers(objective: Any) -> None:
    """What changes images where the data are numbers."""
    if not isinstance(objective, Adversarial):
        return
    for field, value, none in (
        ("augment", objective.augment.name, "none"),
        ("cr", objective.cr, 0),
        ("bcr", objective.bcr, 0),
    ):
        if value != none:
            raise Unusable(f"objective.{field}={value} changes images, and the data are numbers: use {field}={none}")


def refuse_unheard(objective: Adversarial, d_conditioning: str) -> None:
    """A D of ours that says more than is listened to, or less. d_conditioning: how it is told the label."""
    more = d_conditioning if d_conditioning in ("classifier", "contrastive") else ""
    wanted = objective.conditioning
    if wanted and wanted != more:
        raise Unusable(
            f"objective.{wanted} is of what a D with nets.d_conditioning={wanted} says, and this is {d_conditioning}: "
            f"use --nets.d_conditioning={wanted} where the networks have it, or objective.{wanted}=0"
        )
    if more and not wanted:
        raise Unusable(
            f"nets.d_conditioning={more}: nothing would train that head or tell D the labels; use --objective.{more}=1"
        )
