"""Go back to the last good checkpoint with lower learning rates and another seed: `--on-divergence rollback`.

health.jsonl alone says how often a run went back, and to where. Learning rates and seed follow from that number; the
record of the run stays as it was asked for. The line is written first and checkpoints are renamed afterwards, which
every start completes, so a run that is killed at any moment continues as it would have.
"""

from __future__ import annotations

from pathlib import Path

from paragan.comm import checkpoint_metadata
from paragan.comm.world import World
from paragan.config.sections import RollbackOptions
from paragan.core.errors import Diverged
from paragan.train.console import RunConsole
from paragan.train.health.monitor import ACTION_EXHAUSTED, ACTION_ROLLBACK, append_finding, read_rollbacks
from paragan.train.health.rollback_request import RollbackRequested
from paragan.train.run_dir import RunDir


def roll_back(
    run_dir: RunDir, options: RollbackOptions, world: World, console: RunConsole, rollback_request: RollbackRequested
) -> None:
    """Make the last good checkpoint the newest one, and write down why. All ranks call this.

    Raises:
        Diverged: the run went back `options.max_rollbacks` times before.
    """
    message = _decide_rollback(run_dir, options, rollback_request) if world.is_main else ""
    message = world.all_gather_str(message)[0]
    if message.startswith(ACTION_EXHAUSTED):
        raise Diverged(message.removeprefix(ACTION_EXHAUSTED), same_on_all_ranks=True)
    console.print(message)
    retire_undone_checkpoints(run_dir, world)


def _decide_rollback(run_dir: RunDir, options: RollbackOptions, rollback_request: RollbackRequested) -> str:
    """Write the line of health.jsonl on rank 0, and return the message for all ranks."""
    finding = rollback_request.finding
    kimg = rollback_request.images / 1000
    step = rollback_request.step
    previous = read_rollbacks(run_dir.path)
    if len(previous) >= options.max_rollbacks:
        append_finding(run_dir.path, finding, kimg, step, ACTION_EXHAUSTED)
        count = f"it went back {len(previous)} times (on_divergence.max_rollbacks)"
        return f"{ACTION_EXHAUSTED}{kimg:g} kimg: {finding.message}; {count}, and it happened again; {finding.advice}"
    steps = [int(path.name) for path in checkpoint_metadata.list_checkpoints(run_dir.checkpoints_dir)]
    to_step = next((saved_step for saved_step in steps if saved_step <= finding.last_good_step), 0)
    number = len(previous) + 1
    settings = {
        "rollback": number,
        "to_step": to_step,
        "lr_factor": options.lr_factor**number,
        "reseed": options.reseed,
    }
    append_finding(run_dir.path, finding, kimg, step, ACTION_ROLLBACK, **settings)
    changes = f"learning rates x {options.lr_factor**number:g}"
    if options.reseed:
        changes += ", another seed"
    return (
        f"rollback {number} of {options.max_rollbacks}, {kimg:g} kimg: {finding.message}; "
        f"back to step {to_step}, {changes}"
    )


def retire_undone_checkpoints(run_dir: RunDir, world: World) -> int:
    """Rename the checkpoints that were undone, and return how often the run went back. All ranks call this."""
    rollbacks = read_rollbacks(run_dir.path) if world.is_main else []
    if rollbacks:
        for path in checkpoint_metadata.list_checkpoints(run_dir.checkpoints_dir):
            if int(path.name) > rollbacks[-1]["to_step"] and _rollbacks_before(path) < len(rollbacks):
                path.rename(path.with_name(f"undone{len(rollbacks)}-{path.name}"))
    return int(world.all_gather_str(str(len(rollbacks)))[0])


def _rollbacks_before(path: Path) -> int:
    """Return how often the run had gone back when a checkpoint was written."""
    try:
        return int(checkpoint_metadata.read_metadata(path).get("rollbacks", 0))
    except checkpoint_metadata.CorruptCheckpoint:
        return 0
