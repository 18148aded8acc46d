"""TODO: docstring of paragan/cli/per_label.py"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paragan.cli.common import add_command, check_no_extra_arguments, check_seed, parse_settings, with_absolute_paths
from paragan.cli.train import train_on_ranks
from paragan.core.errors import UsageError

MERGE_HELP = """An ordinary run, in RUN_DIR/merged: its G also learns what the generators of RUN_DIR make of
the same latents. The same command again goes on where it stopped. Any field can be set: --some.field=value.
At the end both models are scored alike; see merge.json.
"""


def add_merge_command(commands: Any) -> None:
    p = add_command(commands, "merge", _merge, "distil a run per label into one conditional generator", more=MERGE_HELP)
    p.add_argument("run_dir", metavar="RUN_DIR", help="a run of --strategy per-label")
    p.add_argument("--out", metavar="DIR", help="the folder of the new run (RUN_DIR/merged)")
    p.add_argument("--data", metavar="PATH", help="the same data as RUN_DIR, where they lie now")
    p.add_argument("--kimg", metavar="K", help="how long, in thousands of real images shown to D (as RUN_DIR)")
    p.add_argument("--weight", metavar="W", help="of the distance to the generators of RUN_DIR in G's loss")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")


def _merge(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.distill import compare_with_teacher, student_run
    from paragan.train.run_dir import RunDirRequest
    from paragan.train.shutdown import exit_on_signal

    with exit_on_signal():
        folder = Path(options.run_dir).absolute()
        out = Path(options.out).absolute() if options.out else folder / "merged"
        if out.resolve() == folder.resolve():
            raise UsageError(f"--out {options.out} is RUN_DIR itself: leave --out out, or give another folder")
        fields = {"kimg": options.kimg, "distill_weight": options.weight}
        given = [(field, value) for field, value in fields.items() if value is not None]
        given += [("data.path", json.dumps(options.data))] if options.data else []
        run = with_absolute_paths(student_run(folder, [*given, *parse_settings(rest)]))
        return train_on_ranks(options, arguments, run, RunDirRequest(run_dir=out), [], compare_with_teacher)


def add_status_command(commands: Any) -> None:
    p = add_command(commands, "status", _status, "show what a run, or each of its labels, is doing")
    p.add_argument("run_dir", metavar="RUN_DIR")


def _status(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.status import format_status

    check_no_extra_arguments(rest)
    sys.stdout.write(f"{format_status(Path(options.run_dir))}\n")
    return 0


def add_label_command(commands: Any) -> None:
    p = add_command(commands, "label", _label, "train a label of a run per label again, or replace its generator")
    p.add_argument("run_dir", metavar="RUN_DIR")
    p.add_argument("labels", metavar="3,7", help="by number or name")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--retrain", action="store_true", help="put it back into the queue, with another seed")
    what.add_argument("--replace-with", metavar="MODEL", help="an unconditional model of such images takes its place")
    p.add_argument("--seed", type=int, metavar="N", help="the seed to train it again with (default: one not used yet)")


def _label(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.train.per_label.retrain import replace_label, retrain

    check_no_extra_arguments(rest)
    folder = Path(options.run_dir)
    if options.seed is not None:
        check_seed(options.seed)
    by = options.replace_with and Path(options.replace_with)
    lines = replace_label(folder, options.labels, by) if by else retrain(folder, options.labels, options.seed)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
