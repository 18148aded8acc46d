"""What all ranks do before a run, and refuse together: each is told everyone's reasons."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from paragan.comm.world import World
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import diff, to_dict
from paragan.train.run_dir import RunDir, RunDirRequest, StartCheck, no_check, select_run_dir

T = TypeVar("T")
SHARED_STORAGE_TIMEOUT_S = 10.0


def on_all_ranks(world: World, action: Callable[[], T], timeout_s: float | None = None) -> T:
    """Do it on every rank, and go on only if all could: else every rank refuses, with everyone's reasons."""
    result, reason = None, ""
    try:
        result = action()
    except (UsageError, OSError) as error:
        reason = str(error)
    reasons = world.all_gather_str(reason, timeout_s)
    if any(reasons):
        distinct = dict.fromkeys(r for r in reasons if r)
        ranks = {r: [i for i, other in enumerate(reasons) if other == r] for r in distinct}
        some = len(ranks) > 1 or any(len(who) < world.size for who in ranks.values())
        raise UsageError(
            "; ".join((f"rank {', '.join(map(str, who))}: " if some else "") + r for r, who in ranks.items())
        )
    assert result is not None
    return result


def check_same_config(run: Run, world: World) -> None:
    """All ranks must have been started with one run: what is not, is named on all of them."""
    runs = [json.loads(word) for word in world.all_gather_str(json.dumps(to_dict(run)))]
    may = ("data.path", "init_from", "distill_from", "device.kind", "device.threads", "timeout_s", "reasons")  # by host
    named: list[str] = []
    for rank, other in enumerate(runs):
        for name, first, value in diff(runs[0], other):
            if name not in may:
                named.append(f"{name} is {first!r} on rank 0, {value!r} on rank {rank}")
    if named:
        raise UsageError(f"ranks were started with different runs: {'; '.join(named[:8])}. Give all the same command")


@contextlib.contextmanager
def locked_run_dir(
    run: Run, world: World, request: RunDirRequest, start_check: StartCheck = no_check
) -> Iterator[RunDir]:
    """The run's folder, chosen and locked by rank 0. ready: what refuses a run before a folder is made for it."""
    mine: RunDir | None = None

    def select() -> str:
        nonlocal mine
        if world.is_main:
            mine = select_run_dir(request, run, world.size, start_check)
            mine.write_run_config(run)
            return str(mine.path)
        return "."

    picked = on_all_ranks(world, select)
    path = Path(world.all_gather_str(picked)[0])
    try:
        check_shared_storage(path, world)
        yield mine or RunDir(path)
    finally:
        if mine:
            mine.release()


def check_shared_storage(path: Path, world: World) -> None:
    """Every rank must see the folder that rank 0 has: other ranks write parts of a checkpoint."""
    mark = path / world.all_gather_str(f".shared-{secrets.token_hex(8)}")[0]  # many may look into one folder at once
    if world.is_main:
        mark.touch()
    world.all_gather_str("marked")

    def wait_for_marker() -> bool:
        deadline = time.monotonic() + SHARED_STORAGE_TIMEOUT_S
        while not mark.exists():  # network file systems may show it late
            if time.monotonic() > deadline:
                here = socket.gethostname()
                raise UsageError(f"host {here} does not see {path}: the run folder must be on storage all hosts share")
            time.sleep(0.1)
        return True

    on_all_ranks(world, wait_for_marker)
    if world.is_main:
        mark.unlink()
