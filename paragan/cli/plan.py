"""`paragan plan RECIPE`: which strategy pays on these links, and what it costs."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, parse_settings, with_absolute_paths
from paragan.cli.plan_inputs import check_lanes, load_or_measure_profile, memory_per_rank, parse_bytes, resolve_links
from paragan.cli.plan_large_scale import add_large_scale_options, check_large_scale_options
from paragan.cli.plan_tune import HELP as TUNE_HELP
from paragan.cli.plan_tune import add_tune_options
from paragan.core.errors import UsageError
from paragan.report.number_format import format_duration

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.plan.links import Links
    from paragan.plan.profile.profile import Profile
    from paragan.plan.select.candidates import Candidate
    from paragan.plan.select.compare import Plan

TABLE_HEAD = (
    "strategy",
    "batch",
    "semantics",
    "images/s",
    "images needed",
    "time",
    "efficiency",
    "sent",
    "memory",
    "cost",
)
HELP = f"""Every strategy is predicted for the ranks and links that you name, from the profile of one worker (--profile,
or measured now), and ranked by the time to the score that an exact strategy has after K thousand images. Nothing is
trained.

  paragan plan digits --hosts 4 --links "200 Mbit/s, 10 ms" --kimg 100
  paragan plan biggan-imagenet128 --hosts 16 --ranks-per-host 8 --links links.yaml --profile gpu.yaml --kimg 4000
  paragan plan digits --hosts 8 --lanes 8 --links "20 Mbit/s, 40 ms" --strategies sync,sync+int4,gossip+topology=ring
  paragan plan digits --hosts 100000 --links "100/20 Mbit/s, 40 ms" --large-scale --churn 0.01

--links is a file (`paragan bench links --out links.yaml`, or written by hand), or one line: rate, latency; two rates
are download/upload. --profile is of the device that you plan for: make it there with `paragan bench step RECIPE --out
gpu.yaml`. Any field of the run can be set: --nets.width=64. `paragan train --strategy auto` chooses in the same way.

{TUNE_HELP}"""


def add_plan_command(commands: Any) -> None:
    """Add `paragan plan`."""
    summary = "predict which strategy is fastest on these links, what it costs, and what is faster here"
    p = add_command(commands, "plan", _plan, summary, details=HELP)
    p.add_argument("recipe", metavar="RECIPE | RUN.yaml", help="a named recipe, or the run.yaml of a run")
    p.add_argument("--data", metavar="PATH", help="as for `paragan train --data`")
    p.add_argument("--hosts", type=int, metavar="N", help="number of hosts (that of --links, or 1)")
    p.add_argument("--ranks-per-host", type=int, metavar="N", help="ranks on each host (those of --links, or 1)")
    p.add_argument("--links", metavar="F|LINE", help="links between hosts: a file, or '25 Gbit/s, 50 us'")
    p.add_argument("--batch", metavar="N|auto", help="total batch; auto: chosen by the gradient noise scale")
    p.add_argument("--lanes", metavar="L", help="virtual data-parallel ranks: the largest number of ranks")
    p.add_argument("--kimg", type=float, metavar="K", help="thousands of real images shown to D (the recipe's)")
    p.add_argument("--price", type=float, metavar="P", help="of a host per hour")
    p.add_argument("--profile", metavar="F", help="profile of one worker from `paragan bench step` (measured here)")
    p.add_argument("--memory", metavar="BYTES", help="of a rank: '40 GB' (that of the profile's device)")
    p.add_argument("--strategies", metavar="S,S+WIRE", help="compare only these: sync,sync+int8,gossip+topology=ring")
    p.add_argument(
        "--margin", type=float, metavar="X", help="by which a strategy that is not equivalent must be faster (0.05)"
    )
    add_large_scale_options(p)
    p.add_argument("--json", metavar="F", help="also write the plan to this file")
    add_tune_options(p)


def _plan(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.plan_tune import print_tuning

    if options.tune:
        return print_tuning(options, rest)
    from paragan.cli.common import check_writable
    from paragan.plan.cost import format_bytes
    from paragan.plan.select.candidates import default_candidates
    from paragan.plan.select.compare import DEFAULT_MARGIN, Goal, compare_strategies
    from paragan.train.prepare import prepare

    check_writable("--json", options.json)
    _check_options(options, rest)
    links = resolve_links(options.links, options.hosts, options.ranks_per_host)
    ranks = links.ranks
    run, batches = _build_run(options, rest)
    memory_limit = parse_bytes(options.memory) if options.memory else 0
    if options.large_scale:
        from paragan.cli.plan_large_scale import print_simulation

        return print_simulation(options, run, links)
    check_lanes(run, ranks)
    strategies = _parse_strategies(options.strategies, ranks)
    prepared = prepare(run)
    resolved = prepared.run
    images = prepared.dataset
    profile, source = load_or_measure_profile(options.profile, resolved, images)
    memory = memory_limit or memory_per_rank(profile, links.ranks_per_host)
    if batches and not profile.noise_scale:
        raise UsageError("--batch auto: the profile has no noise scale. Use --batch N, or another profile")
    goal = Goal(resolved.kimg, options.price, memory, options.margin or DEFAULT_MARGIN)
    candidates = strategies or default_candidates(ranks, profile, resolved.batch)
    plan = compare_strategies(resolved, candidates, profile, links, ranks, goal, batches=batches)
    command = train_command(options, rest, plan, links, run)
    device = profile.device
    threads = "1 thread" if device.threads == 1 else f"{device.threads} threads"
    lines = [
        f"{run.recipe}, {f'{ranks} ranks: {links.describe()}' if ranks > 1 else 'one rank'}",
        f"one worker: {device.name}, {device.precision}, {threads} ({source})",
        f"to {plan.goal.kimg:g} kimg, batch {resolved.batch}, {format_bytes(memory)} of memory per rank",
        "",
        *format_plan(plan),
        "",
        f"run: {command}",
        *_lr_note(run.batch, plan),
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json:
        Path(options.json).write_text(_plan_to_json(plan, links, profile, command), "utf-8")
    return 0


# Options ------------------------------------------------------------------------------------------------


def _check_options(options: argparse.Namespace, rest: list[str]) -> None:
    check_large_scale_options(options, rest)
    examples = {"kimg": "100", "price": "1.5", "margin": "0.05", "hosts": "1", "ranks_per_host": "1"}
    for name, example in examples.items():
        value = getattr(options, name)
        if value is not None and not (0 < value < math.inf):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: it must be above 0. Use {example}")


def _build_run(options: argparse.Namespace, rest: list[str]) -> tuple[Run, tuple[int, ...]]:
    """Return the run, and the batches to compare if --batch is auto."""
    from paragan.config.validate import validate
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else to_dict(get_recipe(options.recipe))
    data = {name: value for name, value in data.items() if name not in ("strategy", "auto_choice")}
    is_auto = options.batch == "auto"
    fields = {"batch": None if is_auto else options.batch, "lanes": options.lanes, "kimg": options.kimg}
    settings = [(name, str(value)) for name, value in fields.items() if value is not None]
    if options.data:
        settings.append(("data.path", json.dumps(options.data)))
    run = with_absolute_paths(build_run(data, [*settings, *parse_settings(rest)])[0])
    validate(run)
    if not is_auto:
        return run, ()
    if run.ramp:
        raise UsageError("--batch auto: chooses one batch, and --ramp has several. Leave one of them out")
    return run, tuple(run.batch * 2**i for i in range(5))


def _parse_strategies(text: str | None, ranks: int) -> list[Candidate]:
    """Return the strategies to compare; none: those that suit the links."""
    from paragan.plan.select.candidates import Candidate, parse_strategy

    candidates = [Candidate(name, parse_strategy(name)) for name in text.split(",")] if text else []
    for candidate in candidates:
        candidate.strategy.check(ranks)
    return candidates


# Output -------------------------------------------------------------------------------------------------


def format_plan(plan: Plan) -> list[str]:
    """Format the table, the reasons and the warnings of a plan."""
    has_batches = len({row.batch for row in plan.rows}) > 1
    return [
        *format_plan_table(plan),
        "",
        *(f"{row.name}{f', batch {row.batch}' if has_batches else ''}: {row.reason}" for row in plan.rows),
        *(f"excluded: {name}: {reason}" for name, reason in plan.excluded),
        *(f"note: {warning}" for warning in plan.warnings),
    ]


def format_plan_table(plan: Plan) -> list[str]:
    """Format the rows of a plan."""
    from paragan.plan.cost import format_bytes

    has_batches = len({row.batch for row in plan.rows}) > 1
    has_cost = plan.goal.host_price_per_h is not None
    head: list[str] = list(TABLE_HEAD)
    rows = [head]
    for row in plan.rows:
        prediction = row.prediction
        cells = [
            row.name,
            str(row.batch),
            f"{row.semantics}*" if row.limits else row.semantics,
            f"{prediction.images_per_s:,.0f}",
            f"{row.kimg / plan.goal.kimg:.2f}x",
            format_duration(3600 * row.hours),
            f"{prediction.efficiency:.0%}",
            format_bytes(prediction.sent_bytes),
            format_bytes(prediction.memory_bytes),
            "" if row.cost is None else f"{row.cost:,.2f}",
        ]
        rows.append(cells)
    columns = [i for i, name in enumerate(head) if (name != "batch" or has_batches) and (name != "cost" or has_cost)]
    lines: list[str] = []
    for row in rows:
        cells = []
        for i in columns:
            width = max(len(other[i]) for other in rows)
            is_text = head[i] in ("strategy", "batch", "semantics")
            cells.append(row[i].ljust(width) if is_text else row[i].rjust(width))
        lines.append("  ".join(cells).rstrip())
    if any(row.limits for row in plan.rows):
        lines.append("* may converge worse than was measured: see below")
    return lines


def train_command(options: argparse.Namespace, rest: list[str], plan: Plan, links: Links, run: Run) -> str:
    """Return the shell command that trains with the best row of a plan.

    It trains for as many images as this batch and this strategy need. With another batch than that of `run`, G's batch
    grows in proportion.
    """
    words = ["train", options.recipe]
    if options.data:
        words += ["--data", options.data]
    best = plan.best
    kimg = options.kimg
    if best.kimg != plan.goal.kimg:
        kimg = round(best.kimg, 3)
    if best.batch != run.batch and run.g_batch:
        rest = [*rest, f"--g_batch={run.g_batch * best.batch // run.batch}"]
    if options.lanes is not None:
        words += ["--lanes", options.lanes]
    if kimg is not None:
        words += ["--kimg", format_exact_float(kimg)]
    if options.batch:
        words += ["--batch", str(best.batch)]
    if options.seed:
        words += ["--seed", str(options.seed)]
    words += [*rest, *best.candidate.cli_options]
    if links.hosts == 1:
        words = ["paragan", *words]
        if plan.ranks > 1:
            words += ["--ranks", str(plan.ranks)]
    else:
        launcher = ["torchrun", "--nnodes", str(links.hosts), "--nproc-per-node", str(links.ranks_per_host)]
        words = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST0:29500", "-m", "paragan", *words]
    return shlex.join(words)


def format_exact_float(value: float) -> str:
    """Format a number shortly, but so that it is the same when parsed."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _lr_note(batch: int, plan: Plan) -> list[str]:
    factor = plan.best.batch / batch
    if factor == 1:
        return []
    return [
        f"note: learning rates are the recipe's, for --batch {batch}. With {factor:g} times the batch, "
        f"{math.sqrt(factor):.3g} times the rate is usual for adaptive optimizers, with a warm-up"
    ]


def _plan_to_json(plan: Plan, links: Links, profile: Profile, command: str) -> str:
    from paragan.core.schema import to_dict

    rows: list[dict[str, Any]] = []
    for row in plan.rows:
        fields = {name: value for name, value in to_dict(row).items() if name != "candidate"}
        del fields["prediction"]["explain"]
        fields["prediction"]["breakdown_s"] = to_dict(row.prediction.breakdown_s)
        rows.append({**fields, "options": row.candidate.cli_options})
    record = {
        "ranks": plan.ranks,
        "goal": to_dict(plan.goal),
        "links": links.describe(),
        "device": to_dict(profile.device),
        "rows": rows,
        "excluded": [list(entry) for entry in plan.excluded],
        "warnings": list(plan.warnings),
        "command": command,
    }
    return json.dumps(record, indent=1) + "\n"
