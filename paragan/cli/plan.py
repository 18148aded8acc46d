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
from paragan.cli.plan_large_scale import add_large_scale_options as add_crowd
from paragan.cli.plan_large_scale import check_large_scale_options
from paragan.cli.plan_tune import HELP as LAYOUT_HELP
from paragan.cli.plan_tune import add_tune_options as add_layout
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.report.number_format import format_duration

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.plan.links import Links
    from paragan.plan.profile.profile import Profile
    from paragan.plan.select.compare import Plan

HELP = f"""Every strategy is predicted for so many ranks on these links, from what one worker
was measured to do (--profile, or else here and now), and ranked by the time to K thousand images. Nothing is trained.

  paragan plan digits --hosts 4 --links "200 Mbit/s, 10 ms" --kimg 100
  paragan plan biggan-imagenet128 --hosts 16 --ranks-per-host 8 --links links.yaml --profile gpu.yaml --kimg 4000 --price 12
  paragan plan digits --hosts 8 --lanes 8 --links "20 Mbit/s, 40 ms" --strategies sync,sync+int4,gossip+topology=ring
  paragan plan digits --hosts 100000 --links "100/20 Mbit/s, 40 ms" --large-scale --churn 0.01

--links is a file (`paragan bench links --out links.yaml`, or by hand), or one line: rate, latency; down/up rates.
--profile is of the device that is to be rented: `paragan bench step RECIPE --out gpu.yaml` there makes one.
Any field of the run can be set: --nets.width=64. `paragan train --strategy auto` chooses in the same way.

{LAYOUT_HELP}"""


def add_plan_command(commands: Any) -> None:
    about = "tell which strategy pays on these links, what it costs, and what is faster here"
    p = add_command(commands, "plan", _plan, about, details=HELP)
    p.add_argument("recipe", metavar="RECIPE | RUN.yaml", help="a named recipe, or the record of a run")
    p.add_argument("--data", metavar="PATH", help="whatever `paragan train --data` takes")
    p.add_argument("--hosts", type=int, metavar="N", help="how many (as --links says, or 1)")
    p.add_argument("--ranks-per-host", type=int, metavar="N", help="ranks on each (as --links says, or 1)")
    p.add_argument("--links", metavar="F|LINE", help="what lies between hosts: a file, or '25 Gbit/s, 50 us'")
    p.add_argument("--batch", metavar="N|auto", help="total batch; auto: as the gradient's noise makes it pay")
    p.add_argument("--lanes", metavar="L", help="logical workers: as many ranks can take part")
    p.add_argument("--kimg", type=float, metavar="K", help="how long, in thousands of reals shown to D (the recipe's)")
    p.add_argument("--price", type=float, metavar="P", help="of a host for an hour")
    p.add_argument("--profile", metavar="F", help="of one worker, as `paragan bench step` wrote it (measured here)")
    p.add_argument("--memory", metavar="BYTES", help="of a rank: '40 GB' (as the profile's device has)")
    p.add_argument("--strategies", metavar="S,S+WIRE", help="these alone: sync,sync+int8,gossip+topology=ring")
    p.add_argument("--margin", type=float, metavar="X", help="by so much must be faster what gives most up (0.05)")
    add_crowd(p)
    p.add_argument("--json", metavar="F", help="also write the plan to this file")
    add_layout(p)


def _plan(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.plan_tune import print_tuning

    if options.tune:
        return print_tuning(options, rest)
    from paragan.cli.common import check_writable
    from paragan.plan.select.compare import format_bytes
    from paragan.train.prepare import prepare

    check_writable("--json", options.json)
    _check_options(options, rest)
    links = resolve_links(options.links, options.hosts, options.ranks_per_host)
    ranks = links.ranks
    run, batches = _build_run(options, rest)
    if options.large_scale:
        from paragan.cli.plan_large_scale import print_simulation

        return print_simulation(options, run, links)
    check_lanes(run, ranks)
    prepared = prepare(run)
    whole = prepared.run
    images = prepared.dataset
    profile, source = load_or_measure_profile(options.profile, whole, images)
    memory = parse_bytes(options.memory) if options.memory else memory_per_rank(profile, links.ranks_per_host)
    plan, device = _compare_candidates(options, whole, profile, links, memory, batches), profile.device
    line, threads = train_command(options, rest, plan, links, run), "thread" if device.threads == 1 else "threads"
    lines = [
        f"{run.recipe}, {f'{ranks} ranks: {links.describe()}' if ranks > 1 else 'one rank'}",
        f"one worker: {device.name}, {device.precision}, {device.threads} {threads} ({source})",
        f"to {plan.goal.kimg:g} kimg, batch {whole.batch}, {format_bytes(memory)} of memory a rank",
        "",
        *format_plan(plan),
        "",
        f"run: {line}",
        *_lr_note(run, plan),
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json:
        Path(options.json).write_text(_plan_to_json(plan, links, profile, line), "utf-8")
    return 0


# what is asked -----------------------------------------------------------------------------------------


def _check_options(options: argparse.Namespace, rest: list[str]) -> None:
    check_large_scale_options(options, rest)
    for name in ("kimg", "price", "margin", "hosts", "ranks_per_host"):
        value = getattr(options, name)
        if value is not None and not (0 < value < math.inf):
            works = {"kimg": "100", "price": "1.5", "margin": "0.05"}.get(name, "1")
            raise UsageError(f"--{name.replace('_', '-')} {value:g} must be above 0, as {works} is")


def _build_run(options: argparse.Namespace, rest: list[str]) -> tuple[Any, tuple[int, ...]]:
    """The run, and the batches that are compared, where that is left open."""
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else to_dict(get_recipe(options.recipe))
    data = {name: part for name, part in data.items() if name not in ("strategy", "auto_choice")}
    free = options.batch == "auto"
    fields = {"batch": None if free else options.batch, "lanes": options.lanes, "kimg": options.kimg}
    given = [(name, str(value)) for name, value in fields.items() if value is not None]
    given += [("data.path", json.dumps(options.data))] if options.data else []
    run = with_absolute_paths(build_run(data, [*given, *parse_settings(rest)])[0])
    validate(run)
    if free and run.ramp:
        raise UsageError("--batch auto looks for one batch, and --ramp has several: leave one of them out")
    return run, tuple(run.batch * 2**i for i in range(5)) if free else ()


def _compare_candidates(
    options: argparse.Namespace, run: Run, profile: Profile, links: Links, memory: int, batches: tuple[int, ...]
) -> Any:
    from paragan.plan.select.candidates import Candidate, default_candidates, parse_strategy
    from paragan.plan.select.compare import DEFAULT_MARGIN, Goal, compare_strategies

    if batches and not profile.noise_scale:
        raise UsageError("--batch auto goes by the gradient's noise, and the profile has none: give --batch N")
    goal = Goal(run.kimg, options.price, memory, options.margin or DEFAULT_MARGIN)
    compared = default_candidates(links.ranks, profile, run.batch)
    if options.strategies:
        compared = [Candidate(name, parse_strategy(name)) for name in options.strategies.split(",")]
        for one in compared:
            one.strategy.check(links.ranks)
    return compare_strategies(run, compared, profile, links, links.ranks, goal, batches=batches)


# what is told ------------------------------------------------------------------------------------------


def format_plan(plan: Plan) -> list[str]:
    """The rows, and what is to be said of them."""
    return [
        *format_plan_table(plan),
        "",
        *(f"{row.name}: {row.reason}" for row in plan.rows),
        *(f"left out: {name}: {reason}" for name, reason in plan.excluded),
        *(f"note: {warning}" for warning in plan.warnings),
    ]


def format_plan_table(plan: Plan) -> list[str]:
    several = len({row.batch for row in plan.rows}) > 1
    head = ["strategy", *["batch"] * several, "what one gets", "images/s", "time", "efficiency", "a round", "memory"]
    rows = [[*head, *["cost"] * (plan.goal.host_price_per_h is not None)]]
    for row in plan.rows:
        p = row.prediction
        cells = [
            row.name,
            *[str(row.batch)] * several,
            row.semantics + "*" * bool(row.limits),
            f"{p.images_per_s:,.0f}",
        ]
        cells += [
            format_duration(3600 * row.hours),
            f"{p.efficiency:.0%}",
            format_sent_bytes(p.sent_bytes),
            format_sent_bytes(p.memory_bytes),
        ]
        rows.append([*cells, *([] if row.cost is None else [f"{row.cost:,.2f}"])])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = 2 + several
    lines = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
    return [*lines, *["* learns less than the others: see below"] * any(row.limits for row in plan.rows)]


def format_sent_bytes(nbytes: float) -> str:
    from paragan.plan.select.compare import format_bytes

    return format_bytes(nbytes)


def train_command(options: argparse.Namespace, rest: list[str], plan: Plan, links: Links, run: Run) -> str:
    """What begins the first choice, to be given to a shell. run: as it was asked for; with another batch it takes more
    images, and G's batch grows as well."""
    words = ["train", options.recipe, *(["--data", options.data] if options.data else [])]
    first, batch, kimg = plan.best, str(plan.best.batch) if options.batch else None, options.kimg
    if first.batch != run.batch:
        kimg = round(first.kimg, 3)
        rest = [*rest, *([f"--g_batch={run.g_batch * first.batch // run.batch}"] if run.g_batch else [])]
    seed = str(options.seed) if options.seed else None
    for name, value in (("lanes", options.lanes), ("kimg", kimg), ("batch", batch), ("seed", seed)):
        words += (
            [] if value is None else [f"--{name}", format_exact_float(value) if isinstance(value, float) else value]
        )
    words += [*rest, *first.candidate.cli_options]
    if links.hosts == 1:
        words = ["paragan", *words, *(["--ranks", str(plan.ranks)] if plan.ranks > 1 else [])]
    else:
        launcher = ["torchrun", "--nnodes", str(links.hosts), "--nproc-per-node", str(links.ranks_per_host)]
        words = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST0:29500", "-m", "paragan", *words]
    return shlex.join(words)


def format_exact_float(value: float) -> str:
    """Short, and the same when it is read again."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _lr_note(run: Run, plan: Plan) -> list[str]:
    factor = plan.best.batch / run.batch
    if factor == 1:
        return []
    return [
        f"note: learning rates are the recipe's, for --batch {run.batch}: with {factor:g} times as many, usual is "
        f"{math.sqrt(factor):.3g} times as much for adaptive optimizers, and a warm-up"
    ]


def _plan_to_json(plan: Plan, links: Links, profile: Profile, line: str) -> str:
    from paragan.core.schema import to_dict

    rows = [
        {
            **{name: value for name, value in to_dict(row).items() if name != "candidate"},
            "options": row.candidate.cli_options,
        }
        for row in plan.rows
    ]
    about = {
        "ranks": plan.ranks,
        "goal": to_dict(plan.goal),
        "links": links.describe(),
        "device": to_dict(profile.device),
    }
    told = {"excluded": [list(one) for one in plan.excluded], "warnings": list(plan.warnings), "command": line}
    return json.dumps(about | {"rows": rows} | told, indent=1) + "\n"
