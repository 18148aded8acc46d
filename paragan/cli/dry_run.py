"""`paragan train -n`: the resolved run, and what it would cost."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import Unusable
from paragan.plan.round_cost import _pair, few, of_a_round

if TYPE_CHECKING:
    pass


def dry_run(run: Any, ranks: int, reasons: list[str]) -> int:
    """Print the complete record of a run, with its cost as comments; train nothing."""
    from paragan.config.resolve import load_images
    from paragan.config.run import written
    from paragan.config.validate import unreached
    from paragan.core.schema import to_yaml
    from paragan.train.trainer import resolved

    whole = load_images(run)
    whole_run = resolved(run, whole)
    run, images, ranks, rounds, told = _one_game(whole_run, whole, ranks)
    try:
        counted = _cost(run, images, ranks, rounds)
    except (RuntimeError, Unusable) as error:  # networks of the user's own that ask for numbers; a strategy left open
        counted = [f"what it costs cannot be foreseen: {str(error).strip().splitlines()[0]}"]
    late = [line for line in [unreached(whole_run)] if line]
    comments = [*reasons, *whole.describe().splitlines(), *told, *late, *counted]
    record = {name: part for name, part in written(whole_run).items() if name != "about"}  # said below
    sys.stdout.write(to_yaml(record) + "\n" + "".join(f"# {line}\n" for line in comments))
    return 0


def _cost(run: Any, images: Any, ranks: int, rounds: int) -> list[str]:
    """What so many rounds cost, a line each; without what a teacher makes, which has to be loaded."""
    from paragan.config.run import on_lanes
    from paragan.core.devices import kind_of, pick_device
    from paragan.plan.cost import cost, told
    from paragan.plan.memory import imagined
    from paragan.plan.virtual_world import ImaginedWorld
    from paragan.train.build import build_game

    largest = max(batch for start, batch in run.stages if start < max(run.images, 1))
    mean = run.images / run.rounds / run.round * run.batch / largest if run.ramp else 1.0  # round, of the largest
    run = dataclasses.replace(run, teacher="", ramp=(), batch=largest, g_batch=run.g_batch * largest // run.batch)
    blank = few(images)
    world = ImaginedWorld(ranks)
    with imagined():
        game = build_game(run, _pair(run, blank, world), blank, world.device)
        roles = [run.strategy.role(game, world, run.lanes)]
        if roles[0].teams:
            g = roles[0].speakers[1]
            divided = dataclasses.replace(run.strategy, split=f"{g}:{ranks - g}")
            roles.append(divided.role(game, ImaginedWorld(ranks, g), run.lanes))
    everything = of_a_round(run, blank)
    mine = max(len(role.share.lanes) for role in roles)
    part = everything if mine == run.lanes else of_a_round(on_lanes(run, mine), blank)
    lines = cost(game, roles, rounds=rounds, flops=mean * everything.flops, peak_bytes=part.peak_bytes).lines()
    kind = kind_of(device := pick_device(run.device.kind))
    if not kind.there() or part.peak_bytes <= kind.memory(device):
        return lines
    less = "" if run.device.merge == 1 else "; --device.merge=1 takes less"
    return [*lines, f"that is more than the {told(kind.memory(device))} of memory here{less}"]


def _one_game(run: Any, images: Any, ranks: int) -> tuple[Any, Any, int, int, list[str]]:
    """The game whose cost is counted, of the first label where each has one; rounds of all; what to say of them."""
    if not run.per_label:
        return run, images, ranks, run.rounds, []
    from paragan.train.per_label.jobs import jobs, rare, told
    from paragan.train.trainer import resolved

    found = jobs(run, images, Path())
    first, crew = found[0], run.per_label.team(0, ranks, len(found))
    workers = len({run.per_label.team(rank, ranks, len(found)) for rank in range(ranks)})
    lines = [
        f"{told(found)}; nothing is sent between them; {ranks} rank{'s' * (ranks != 1)}: "
        f"{workers} at a time, {len(crew)} rank{'s' * (len(crew) != 1)} each",
        rare(run.per_label, images),
        f"the first is {first.told()}",
    ]
    mine = images.of_class(first.label)
    rounds = sum(job.run.images // job.run.round for job in found)
    return resolved(first.run, mine), mine, len(crew), rounds, [line for line in lines if line]
