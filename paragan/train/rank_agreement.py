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
from paragan.core.errors import Unusable
from paragan.core.schema import differences, plain
from paragan.train.run_dir import Ready, RunFolder, Wanted, choose, nothing

T = TypeVar("T")
SHARED_TIMEOUT_S = 10.0


def together(world: World, action: Callable[[], T], timeout_s: float | None = None) -> T:
    """Do it on every rank, and go on only if all could: else every rank refuses, with everyone's reasons."""
    result, reason = None, ""
    try:
        result = action()
    except (Unusable, OSError) as error:
        reason = str(error)
    reasons = world.agree(reason, timeout_s)
    if any(reasons):
        distinct = dict.fromkeys(r for r in reasons if r)
        ranks = {r: [i for i, other in enumerate(reasons) if other == r] for r in distinct}
        some = len(ranks) > 1 or any(len(who) < world.size for who in ranks.values())
        raise Unusable(
            "; ".join((f"rank {', '.join(map(str, who))}: " if some else "") + r for r, who in ranks.items())
        )
    assert result is not None
    return result


def refuse_disagreement(run: Run, world: World) -> None:
    """All ranks must have been started with one run: what is not, is named on all of them."""
    runs = [json.loads(word) for word in world.agree(json.dumps(plain(run)))]
    may = ("data.path", "init_from", "teacher", "device.kind", "device.threads", "timeout_s", "about")  # by host
    named: list[str] = []
    for rank, other in enumerate(runs):
        for name, first, value in differences(runs[0], other):
            if name not in may:
                named.append(f"{name} is {first!r} on rank 0, {value!r} on rank {rank}")
    if named:
        raise Unusable(f"ranks were started with different runs: {'; '.join(named[:8])}. Give all the same command")


@contextlib.contextmanager
def owned_folder(run: Run, world: World, wanted: Wanted, ready: Ready = nothing) -> Iterator[RunFolder]:
    """The run's folder, chosen and locked by rank 0. ready: what refuses a run before a folder is made for it."""
    mine: RunFolder | None = None

    def pick() -> str:
        nonlocal mine
        if world.first:
            mine = choose(wanted, run, world.size, ready)
            mine.write_record(run)
            return str(mine.path)
        return "."

    picked = together(world, pick)
    path = Path(world.agree(picked)[0])
    try:
        refuse_unshared(path, world)
        yield mine or RunFolder(path)
    finally:
        if mine:
            mine.release()


def refuse_unshared(path: Path, world: World) -> None:
    """Every rank must see the folder that rank 0 has: other ranks write parts of a checkpoint."""
    mark = path / world.agree(f".shared-{secrets.token_hex(8)}")[0]  # many may look into one folder at once
    if world.first:
        mark.touch()
    world.agree("marked")

    def look() -> bool:
        deadline = time.monotonic() + SHARED_TIMEOUT_S
        while not mark.exists():  # network file systems may show it late
            if time.monotonic() > deadline:
                here = socket.gethostname()
                raise Unusable(f"host {here} does not see {path}: the run folder must be on storage all hosts share")
            time.sleep(0.1)
        return True

    together(world, look)
    if world.first:
        mark.unlink()
