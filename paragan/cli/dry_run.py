"""`paragan train -n`: the resolved run, and what it would cost."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError
from paragan.plan.round_cost import blank_dataset, build_tested_networks, estimate_round

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.data.dataset import Dataset


def dry_run(run: Run, ranks: int, reasons: list[str]) -> int:
    """Print the complete record of a run, with its cost as comments; train nothing."""
    from paragan.config.run import to_saved_dict
    from paragan.config.validate import describe_unreached_stages
    from paragan.core.schema import to_yaml
    from paragan.train.prepare import prepare

    prepared = prepare(run, ranks)
    whole_run = prepared.run
    whole = prepared.dataset
    run, images, ranks, rounds, told = _representative_game(whole_run, whole, ranks)
    try:
        counted = _estimate_cost(run, images, ranks, rounds)
    except (RuntimeError, UsageError) as error:  # networks of the user's own that ask for numbers; a strategy left open
        counted = [f"what it costs cannot be foreseen: {str(error).strip().splitlines()[0]}"]
    late = [line for line in [describe_unreached_stages(whole_run)] if line]
    comments = [*reasons, *whole.describe().splitlines(), *told, *late, *counted]
    record = {name: part for name, part in to_saved_dict(whole_run).items() if name != "reasons"}  # said below
    sys.stdout.write(to_yaml(record) + "\n" + "".join(f"# {line}\n" for line in comments))
    return 0


def _estimate_cost(run: Run, dataset: Dataset, ranks: int, rounds: int) -> list[str]:
    """What so many rounds cost, a line each; without what a teacher makes, which has to be loaded."""
    from paragan.config.run import with_lanes
    from paragan.core.devices import backend_of, pick_device
    from paragan.plan.cost import estimate_run_cost, format_bytes
    from paragan.plan.memory import fake_tensor_mode
    from paragan.plan.virtual_world import VirtualWorld
    from paragan.train.build import build_game

    largest = max(batch for start, batch in run.stages if start < max(run.total_images, 1))
    mean = (
        run.total_images / run.total_rounds / run.round_images * run.batch / largest if run.ramp else 1.0
    )  # round, of the largest
    run = dataclasses.replace(run, distill_from="", ramp=(), batch=largest, g_batch=run.g_batch * largest // run.batch)
    blank = blank_dataset(dataset)
    world = VirtualWorld(ranks)
    with fake_tensor_mode():
        game = build_game(run, build_tested_networks(run, blank, world), blank, world.device)
        roles = [run.strategy.role(game, world, run.lanes)]
        if roles[0].is_split:
            g = roles[0].owner_ranks[1]
            divided = dataclasses.replace(run.strategy, split=f"{g}:{ranks - g}")
            roles.append(divided.role(game, VirtualWorld(ranks, g), run.lanes))
    everything = estimate_round(run, blank)
    mine = max(len(role.share.lanes) for role in roles)
    part = everything if mine == run.lanes else estimate_round(with_lanes(run, mine), blank)
    lines = estimate_run_cost(
        game, roles, rounds=rounds, round_flops=mean * everything.flops, peak_bytes=part.peak_bytes
    ).to_lines()
    kind = backend_of(device := pick_device(run.device.kind))
    if not kind.is_available() or part.peak_bytes <= kind.memory_bytes(device):
        return lines
    less = "" if run.device.lanes_per_pass == 1 else "; --device.lanes_per_pass=1 takes less"
    return [*lines, f"that is more than the {format_bytes(kind.memory_bytes(device))} of memory here{less}"]


def _representative_game(run: Run, dataset: Dataset, ranks: int) -> tuple[Any, Any, int, int, list[str]]:
    """The game whose cost is counted, of the first label where each has one; rounds of all; what to say of them."""
    if not run.per_label:
        return run, dataset, ranks, run.total_rounds, []
    from paragan.train.per_label.jobs import describe_jobs, describe_rare_labels, make_jobs
    from paragan.train.prepare import prepare

    found = make_jobs(run, dataset, Path())
    first, crew = found[0], run.per_label.ranks_of_label(0, ranks, len(found))
    workers = len({run.per_label.ranks_of_label(rank, ranks, len(found)) for rank in range(ranks)})
    lines = [
        f"{describe_jobs(found)}; nothing is sent between them; {ranks} rank{'s' * (ranks != 1)}: "
        f"{workers} at a time, {len(crew)} rank{'s' * (len(crew) != 1)} each",
        describe_rare_labels(run.per_label, dataset),
        f"the first is {first.describe()}",
    ]
    mine = dataset.only_class(first.label)
    rounds = sum(job.run.total_images // job.run.round_images for job in found)
    return prepare(first.run, len(crew), mine).run, mine, len(crew), rounds, [line for line in lines if line]
