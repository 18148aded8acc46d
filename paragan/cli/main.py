"""The command line. Status: 0 done, 1 failed while running, 2 unusable input, 3 stopped by a signal, resumable."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paragan import __version__
from paragan.cli.common import Parser, _command, _nothing_left
from paragan.cli.per_label import _label_parser, _merge_parser, _status_parser
from paragan.cli.train import EXAMPLES, _train_parser
from paragan.core.errors import Failed, Interrupted, Unusable
from paragan.train.local_launcher import heed_launcher


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


# train ------------------------------------------------------------------------------------------------


# merge ------------------------------------------------------------------------------------------------


# eval, report, recipes ---------------------------------------------------------------------------------


def _eval_parser(commands: Any) -> None:
    from paragan.cli.eval import eval_parser

    eval_parser(commands)


def _report_parser(commands: Any) -> None:
    from paragan.cli.report import HELP, add_options

    add_options(_command(commands, "report", _report, "write one HTML page about a run, or about several", more=HELP))


def _report(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.report import report

    _nothing_left(rest)
    return report(options)


def _recipes_parser(commands: Any) -> None:
    _command(commands, "recipes", _recipes, "list the named recipes")


def _recipes(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.recipes import RECIPES

    _nothing_left(rest)
    for name, make in RECIPES.items():
        sys.stdout.write(f"{name:<24} {(make.__doc__ or '').splitlines()[0]}\n")
    return 0


def _data_parser(commands: Any) -> None:
    from paragan.cli.data import data_parser

    data_parser(commands)


def _bench_parser(commands: Any) -> None:
    from paragan.cli.bench import bench_parser

    bench_parser(commands)


def _plan_parser(commands: Any) -> None:
    from paragan.cli.plan import plan_parser

    plan_parser(commands)


def _sample_parser(commands: Any) -> None:
    from paragan.cli.sample import sample_parser

    sample_parser(commands)


def _serve_parser(commands: Any) -> None:
    from paragan.cli.sample import serve_parser

    serve_parser(commands)


def _export_parser(commands: Any) -> None:
    from paragan.cli.export import export_parser

    export_parser(commands)


def _import_parser(commands: Any) -> None:
    from paragan.cli.export import import_parser

    import_parser(commands)
