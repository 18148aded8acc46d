"""`paragan merge`, `status`, `label` and `pool`: commands about runs of --strategy per-label, and of single labels."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paragan.cli.common import (
    add_command,
    check_no_extra_arguments,
    check_seed,
    local_folder,
    parse_settings,
    with_absolute_paths,
)
from paragan.cli.train import train_on_ranks
from paragan.core.errors import UsageError

MERGE_HELP = """The result is an ordinary run in RUN_DIR/merged. Its G also learns to reproduce
the images that the generators of RUN_DIR make from the same latents. The same command again resumes it. Any field can
be set: --some.field=value. At the end both models are scored in the same way; see merge.json.
"""

POOL_HELP = """DIR has a run folder for each label K, trained with `--data.only=K` by
any scheduler; their names do not matter. The model in DIR/model is sampled as that of --strategy per-label:

  paragan train digits --data.only=3 --seed=3 --run-dir runs/digits/3    # and so on for every label, anywhere
  paragan pool runs/digits
  paragan sample runs/digits --labels 3,7 --out grid.png
  paragan eval runs/digits --data digits
"""


def add_merge_command(commands: Any) -> None:
    summary = "distil a per-label run into one conditional generator"
    p = add_command(commands, "merge", _merge, summary, details=MERGE_HELP)
    p.add_argument("run_dir", metavar="RUN_DIR", help="a run of --strategy per-label")
    p.add_argument("--out", metavar="DIR", help="the folder of the new run (RUN_DIR/merged)")
    p.add_argument("--data", metavar="PATH", help="the data of RUN_DIR, if they have moved")
    p.add_argument("--kimg", metavar="K", help="length, in thousands of real images shown to D (as RUN_DIR)")
    p.add_argument("--weight", metavar="W", help="weight of the distillation loss in G's loss")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")


def _merge(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.distill import compare_with_teacher, student_run
    from paragan.train.run_dir_selection import RunDirRequest
    from paragan.train.shutdown import exit_on_signal

    with exit_on_signal():
        folder = Path(options.run_dir).absolute()
        out = Path(options.out).absolute() if options.out else folder / "merged"
        if out.resolve() == folder.resolve():
            raise UsageError(f"--out {options.out}: this is RUN_DIR. Use another folder, or leave --out out")
        overrides: list[tuple[str, str]] = []
        if options.kimg is not None:
            overrides.append(("kimg", options.kimg))
        if options.weight is not None:
            overrides.append(("distill_weight", options.weight))
        if options.data:
            overrides.append(("data.path", json.dumps(options.data)))
        run = with_absolute_paths(student_run(folder, [*overrides, *parse_settings(rest)]))
        return train_on_ranks(options, arguments, run, RunDirRequest(run_dir=out), [], compare_with_teacher)


def add_status_command(commands: Any) -> None:
    p = add_command(commands, "status", _status, "show the progress of a run, or of each of its labels")
    p.add_argument("run_dir", metavar="RUN_DIR")


def _status(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.status import format_status

    check_no_extra_arguments(rest)
    folder = local_folder(options.run_dir, "RUN_DIR")
    sys.stdout.write(f"{format_status(Path(folder), options.run_dir)}\n")
    return 0


def add_label_command(commands: Any) -> None:
    p = add_command(commands, "label", _label, "retrain labels of a per-label run, or replace their generators")
    p.add_argument("run_dir", metavar="RUN_DIR")
    p.add_argument("labels", metavar="3,7", help="numbers or names")
    action = p.add_mutually_exclusive_group(required=True)
    action.add_argument("--retrain", action="store_true", help="put the labels back into the queue, with a new seed")
    action.add_argument("--replace-with", metavar="MODEL", help="use this unconditional model for the labels")
    p.add_argument("--seed", type=int, metavar="N", help="of --retrain (default: one that was not used yet)")


def _label(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.retrain import replace_label, retrain

    check_no_extra_arguments(rest)
    if options.seed is not None:
        check_seed(options.seed)
    folder = Path(options.run_dir)
    if options.replace_with:
        lines = replace_label(folder, options.labels, Path(options.replace_with))
    else:
        lines = retrain(folder, options.labels, options.seed)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def add_pool_command(commands: Any) -> None:
    p = add_command(commands, "pool", _pool, "make one model of runs of single labels", details=POOL_HELP)
    p.add_argument("dir", metavar="DIR", help="the folder that holds the run folders")
    p.add_argument("--out", metavar="DIR", help="write the model to DIR/model (default: beside the runs)")
    p.add_argument("--data", metavar="PATH", help="the data of the runs, if they have moved")
    p.add_argument("--allow-missing", action="store_true", help="leave out labels that have no run")


def _pool(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.pool import pool

    check_no_extra_arguments(rest)
    folder = Path(options.dir)
    out = Path(options.out) if options.out else folder
    count = pool(folder, out, options.data, options.allow_missing)
    sys.stdout.write(f"model with {count} generators in {out}/model; paragan.load({str(out)!r}) reads it\n")
    return 0
