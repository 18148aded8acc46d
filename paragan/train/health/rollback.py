"""Going back to the last good checkpoint, with something changed: `--guard rollback`.

How often a run went back is told by health.jsonl, and so is to where; everything that was changed follows from it and
from the record of the run, so that a run that is killed at any moment goes on as it would have.
"""

from __future__ import annotations

from pathlib import Path

from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.errors import Diverged
from paragan.train import checkpoint
from paragan.train.console import Screen
from paragan.train.health.monitor import GAVE_UP, ROLLBACK, record, rollbacks
from paragan.train.health.rollback_request import Undo
from paragan.train.run_dir import RunFolder


def go_back(folder: RunFolder, run: Run, world: World, screen: Screen, undo: Undo) -> None:
    """Make the last good checkpoint the newest one, and write down why; Diverged where that was done often enough."""
    told = ""
    if world.first:
        told = _decided(folder, run, undo)
    told = world.agree(told)[0]
    if told.startswith(GAVE_UP):
        raise Diverged(told.removeprefix(GAVE_UP), everywhere=True)
    screen.say(told)
    set_aside(folder, world)


def _decided(folder: RunFolder, run: Run, undo: Undo) -> str:
    """What rank 0 tells all, and writes down."""
    finding, kimg, step = undo.finding, undo.images / 1000, undo.step
    before = rollbacks(folder.path)
    if len(before) >= run.guard.rollbacks:
        record(folder.path, finding, kimg, step, GAVE_UP)
        often = f"it went back {len(before)} times (guard.rollbacks)"
        return f"{GAVE_UP}{kimg:g} kimg: {finding.message}; {often}, and it happened again; {finding.advice}"
    good = [path for path in checkpoint.complete(folder.checkpoints) if int(path.name) <= finding.since]
    to = int(good[0].name) if good else 0
    times = len(before) + 1
    settings = {"rollback": times, "to_step": to, "lr_factor": run.guard.lr_factor**times, "reseed": run.guard.reseed}
    record(folder.path, finding, kimg, step, ROLLBACK, **settings)
    how = f"learning rates x {run.guard.lr_factor**times:g}" + (", another seed" if run.guard.reseed else "")
    return f"rollback {times} of {run.guard.rollbacks}, {kimg:g} kimg: {finding.message}; back to step {to}, {how}"


def set_aside(folder: RunFolder, world: World) -> int:
    """How often the run in a folder has gone back. Checkpoints of what was undone get a name that nobody looks for."""
    before = rollbacks(folder.path) if world.first else []
    for path in checkpoint.complete(folder.checkpoints) if before else []:
        if int(path.name) > before[-1]["to_step"] and _played(path) < len(before):
            path.rename(path.with_name(f"undone{len(before)}-{path.name}"))
    return int(world.agree(str(len(before)))[0])


def _played(path: Path) -> int:
    """How often its run had gone back when a checkpoint was written."""
    try:
        return int(checkpoint.read_about(path).get("rollbacks", 0))
    except checkpoint.Damaged:
        return 0
