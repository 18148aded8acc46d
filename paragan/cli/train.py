"""TODO: docstring of paragan/cli/train.py"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, parse_settings, run_in_world, with_absolute_paths, without_ranks_option
from paragan.config.validate import validate
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.world import LaunchInfo, World
    from paragan.config.run import Run
    from paragan.train.console import RunConsole
    from paragan.train.run_dir import RunDirRequest
    from paragan.train.trainer import TrainJob

EXAMPLES = """examples:
  paragan train digits                                   a first GAN, in about a minute
  paragan train folder --data photos/ --kimg 500         your own images (a folder, .npz, .zip, .h5, tars, ...)
  paragan train digits --ranks 2                         the same training on two processes
  torchrun --nproc-per-node 4 -m paragan train digits    ... under any launcher, on any number of hosts
  paragan train digits --strategy per-label --ranks 2    a game for every label, no communication; see `paragan status`
  paragan train digits --batch 1024 --batch-scaling rates         the recipe's settings, carried to another batch
  paragan train digits --policy paragan                  AdaBelief for G, Adam for D: settings of a paper
  paragan train digits --g.optimizer.lr=5e-4 -n          change any field; -n only shows the run and its cost
  paragan merge runs/00000-*                             one generator of those of --strategy per-label
  paragan data inspect photos/                           what a set is, and what is wrong with it
  paragan sample runs/00000-* --labels 3,7 --out grid.png
  paragan report runs/00000-* runs/00001-*               one page about both, side by side
"""


TRAIN_HELP = """The same command again goes on where it stopped. Any field of the run can be set: --some.field=value.
--policy ttur, biggan, sngan, paragan or optimistic replaces the recipe's g, d and d_steps by those of a paper; wcgan,
wcgan-gp and dcgan its objective too, and the norm of D. What you set yourself comes after: --policy paragan
--g.optimizer.lr=1e-3. --batch-scaling rates carries the settings that a recipe has for its own batch to --batch: learning rates
by g.lr_scaling and d.lr_scaling (sqrt, linear, none), warm-up, half-life of the average; --batch-scaling all the weights of R1 and R2 too.
-n shows the values and where they are from.
"""


# shorthand -> the field it sets
SHORTHANDS = {
    "strategy": "strategy",
    "batch": "batch",
    "lanes": "lanes",
    "kimg": "kimg",
    "seed": "seed",
    "on_divergence": "on_divergence",
    "mirror": "data.mirror",
}


STRING_SHORTHANDS = {"data": "data.path", "init_from": "init_from", "ramp": "ramp"}  # `--data 2024` is a folder


def add_train_command(commands: Any) -> None:
    p = add_command(commands, "train", _train, "train a recipe, or go on with it", more=TRAIN_HELP, epilog=EXAMPLES)
    p.add_argument("recipe", nargs="?", metavar="RECIPE | RUN.yaml", help="a named recipe, or the record of a run")
    p.add_argument(
        "--data",
        metavar="PATH",
        help="digits, a folder (PATH/<class>/*.png or PATH/*.png), an .npz, .zip, .h5, tar shards, or an address",
    )
    p.add_argument("--strategy", metavar="S", help="how ranks work together (sync); auto: what is fastest here")
    p.add_argument("--policy", default="none", metavar="P", help="how G and D learn, as in a paper (see above)")
    p.add_argument("--batch", metavar="N", help="total batch, over all ranks")
    p.add_argument(
        "--batch-scaling", default="none", metavar="rates|all", help="carry the recipe's settings to --batch (above)"
    )
    p.add_argument("--ramp", metavar="K:N,K:N", help="let the batch grow: from K kimg on it is N")
    p.add_argument("--lanes", metavar="L", help="logical workers that share the batch: as many ranks can take part")
    p.add_argument("--kimg", metavar="K", help="how long, in thousands of real images shown to D")
    p.add_argument("--seed", metavar="N")
    p.add_argument(
        "--on-divergence", metavar="rollback", help="go back to the last good checkpoint where the run falls ill"
    )
    p.add_argument("--mirror", action="store_const", const="true", help="also train on flipped images")
    p.add_argument("--init-from", metavar="MODEL", help="start from the model of another run")
    p.add_argument("--outdir", default="runs", metavar="DIR", help="where numbered run folders are made (runs)")
    p.add_argument("--run-dir", metavar="DIR", help="this very folder instead")
    p.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="PATH: a run folder to go on with")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")
    p.add_argument("--fields", action="store_true", help="list every field that can be set, with its default")


def _train(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.shutdown import exit_on_signal

    if options.fields:
        return _print_fields()
    if options.recipe is None:
        raise UsageError("which recipe? `paragan recipes` lists them; `paragan train digits` needs nothing else")
    with exit_on_signal():
        return _train_run(options, rest, arguments)


def _train_run(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    return train_on_ranks(options, arguments, *resolve_run(options, rest))


def train_on_ranks(
    options: argparse.Namespace,
    arguments: list[str],
    run: Run,
    request: RunDirRequest,
    reasons: list[str],
    on_finish: Any = None,
) -> int:
    """Train, on as many ranks as are asked for. at_end: what they do then with run, folder, world and screen."""
    from paragan.comm.world import LaunchInfo

    place = LaunchInfo.from_environment()
    launched = place.size > 1 or "RANK" in os.environ
    ranks = place.size if options.ranks is None else options.ranks
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} must be 1 or more")
    if launched and ranks != place.size:
        raise UsageError(f"--ranks {ranks} where a launcher started {place.size}: leave --ranks out")
    validate(run, ranks)
    if options.dry_run:
        from paragan.cli.dry_run import dry_run

        return dry_run(run, ranks, reasons)
    if ranks > 1 and not launched:
        from paragan.train.local_launcher import launch

        return launch(
            ranks,
            without_ranks_option(arguments),
            tolerate_lost_ranks=run.strategy.survives_rank_loss or bool(run.per_label),
        )
    if run.per_label:
        return _train_per_label(run, place, request, reasons)
    from paragan.plan.select.choose import decide_strategy
    from paragan.plan.tune.layout_tuner import decide_layout
    from paragan.train.trainer import TrainJob

    training = TrainJob(run, place, request, decide_layout if run.device.tune == "measured" else decide_strategy)

    def train_in_world(world: World, console: RunConsole) -> None:
        folder = _train_and_report(training, world, console, reasons)
        if on_finish:
            on_finish(run, folder, world, console)

    return run_in_world(run, place, train_in_world, training.join_world)


def resolve_run(options: argparse.Namespace, rest: list[str]) -> tuple[Any, Any, list[str]]:
    """The run and the folder a train command asks for, and why it is as it is."""
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe
    from paragan.train.run_dir import RunDirRequest, require_run_dir

    given = [(field, value) for name, field in SHORTHANDS.items() if (value := getattr(options, name)) is not None]
    given += [
        (field, json.dumps(value)) for name, field in STRING_SHORTHANDS.items() if (value := getattr(options, name))
    ]
    name, run_dir = options.recipe, options.run_dir and Path(options.run_dir)
    is_file = Path(name).suffix in (".yaml", ".yml")
    data = read_yaml(Path(name)) if is_file else to_dict(get_recipe(name))
    given += parse_settings(rest)
    if any(field.partition(".")[0] == "strategy" for field, _ in given):
        data = {**data, "auto_choice": {}}  # not for this one
    run, reasons = build_run(data, given, options.policy, options.batch_scaling)
    if options.resume not in ("auto", "never"):
        if run_dir:
            raise UsageError("--resume PATH and --run-dir name two folders: give one of them")
        try:
            run_dir = require_run_dir(Path(options.resume))
        except UsageError as error:  # it may be there for other ranks
            raise UsageError(str(error), same_on_all_ranks=False) from error
    return with_absolute_paths(run), RunDirRequest(Path(options.outdir), run_dir, options.resume), reasons


def _train_per_label(run: Run, launch_info: LaunchInfo, request: RunDirRequest, reasons: list[str]) -> int:
    from paragan.core.devices import pick_device
    from paragan.train.console import RunConsole
    from paragan.train.per_label.launch_workers import train_per_label

    folder = train_per_label(run, launch_info, pick_device(run.device.kind, launch_info.local_rank), request, reasons)
    if launch_info.rank == 0:
        _print_done(folder, RunConsole())
    return 0


def _train_and_report(job: TrainJob, world: World, console: RunConsole, reasons: list[str]) -> Path:
    for line in reasons:
        console.print(line)
    folder = job.train(world, console)
    if world.is_main:
        _print_done(folder, console)
    return folder


def _print_done(folder: Path, console: RunConsole) -> None:
    from paragan.core.jsonl import format_scores, is_number, read_jsonl

    measured, stats = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "stats.jsonl")
    spent = sum(row.get("Timing/eval_s", 0.0) for row in stats)
    took = f" (scores took {spent:.3g} s)" if spent else ""
    scores, at = format_scores(measured), measured[-1].get("kimg") if measured else None
    if scores and stats and is_number(at) and at != stats[-1].get("Progress/kimg"):
        scores += f", which are of {at:g} kimg"
    console.print(f"done{': ' * bool(scores)}{scores}{took}; look at {folder}/report.html")


def _print_fields() -> int:
    from paragan.config.run import Run
    from paragan.core.schema import list_fields

    for name, kind, default in list_fields(Run, skip_repeats=True):
        sys.stdout.write(f"--{name:<36} {kind}{f'  [{default}]' if default else ''}\n")
    sys.stdout.write(
        "\ng.optimizer and d.optimizer are also those of the pytorch-optimizer library: adabelief, lamb, lion, ...\n"
        "Their arguments are fields: --g.optimizer=adabelief --g.optimizer.eps=1e-12; `-n` shows them all.\n"
    )
    return 0
