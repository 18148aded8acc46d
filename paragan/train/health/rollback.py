"""Going back to the last good checkpoint, with something changed: `--on-divergence rollback`.

How often a run went back is told by health.jsonl, and so is to where; everything that was changed follows from it and
from the record of the run, so that a run that is killed at any moment goes on as it would have.
"""

from __future__ import annotations

from pathlib import Path

from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.errors import Diverged
from paragan.train import checkpoint
from paragan.train.console import RunConsole
from paragan.train.health.monitor import ACTION_GAVE_UP, ACTION_ROLLBACK, append_finding, read_rollbacks
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.run_dir import RunDir


def roll_back(
    run_dir: RunDir, run: Run, world: World, console: RunConsole, rollback_request: RollbackRequested
) -> None:
    """Make the last good checkpoint the newest one, and write down why; Diverged where that was done often enough."""
    told = ""
    if world.is_main:
        told = _decide_rollback(run_dir, run, rollback_request)
    told = world.all_gather_str(told)[0]
    if told.startswith(ACTION_GAVE_UP):
        raise Diverged(told.removeprefix(ACTION_GAVE_UP), same_on_all_ranks=True)
    console.print(told)
    retire_undone_checkpoints(run_dir, world)


def _decide_rollback(run_dir: RunDir, run: Run, rollback_request: RollbackRequested) -> str:
    """What rank 0 tells all, and writes down."""
    finding, kimg, step = rollback_request.finding, rollback_request.images / 1000, rollback_request.step
    before = read_rollbacks(run_dir.path)
    if len(before) >= run.on_divergence.max_rollbacks:
        append_finding(run_dir.path, finding, kimg, step, ACTION_GAVE_UP)
        often = f"it went back {len(before)} times (on_divergence.max_rollbacks)"
        return f"{ACTION_GAVE_UP}{kimg:g} kimg: {finding.message}; {often}, and it happened again; {finding.advice}"
    good = [
        path
        for path in checkpoint.list_checkpoints(run_dir.checkpoints_dir)
        if int(path.name) <= finding.last_good_step
    ]
    to = int(good[0].name) if good else 0
    times = len(before) + 1
    settings = {
        "rollback": times,
        "to_step": to,
        "lr_factor": run.on_divergence.lr_factor**times,
        "reseed": run.on_divergence.reseed,
    }
    append_finding(run_dir.path, finding, kimg, step, ACTION_ROLLBACK, **settings)
    how = f"learning rates x {run.on_divergence.lr_factor**times:g}" + (
        ", another seed" if run.on_divergence.reseed else ""
    )
    return f"rollback {times} of {run.on_divergence.max_rollbacks}, {kimg:g} kimg: {finding.message}; back to step {to}, {how}"


def retire_undone_checkpoints(run_dir: RunDir, world: World) -> int:
    """How often the run in a folder has gone back. Checkpoints of what was undone get a name that nobody looks for."""
    before = read_rollbacks(run_dir.path) if world.is_main else []
    for path in checkpoint.list_checkpoints(run_dir.checkpoints_dir) if before else []:
        if int(path.name) > before[-1]["to_step"] and _rollbacks_before(path) < len(before):
            path.rename(path.with_name(f"undone{len(before)}-{path.name}"))
    return int(world.all_gather_str(str(len(before)))[0])


def _rollbacks_before(path: Path) -> int:
    """How often its run had gone back when a checkpoint was written."""
    try:
        return int(checkpoint.read_metadata(path).get("rollbacks", 0))
    except checkpoint.CorruptCheckpoint:
        return 0
