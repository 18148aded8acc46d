"""The command line. Status: 0 done, 1 failed while running, 2 unusable input, 3 stopped by a signal, resumable."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .cli_follow import device_of
from .data.places import is_address
from .errors import Failed, Interrupted, Unusable
from .train.launch import heed_launcher

EXAMPLES = """examples:
  paragan train digits                                   a first GAN, in about a minute
  paragan train folder --data photos/ --kimg 500         your own images (a folder, .npz, .zip, .h5, tars, ...)
  paragan train digits --ranks 2                         the same training on two processes
  torchrun --nproc-per-node 4 -m paragan train digits    ... under any launcher, on any number of hosts
  paragan train digits --strategy per-label --ranks 2    a game for every label, no communication; see `paragan status`
  paragan train digits --batch 1024 --tune rates         the recipe's settings, carried to another batch
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
--g.optimizer.lr=1e-3. --tune rates carries the settings that a recipe has for its own batch to --batch: learning rates
by g.rule and d.rule (sqrt, linear, none), warm-up, half-life of the average; --tune all the weights of R1 and R2 too.
-n shows the values and where they are from.
"""

MERGE_HELP = """An ordinary run, in RUN_DIR/merged: its G also learns what the generators of RUN_DIR make of
the same latents. The same command again goes on where it stopped. Any field can be set: --some.field=value.
At the end both models are scored alike; see merge.json.
"""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise Unusable(f"{message} (`{self.prog} --help` shows how)")


def program() -> NoReturn:
    """The program: `main` in a process of its own.

    A rank ends on the spot, its output flushed: torch's threads, met by the end of the interpreter, abort now and then.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    heed_launcher()
    try:
        options, rest = _parser().parse_known_args(arguments)
        return options.command(options, rest, arguments)
    except Unusable as error:
        return _end(2, str(error), first_only=error.everywhere)
    except Failed as error:
        return _end(1, str(error), first_only=error.everywhere)
    except Interrupted as error:
        return _end(3, f"{error}; the same command goes on from here", first_only=error.everywhere)
    except KeyboardInterrupt as error:
        return _end(3, str(error) or "interrupted", first_only=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _end(1, str(error), first_only=False)


def _end(status: int, message: str, first_only: bool) -> int:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank == "0" or not first_only:
        sys.stderr.write(f"paragan: {' '.join(message.split())}\n")
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="paragan",
        description="Train generative adversarial networks on one device, on many, and across slow networks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paragan {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        *(_train_parser, _status_parser, _sample_parser, _eval_parser, _report_parser, _export_parser, _import_parser),
        *(_serve_parser, _label_parser, _merge_parser, _data_parser, _bench_parser, _plan_parser, _recipes_parser),
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, action: Any, about: str, **more: Any) -> argparse.ArgumentParser:
    lines = f"{about[0].upper()}{about[1:]}. {more.pop('more', '')}".splitlines()
    parser = commands.add_parser(
        name,
        help=about,
        description="\n".join(line.rstrip() for line in lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **more,
    )
    parser.set_defaults(command=action)
    return parser


# train ------------------------------------------------------------------------------------------------

# shorthand -> the field it sets
SHORTHANDS = {
    "strategy": "strategy",
    "batch": "batch",
    "lanes": "lanes",
    "kimg": "kimg",
    "seed": "seed",
    "guard": "guard",
    "mirror": "data.mirror",
}
AS_THEY_ARE = {"data": "data.path", "init_from": "init_from", "ramp": "ramp"}  # `--data 2024` is a folder


def _train_parser(commands: Any) -> None:
    p = _command(commands, "train", _train, "train a recipe, or go on with it", more=TRAIN_HELP, epilog=EXAMPLES)
    p.add_argument("recipe", nargs="?", metavar="RECIPE | RUN.yaml", help="a named recipe, or the record of a run")
    p.add_argument(
        "--data",
        metavar="PATH",
        help="digits, a folder (PATH/<class>/*.png or PATH/*.png), an .npz, .zip, .h5, tar shards, or an address",
    )
    p.add_argument("--strategy", metavar="S", help="how ranks work together (sync); auto: what is fastest here")
    p.add_argument("--policy", default="none", metavar="P", help="how G and D learn, as in a paper (see above)")
    p.add_argument("--batch", metavar="N", help="total batch, over all ranks")
    p.add_argument("--tune", default="none", metavar="rates|all", help="carry the recipe's settings to --batch (above)")
    p.add_argument("--ramp", metavar="K:N,K:N", help="let the batch grow: from K kimg on it is N")
    p.add_argument("--lanes", metavar="L", help="logical workers that share the batch: as many ranks can take part")
    p.add_argument("--kimg", metavar="K", help="how long, in thousands of real images shown to D")
    p.add_argument("--seed", metavar="N")
    p.add_argument("--guard", metavar="rollback", help="go back to the last good checkpoint where the run falls ill")
    p.add_argument("--mirror", action="store_const", const="true", help="also train on flipped images")
    p.add_argument("--init-from", metavar="MODEL", help="start from the model of another run")
    p.add_argument("--outdir", default="runs", metavar="DIR", help="where numbered run folders are made (runs)")
    p.add_argument("--run-dir", metavar="DIR", help="this very folder instead")
    p.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="PATH: a run folder to go on with")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")
    p.add_argument("--fields", action="store_true", help="list every field that can be set, with its default")


def _train(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .train.stop import at_once

    if options.fields:
        return _list_fields()
    if options.recipe is None:
        raise Unusable("which recipe? `paragan recipes` lists them; `paragan train digits` needs nothing else")
    with at_once():
        return _train_run(options, rest, arguments)


def _train_run(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    return _play(options, arguments, *_resolve(options, rest))


def _play(
    options: argparse.Namespace, arguments: list[str], run: Any, wanted: Any, reasons: list[str], at_end: Any = None
) -> int:
    """Train, on as many ranks as are asked for. at_end: what they do then with run, folder, world and screen."""
    from .comm.world import Place

    place = Place.from_environment()
    launched = place.size > 1 or "RANK" in os.environ
    ranks = place.size if options.ranks is None else options.ranks
    if ranks < 1:
        raise Unusable(f"--ranks {ranks} must be 1 or more")
    if launched and ranks != place.size:
        raise Unusable(f"--ranks {ranks} where a launcher started {place.size}: leave --ranks out")
    run.check(ranks)
    if options.dry_run:
        from .cli_plan import dry_run

        return dry_run(run, ranks, reasons)
    if ranks > 1 and not launched:
        from .train.launch import launch

        return launch(ranks, _without_ranks(arguments), go_on=run.strategy.lost_after_s > 0 or bool(run.per_label))
    if run.per_label:
        return _train_labels(run, place, wanted, reasons)
    from .cli_layout import decide_layout
    from .cli_search import decide_strategy
    from .train.start import Training

    training = Training(run, place, wanted, decide_layout if run.device.layout == "measured" else decide_strategy)

    def action(world: Any, screen: Any) -> None:
        folder = _train_in(training, world, screen, reasons)
        if at_end:
            at_end(run, folder, world, screen)

    return _in_world(run, place, action, training.join)


def _resolve(options: argparse.Namespace, rest: list[str]) -> tuple[Any, Any, list[str]]:
    """The run and the folder a train command asks for, and why it is as it is."""
    from .config import plain, read_yaml
    from .recipes import asked, recipe
    from .train.folder import Wanted, existing

    given = [(field, value) for name, field in SHORTHANDS.items() if (value := getattr(options, name)) is not None]
    given += [(field, json.dumps(value)) for name, field in AS_THEY_ARE.items() if (value := getattr(options, name))]
    name, run_dir = options.recipe, options.run_dir and Path(options.run_dir)
    is_file = Path(name).suffix in (".yaml", ".yml")
    data = read_yaml(Path(name)) if is_file else plain(recipe(name))
    given += _settings(rest)
    if any(field.partition(".")[0] == "strategy" for field, _ in given):
        data = {**data, "chosen": {}}  # not for this one
    run, reasons = asked(data, given, options.policy, options.tune)
    if options.resume not in ("auto", "never"):
        if run_dir:
            raise Unusable("--resume PATH and --run-dir name two folders: give one of them")
        try:
            run_dir = existing(Path(options.resume))
        except Unusable as error:  # it may be there for other ranks
            raise Unusable(str(error), everywhere=False) from error
    return _absolute(run), Wanted(Path(options.outdir), run_dir, options.resume), reasons


def _absolute(run: Any) -> Any:
    """A run whose paths mean the same wherever it is repeated."""
    if run.data.path not in ("", "digits") and not is_address(run.data.path):
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(Path(run.data.path).absolute())))
    paths = {name: str(Path(path).absolute()) for name in ("init_from", "teacher") if (path := getattr(run, name))}
    return dataclasses.replace(run, **paths)


def _settings(rest: list[str]) -> list[tuple[str, str]]:
    """--a.b=value and --a.b value -> (a.b, value)."""
    settings, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise Unusable(f"{word} is not understood; fields are set as --some.field=value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise Unusable(f"{word} needs a value: {word}=...")
            value = words.pop(0)
        settings.append((name.replace("-", "_"), value))
    return settings


def _without_ranks(arguments: list[str]) -> list[str]:
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if word == "--ranks":
            words.pop(0)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept


def _in_world(run: Any, place: Any, action: Any, join: Any = None, device: Any = None) -> int:
    """Do it among all ranks of the launcher, and leave them in good order. device: other than the run says."""
    from .comm.world import World
    from .train.progress import Screen
    from .train.run import pick_device

    device = device_of(device, "") if device else pick_device(run.device.kind, place.local_rank)
    with join(device) if join else World.join(place, device, run.timeout_s) as world:
        action(world, Screen(world.first))
    return 0


def _train_labels(run: Any, place: Any, wanted: Any, reasons: list[str]) -> int:
    from .train.crew import train_labels
    from .train.progress import Screen
    from .train.run import pick_device

    folder = train_labels(run, place, pick_device(run.device.kind, place.local_rank), wanted, reasons)
    if place.rank == 0:
        _say_done(folder, Screen())
    return 0


def _train_in(training: Any, world: Any, screen: Any, reasons: list[str]) -> Path:
    for line in reasons:
        screen.say(line)
    folder = training.play(world, screen)
    if world.first:
        _say_done(folder, screen)
    return folder


def _say_done(folder: Path, screen: Any) -> None:
    from .report.records import is_number, read, told

    measured, stats = read(folder / "metrics.jsonl"), read(folder / "stats.jsonl")
    spent = sum(row.get("Timing/eval_s", 0.0) for row in stats)
    took = f" (scores took {spent:.3g} s)" if spent else ""
    scores, at = told(measured), measured[-1].get("kimg") if measured else None
    if scores and stats and is_number(at) and at != stats[-1].get("Progress/kimg"):
        scores += f", which are of {at:g} kimg"
    screen.say(f"done{': ' * bool(scores)}{scores}{took}; look at {folder}/report.html")


def _list_fields() -> int:
    from .config import fields_help
    from .train.run import Run

    for name, kind, default in fields_help(Run, once=True):
        sys.stdout.write(f"--{name:<36} {kind}{f'  [{default}]' if default else ''}\n")
    sys.stdout.write(
        "\ng.optimizer and d.optimizer are also those of the pytorch-optimizer library: adabelief, lamb, lion, ...\n"
        "Their arguments are fields: --g.optimizer=adabelief --g.optimizer.eps=1e-12; `-n` shows them all.\n"
    )
    return 0


# merge ------------------------------------------------------------------------------------------------


def _merge_parser(commands: Any) -> None:
    p = _command(commands, "merge", _merge, "distil a run per label into one conditional generator", more=MERGE_HELP)
    p.add_argument("run_dir", metavar="RUN_DIR", help="a run of --strategy per-label")
    p.add_argument("--out", metavar="DIR", help="the folder of the new run (RUN_DIR/merged)")
    p.add_argument("--data", metavar="PATH", help="the same data as RUN_DIR, where they lie now")
    p.add_argument("--kimg", metavar="K", help="how long, in thousands of real images shown to D (as RUN_DIR)")
    p.add_argument("--weight", metavar="W", help="of the distance to the generators of RUN_DIR in G's loss")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("-n", "--dry-run", action="store_true", help="show the resolved run and its cost; train nothing")


def _merge(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .train.folder import Wanted
    from .train.merge import compare, student
    from .train.stop import at_once

    with at_once():
        folder = Path(options.run_dir).absolute()
        out = Path(options.out).absolute() if options.out else folder / "merged"
        if out.resolve() == folder.resolve():
            raise Unusable(f"--out {options.out} is RUN_DIR itself: leave --out out, or give another folder")
        fields = {"kimg": options.kimg, "teacher_weight": options.weight}
        given = [(field, value) for field, value in fields.items() if value is not None]
        given += [("data.path", json.dumps(options.data))] if options.data else []
        run = _absolute(student(folder, [*given, *_settings(rest)]))
        return _play(options, arguments, run, Wanted(run_dir=out), [], compare)


# eval, report, recipes ---------------------------------------------------------------------------------


def _own_nets(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nets", metavar="MODULE:CLASS", help="networks of your own, if it was trained with such")


def _eval_parser(commands: Any) -> None:
    from .cli_eval import eval_parser

    eval_parser(commands)


def _report_parser(commands: Any) -> None:
    from .cli_report import HELP, add_options

    add_options(_command(commands, "report", _report, "write one HTML page about a run, or about several", more=HELP))


def _report(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .cli_report import report

    _nothing_left(rest)
    return report(options)


def _status_parser(commands: Any) -> None:
    p = _command(commands, "status", _status, "show what a run, or each of its labels, is doing")
    p.add_argument("run_dir", metavar="RUN_DIR")


def _status(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .train.status import status

    _nothing_left(rest)
    sys.stdout.write(f"{status(Path(options.run_dir))}\n")
    return 0


def _label_parser(commands: Any) -> None:
    p = _command(commands, "label", _label, "train a label of a run per label again, or replace its generator")
    p.add_argument("run_dir", metavar="RUN_DIR")
    p.add_argument("labels", metavar="3,7", help="by number or name")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--again", action="store_true", help="put it back into the queue, with another seed")
    what.add_argument("--by", metavar="MODEL", help="an unconditional model of such images takes its place")
    p.add_argument("--seed", type=int, metavar="N", help="the seed to train it again with (default: one not used yet)")


def _label(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .train.relabel import again, replace

    _nothing_left(rest)
    folder = Path(options.run_dir)
    if options.seed is not None:
        _check_seed(options.seed)
    by = options.by and Path(options.by)
    lines = replace(folder, options.labels, by) if by else again(folder, options.labels, options.seed)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _recipes_parser(commands: Any) -> None:
    _command(commands, "recipes", _recipes, "list the named recipes")


def _recipes(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from .recipes import RECIPES

    _nothing_left(rest)
    for name, make in RECIPES.items():
        sys.stdout.write(f"{name:<24} {(make.__doc__ or '').splitlines()[0]}\n")
    return 0


def _data_parser(commands: Any) -> None:
    from .cli_data import data_parser

    data_parser(commands)


def _bench_parser(commands: Any) -> None:
    from .cli_bench import bench_parser

    bench_parser(commands)


def _plan_parser(commands: Any) -> None:
    from .cli_search import plan_parser

    plan_parser(commands)


def _sample_parser(commands: Any) -> None:
    from .cli_sample import sample_parser

    sample_parser(commands)


def _serve_parser(commands: Any) -> None:
    from .cli_sample import serve_parser

    serve_parser(commands)


def _export_parser(commands: Any) -> None:
    from .cli_export import export_parser

    export_parser(commands)


def _import_parser(commands: Any) -> None:
    from .cli_export import import_parser

    import_parser(commands)


def _nothing_left(rest: list[str]) -> None:
    if rest:
        raise Unusable(f"{rest[0]} is not an option of this command")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise Unusable(f"--seed {seed} must be 0 or more, and less than 2^63")


def _check_truncation(truncation: float) -> None:
    if not 0.05 <= truncation <= 1:
        raise Unusable(f"--truncation {truncation} must be between 0.05 and 1 (1: none)")
