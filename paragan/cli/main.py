"""The command line. Status: 0 done, 1 failed while running, 2 unusable input, 3 stopped by a signal, resumable."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paragan import __version__
from paragan.cli.common import Parser, add_command, check_no_extra_arguments
from paragan.cli.per_label import add_label_command, add_merge_command, add_status_command
from paragan.cli.train import EXAMPLES, add_train_command
from paragan.core.errors import Interrupted, RunError, UsageError
from paragan.train.local_launcher import watch_launcher


def entry_point() -> NoReturn:
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
    watch_launcher()
    try:
        options, rest = build_parser().parse_known_args(arguments)
        return options.command(options, rest, arguments)
    except UsageError as error:
        return _report_error(2, str(error), main_rank_only=error.same_on_all_ranks)
    except RunError as error:
        return _report_error(1, str(error), main_rank_only=error.same_on_all_ranks)
    except Interrupted as error:
        return _report_error(3, f"{error}; the same command goes on from here", main_rank_only=error.same_on_all_ranks)
    except KeyboardInterrupt as error:
        return _report_error(3, str(error) or "interrupted", main_rank_only=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report_error(1, str(error), main_rank_only=False)


def _report_error(status: int, message: str, main_rank_only: bool) -> int:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank == "0" or not main_rank_only:
        sys.stderr.write(f"paragan: {' '.join(message.split())}\n")
    return status


def build_parser() -> Parser:
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
        *(
            add_train_command,
            add_status_command,
            _add_sample_command,
            _add_eval_command,
            _add_report_command,
            _add_export_command,
            _add_import_command,
        ),
        *(
            _add_serve_command,
            add_label_command,
            add_merge_command,
            _add_data_command,
            _add_bench_command,
            _add_plan_command,
            _add_recipes_command,
        ),
    ):
        add(commands)
    return parser


# train ------------------------------------------------------------------------------------------------


# merge ------------------------------------------------------------------------------------------------


# eval, report, recipes ---------------------------------------------------------------------------------


def _add_eval_command(commands: Any) -> None:
    from paragan.cli.eval import add_eval_command

    add_eval_command(commands)


def _add_report_command(commands: Any) -> None:
    from paragan.cli.report import HELP, add_report_options

    add_report_options(
        add_command(commands, "report", _report, "write one HTML page about a run, or about several", more=HELP)
    )


def _report(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.report import run_report

    check_no_extra_arguments(rest)
    return run_report(options)


def _add_recipes_command(commands: Any) -> None:
    add_command(commands, "recipes", _recipes, "list the named recipes")


def _recipes(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.recipes import RECIPES

    check_no_extra_arguments(rest)
    for name, make in RECIPES.items():
        sys.stdout.write(f"{name:<24} {(make.__doc__ or '').splitlines()[0]}\n")
    return 0


def _add_data_command(commands: Any) -> None:
    from paragan.cli.data import add_data_command

    add_data_command(commands)


def _add_bench_command(commands: Any) -> None:
    from paragan.cli.bench import add_bench_command

    add_bench_command(commands)


def _add_plan_command(commands: Any) -> None:
    from paragan.cli.plan import add_plan_command

    add_plan_command(commands)


def _add_sample_command(commands: Any) -> None:
    from paragan.cli.sample import add_sample_command

    add_sample_command(commands)


def _add_serve_command(commands: Any) -> None:
    from paragan.cli.sample import add_serve_command

    add_serve_command(commands)


def _add_export_command(commands: Any) -> None:
    from paragan.cli.export import add_export_command

    add_export_command(commands)


def _add_import_command(commands: Any) -> None:
    from paragan.cli.export import add_import_command

    add_import_command(commands)
