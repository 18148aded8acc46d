"""`paragan train -n`: print the resolved run and its cost, and train nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class CountedGame:
    """The game whose cost is estimated: that of the run, or of its first label."""

    run: Run
    dataset: Dataset
    ranks: int  # that train it together
    rounds: int  # of all games
    notes: list[str]


def dry_run(run: Run, ranks: int, reasons: list[str]) -> int:
    """Print the complete record of a run, with its cost as comments; train nothing."""
    from paragan.config.resolve import make_spec
    from paragan.config.run import to_saved_dict
    from paragan.config.validate import describe_unused_length
    from paragan.core.schema import to_yaml
    from paragan.train.prepare import prepare
    from paragan.train.session import check_init_from

    prepared = prepare(run, ranks)
    resolved = prepared.run
    dataset = prepared.dataset
    if not resolved.per_label:
        check_init_from(resolved, make_spec(resolved.data, dataset))
    game = _representative_game(resolved, dataset, ranks)
    try:
        cost_lines = _estimate_cost(game)
    except (RuntimeError, UsageError) as error:
        # User-defined networks whose forward pass depends on values, or a strategy that is not chosen yet.
        cost_lines = [f"the cost cannot be estimated: {str(error).strip().splitlines()[0]}"]
    comments = [*reasons, *dataset.describe().splitlines(), *game.notes, *describe_unused_length(resolved), *cost_lines]
    record = {name: value for name, value in to_saved_dict(resolved).items() if name != "reasons"}  # in the comments
    sys.stdout.write(to_yaml(record) + "\n" + "".join(f"# {line}\n" for line in comments))
    return 0


def _estimate_cost(game: CountedGame) -> list[str]:
    """Estimate the cost of all rounds, without that of a teacher, which would have to be loaded."""
    from paragan.core.devices import backend_of, pick_device
    from paragan.plan.cost import estimate_run_cost, format_bytes
    from paragan.plan.memory_advice import PeakEstimates, find_options, format_advice
    from paragan.plan.round_cost import blank_dataset, build_roles, estimate_round, largest_stage

    run = game.run
    largest = dataclasses.replace(largest_stage(run), distill_from="")
    mean_round = 1.0  # mean over rounds of their size, relative to the largest
    if run.ramp:
        mean_round = run.total_images / run.total_rounds / run.round_images * run.batch / largest.batch
    blank = blank_dataset(game.dataset)
    built, roles = build_roles(largest, blank, game.ranks)
    all_lanes = estimate_round(largest, blank)
    rank_lanes = max(len(role.share.lanes) for role in roles)
    peak_of = PeakEstimates(blank, rank_lanes, game.ranks)
    peak_bytes = all_lanes.peak_bytes if rank_lanes == run.lanes else peak_of(largest)
    cost = estimate_run_cost(
        built, roles, rounds=game.rounds, round_flops=mean_round * all_lanes.flops, peak_bytes=peak_bytes
    )
    lines = cost.to_lines()
    device = pick_device(run.device.kind)
    memory = backend_of(device).memory_bytes(device)
    if peak_bytes > memory:
        simple = dataclasses.replace(run, distill_from="")
        advice = format_advice(find_options(simple, peak_of, memory, lambda candidate: peak_of(candidate) <= memory))
        lines.append(f"that is more than the {format_bytes(memory)} of memory here. {advice}")
    return lines


def _representative_game(run: Run, dataset: Dataset, ranks: int) -> CountedGame:
    if not run.per_label:
        return CountedGame(run, dataset, ranks, run.total_rounds, [])
    from paragan.train.per_label.jobs import describe_jobs, describe_rare_labels, make_jobs
    from paragan.train.prepare import prepare

    jobs = make_jobs(run, dataset, Path())
    first = jobs[0]
    teams = [run.per_label.ranks_of_label(rank, ranks, len(jobs)) for rank in range(ranks)]
    team = teams[0]
    notes = [
        f"{describe_jobs(jobs)}; nothing is sent between them; {_count_ranks(ranks)}: "
        f"{len(set(teams))} games at a time, {_count_ranks(len(team))} each",
        describe_rare_labels(run.per_label, dataset),
        f"the first is {first.describe()}",
    ]
    first_dataset = dataset.only_class(first.label)
    rounds = sum(job.run.total_images // job.run.round_images for job in jobs)
    first_run = prepare(first.run, len(team), first_dataset).run
    return CountedGame(first_run, first_dataset, len(team), rounds, [line for line in notes if line])


def _count_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
