"""`paragan train` and `paragan recipes`; `paragan merge` uses `train_on_ranks` too.

A command line becomes a run in `resolve_run`: the recipe or run.yaml, then --policy or --batch-scaling, then the fields
that the user sets. `train_on_ranks` trains it: as one rank, as a rank of a launcher, or by starting the ranks itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import (
    add_command,
    check_no_extra_arguments,
    count_ranks,
    is_launched,
    local_folder,
    parse_settings,
    read_run_file_or_recipe,
    run_in_world,
    with_absolute_paths,
    without_ranks_option,
)
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.launch_info import LaunchInfo
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.train.console import RunConsole
    from paragan.train.run_dir_selection import RunDirRequest
    from paragan.train.trainer import ExplainFn

RECIPE_LIST = Path(__file__).parents[1] / "recipes" / "recipes.txt"  # so that it is listed without importing torch
EXAMPLES = """examples:
  paragan train digits                                   a first GAN, in about a minute
  paragan train folder --data photos/ --kimg 500         your own images (a folder, .npz, .zip, .h5, tars, ...)
  paragan train digits --ranks 2                         the same training on two processes
  torchrun --nproc-per-node 4 -m paragan train digits    ... under any launcher, on any number of hosts
  paragan train digits --strategy per-label --ranks 2    a GAN for each label, no communication; see `paragan status`
  paragan train digits --batch 1024 --batch-scaling rates    the recipe's settings, scaled to another batch
  paragan train digits --policy paragan                  the settings of a paper: AdaBelief for G, Adam for D
  paragan train digits --g.optimizer.lr=5e-4 -n          change any field; -n only shows the run and its cost
  paragan merge runs/00000-*                             distil a run of --strategy per-label into one generator
  paragan data inspect photos/                           what a data set contains, and what is wrong with it
  paragan sample runs/00000-* --labels 3,7 --out grid.png
  paragan report runs/00000-* runs/00001-*               one page that compares two runs
"""

TRAIN_HELP = """The same command again resumes the run.

Any field of the run can be set: --some.field=value, such as --nets.width=64. `paragan train --fields` lists all fields
with their meanings. The groups are data, nets, objective, g and d (optimizers), ema, strategy, evaluation, output,
health, on_divergence and device.

--policy replaces the recipe's g, d and d_steps by the settings of a paper: ttur, biggan, sngan, paragan or optimistic;
wcgan, wcgan-gp, dcgan, dposg and dqgan also replace the objective and the norm of D. Fields on the command line
override the policy: --policy paragan --g.optimizer.lr=1e-3.

--batch-scaling rates scales the recipe's settings to --batch: the learning rates as g.lr_scaling and d.lr_scaling say
(sqrt, linear, none), the warm-up and the half-life of the average. --batch-scaling all also scales the weights of R1
and R2. -n shows the values and the reasons.
"""

# option -> the field that it sets
SHORTHANDS = {
    "strategy": "strategy",
    "batch": "batch",
    "lanes": "lanes",
    "kimg": "kimg",
    "seed": "seed",
    "on_divergence": "on_divergence",
    "mirror": "data.mirror",
}
# ... as a string, whatever it looks like: `--data 2024` is a folder
STRING_SHORTHANDS = {"data": "data.path", "init_from": "init_from", "teacher": "distill_from", "ramp": "ramp"}


def add_train_command(commands: Any) -> None:
    p = add_command(commands, "train", _train, "train a recipe, or resume a run", details=TRAIN_HELP, epilog=EXAMPLES)
    p.add_argument("recipe", nargs="?", metavar="RECIPE | RUN.yaml", help="a named recipe, or the run.yaml of a run")
    p.add_argument(
        "--data",
        metavar="PATH",
        help="digits, a folder (PATH/<class>/*.png or PATH/*.png), an .npz, .zip, .h5, tar shards, or a URL",
    )
    p.add_argument("--strategy", metavar="S", help="how ranks cooperate (sync); auto: the fastest on this machine")
    p.add_argument("--policy", default="none", metavar="P", help="optimizer settings of a paper (see above)")
    p.add_argument("--batch", metavar="N", help="images per step, over all ranks")
    p.add_argument(
        "--batch-scaling",
        default="none",
        metavar="rates|all",
        help="scale the recipe's settings to --batch (see above)",
    )
    p.add_argument("--ramp", metavar="K:N,K:N", help="let the batch grow: N images from K kimg on")
    p.add_argument("--lanes", metavar="L", help="virtual data-parallel ranks that share the batch; limits --ranks")
    p.add_argument("--kimg", metavar="K", help="length of the run, in thousands of real images shown to D")
    p.add_argument("--seed", metavar="N", help="of all random numbers (0)")
    p.add_argument(
        "--on-divergence", metavar="rollback", help="go back to the last good checkpoint when training diverges"
    )
    p.add_argument("--mirror", action="store_const", const="true", help="also train on flipped images")
    p.add_argument("--init-from", metavar="MODEL", help="start from the model of another run")
    p.add_argument("--teacher", metavar="MODEL", help="of the recipe distill: a diffusion model, or diffusers pipeline")
    p.add_argument("--outdir", default="runs", metavar="DIR", help="where to create numbered run folders (runs)")
    p.add_argument("--run-dir", metavar="DIR", help="use exactly this run folder; or s3://bucket/run, gs://, az://")
    p.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="PATH: the run folder to resume (auto)")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")
    p.add_argument("--fields", action="store_true", help="list every field: meaning, type and default")


def _train(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.shutdown import exit_on_signal

    if options.fields:
        return _print_fields()
    if options.recipe is None:
        example = f"folder --data {options.data}" if options.data else "digits"
        raise UsageError(f"train: which recipe? Use `paragan train {example}`, or see `paragan recipes`")
    with exit_on_signal():
        run, request, reasons = resolve_run(options, rest)
        return train_on_ranks(options, arguments, run, request, reasons)


def resolve_run(options: argparse.Namespace, rest: list[str]) -> tuple[Run, RunDirRequest, list[str]]:
    """Return the run that a `train` command asks for, its run folder, and the reasons for chosen settings."""
    from paragan.data.storage.object_folder import is_object_address
    from paragan.recipes import build_run
    from paragan.train.run_dir import require_run_dir
    from paragan.train.run_dir_selection import RunDirRequest

    overrides: list[tuple[str, str]] = []
    for name, field in SHORTHANDS.items():
        if (value := getattr(options, name)) is not None:
            overrides.append((field, value))
    if options.init_from:
        options.init_from = local_folder(options.init_from)
    for name, field in STRING_SHORTHANDS.items():
        if value := getattr(options, name):
            overrides.append((field, json.dumps(value)))
    overrides += parse_settings(rest)
    base = read_run_file_or_recipe(options.recipe)
    if any(field.partition(".")[0] == "strategy" for field, _ in overrides):
        base = {**base, "auto_choice": {}}  # it was about another strategy
    run, reasons = build_run(base, overrides, options.policy, options.batch_scaling)
    run_dir, address = parse_run_dir(options.run_dir, "--run-dir")
    if is_object_address(options.outdir):
        raise UsageError(
            f"--outdir {options.outdir}: numbered folders are of this machine. Use --run-dir s3://bucket/NAME"
        )
    if address and run.per_label:
        raise UsageError(
            f"--run-dir {address}: workers of --strategy per-label share a folder. Use one on a shared disk"
        )
    if options.resume not in ("auto", "never"):
        if run_dir:
            raise UsageError("--resume PATH: --run-dir names a run folder too. Use one of them")
        run_dir, address = parse_run_dir(options.resume, "--resume")
        try:
            run_dir = run_dir if address else require_run_dir(Path(options.resume))
        except UsageError as error:  # other ranks may see it
            raise UsageError(str(error), same_on_all_ranks=False) from error
    if address and run.strategy.replays_broken_rounds:
        raise UsageError(
            f"--run-dir {address}: ranks that come and go share a folder. Use one on a shared disk, or "
            "--strategy.peer_timeout_s=0"
        )
    return with_absolute_paths(run), RunDirRequest(Path(options.outdir), run_dir, options.resume, address), reasons


def parse_run_dir(location: str | None, field: str) -> tuple[Path | None, str]:
    """Return the run folder that an option names, and its address if it lies in an object store."""
    from paragan.data.storage.object_folder import ObjectFolder, is_object_address

    if location and not is_object_address(location) and re.match(r"[a-z][a-z0-9+.-]+:/", location):
        raise UsageError(f"{field} {location}: is neither a folder nor in an object store. Use s3://, gs:// or az://")
    if not location or not is_object_address(location):
        return (Path(location) if location else None), ""
    folder = ObjectFolder(location, field)
    if folder.address.count("/") < 3:
        raise UsageError(f"{field} {location}: is a whole bucket. Use {folder.address}/NAME")
    return folder.local_copy("runs"), folder.address


def train_on_ranks(
    options: argparse.Namespace,
    arguments: list[str],
    run: Run,
    request: RunDirRequest,
    reasons: list[str],
    on_finish: Callable[[Run, Path, World, RunConsole], None] | None = None,
) -> int:
    """Train a run on as many ranks as the launcher or --ranks says. Returns the exit status.

    Args:
        options: with `ranks` and `dry_run`.
        arguments: the whole command line, for the processes that --ranks starts.
        reasons: printed before training.
        on_finish: called on every rank after training with run, run folder, world and console.
    """
    from paragan.comm.launch_info import LaunchInfo
    from paragan.config.validate import validate

    launch_info = LaunchInfo.from_environment()
    ranks = count_ranks(options.ranks, launch_info)
    validate(run, ranks)
    if options.dry_run:
        from paragan.cli.dry_run import dry_run

        return dry_run(run, ranks, reasons)
    if ranks > 1 and not is_launched(launch_info):
        from paragan.train.local_launcher import launch

        tolerate_lost_ranks = run.strategy.survives_rank_loss or bool(run.per_label)
        return launch(ranks, without_ranks_option(arguments), tolerate_lost_ranks=tolerate_lost_ranks)
    from paragan.plan.memory_advice import explain_out_of_memory

    explain = functools.partial(explain_out_of_memory, has_named_dir=request.run_dir is not None)
    if run.per_label:
        return _train_per_label(run, launch_info, request, reasons, explain)
    from paragan.plan.select.choose import choose_strategy
    from paragan.plan.tune.layout_tuner import decide_layout
    from paragan.train.trainer import TrainJob

    decide = decide_layout if run.device.tune == "measured" else choose_strategy
    job = TrainJob(run, launch_info, request, decide, explain)

    def train_in_world(world: World, console: RunConsole) -> None:
        for line in reasons:
            console.print(line)
        folder = job.train(world, console)
        if world.is_main:
            print_done(folder, console)
        if on_finish:
            on_finish(run, folder, world, console)

    return run_in_world(run, launch_info, train_in_world, job.join_world)


def _train_per_label(
    run: Run, launch_info: LaunchInfo, request: RunDirRequest, reasons: list[str], explain: ExplainFn
) -> int:
    from paragan.core.devices import pick_device
    from paragan.train.console import RunConsole
    from paragan.train.per_label.launch_workers import train_per_label

    device = pick_device(run.device.kind, launch_info.local_rank)
    folder = train_per_label(run, launch_info, device, request, reasons, explain)
    if launch_info.rank == 0:
        print_done(folder, RunConsole())
    return 0


def print_done(folder: Path, console: RunConsole) -> None:
    """Print the last line of a run: its newest scores, and where the report is."""
    from paragan.core.jsonl import format_scores, is_number, read_jsonl

    metrics = read_jsonl(folder / "metrics.jsonl")
    stats = read_jsonl(folder / "stats.jsonl")
    text = "done"
    if scores := format_scores(metrics):
        text += f": {scores}"
        kimg = metrics[-1].get("kimg")
        if stats and is_number(kimg) and kimg != stats[-1].get("Progress/kimg"):
            text += f" (at {kimg:g} kimg)"
    if eval_s := sum(row.get("Timing/eval_s", 0.0) for row in stats):
        text += f" (scores took {eval_s:.3g} s)"
    console.print(f"{text}; see {folder}/report.html")


def _print_fields() -> int:
    """Print every field of a run: its name, type, default, and below it its meaning."""
    from paragan.config.run import Run
    from paragan.core.schema import list_fields

    for field in list_fields(Run, skip_repeats=True):
        default = f"  [{field.default}]" if field.default else ""
        sys.stdout.write(f"--{field.name:<36} {field.values}{default}\n")
        if field.meaning:
            sys.stdout.write(textwrap.fill(field.meaning, 116, initial_indent="    ", subsequent_indent="    ") + "\n")
    sys.stdout.write(
        "\ng.optimizer and d.optimizer can also be any optimizer of the pytorch-optimizer library: adabelief, lamb, "
        "lion, ...\nTheir arguments are fields: --g.optimizer=adabelief --g.optimizer.eps=1e-12; `-n` shows them all.\n"
    )
    return 0


def add_recipes_command(commands: Any) -> None:
    add_command(commands, "recipes", _recipes, "list the named recipes")


def _recipes(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    check_no_extra_arguments(rest)
    sys.stdout.write(RECIPE_LIST.read_text())
    return 0
