"""The command line: `paragan COMMAND ...`, one module of `paragan.cli` for each command.

Exit status: 0 done; 1 failed while running; 2 invalid input; 3 stopped by a signal, can be resumed. Errors are one line
on stderr. Modules import torch inside their commands only, so that `paragan --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from paragan.cli.bench import add_bench_command
from paragan.cli.common import Parser
from paragan.cli.completion import add_completion_command
from paragan.cli.data import add_data_command
from paragan.cli.eval import add_eval_command
from paragan.cli.export import add_export_command, add_import_command
from paragan.cli.per_label import add_label_command, add_merge_command, add_pool_command, add_status_command
from paragan.cli.plan import add_plan_command
from paragan.cli.project import add_project_command
from paragan.cli.report import add_report_command
from paragan.cli.sample import add_sample_command, add_serve_command
from paragan.cli.train import EXAMPLES, add_recipes_command, add_train_command
from paragan.cli.watch import add_watch_command
from paragan.comm.launch_info import LaunchInfo
from paragan.core.errors import DeviceOutOfMemory, Interrupted, InterruptedBeforeStart, RunError, UsageError
from paragan.core.version import __version__
from paragan.train.local_launcher import LAUNCHER_PIPE_ENV, watch_launcher

EXIT_DELAY_S = 5.0  # of ranks whose end would make the launcher kill rank 0, which has to say why first
MAX_NAME_LENGTH = 200  # common file systems take 255 bytes; the names of temporary files are longer by a few


def entry_point() -> NoReturn:
    """Run the command line of this process and exit with its status.

    One of several ranks exits without the interpreter's cleanup, which torch's threads abort now and then.
    """
    is_rank = LAUNCHER_PIPE_ENV in os.environ  # whose launcher reports that it was interrupted
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and not is_rank:  # as __main__ sets it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    if _launch_info().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (of this process, by default) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    watch_launcher()
    if not arguments:
        build_parser().print_help()
        return 0
    try:
        options, rest = build_parser().parse_known_args(arguments)
        return options.command(options, rest, arguments)
    except UsageError as error:
        return _report_error(2, str(error), main_rank_only=error.same_on_all_ranks)
    except DeviceOutOfMemory as error:
        return _report_error(2, str(error), main_rank_only=error.same_on_all_ranks)
    except RunError as error:
        return _report_error(1, str(error), main_rank_only=error.same_on_all_ranks)
    except Interrupted as error:
        message = f"{error}; the same command resumes the run"
        return _report_error(3, message, main_rank_only=error.same_on_all_ranks)
    except KeyboardInterrupt as error:
        is_early = isinstance(error, InterruptedBeforeStart)
        return _report_error(3, str(error) or "interrupted", main_rank_only=not is_early)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).partition(". GPU")[0]
        return _report_error(2, f"{reason}. Use a smaller --batch, or a device with more memory", main_rank_only=False)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            message = f"{error.filename}: too long for the name of a file. Use at most {MAX_NAME_LENGTH} characters"
            return _report_error(2, message, main_rank_only=False)
        return _report_error(1, str(error), main_rank_only=False)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the device had too little memory, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _report_error(status: int, message: str, main_rank_only: bool) -> int:
    info = _launch_info()
    if info.rank == 0 or not main_rank_only:
        sys.stderr.write(f"paragan: {' '.join(message.split())}\n")
    elif info.ends_at_first_failure:
        time.sleep(EXIT_DELAY_S)
    return status


def _launch_info() -> LaunchInfo:
    """Return the rank of this process, as far as its environment says so: no command may have run yet."""
    try:
        return LaunchInfo.from_environment()
    except UsageError:
        return LaunchInfo()


def build_parser() -> Parser:
    """Return the parser of all commands. Options that it does not know are fields of the run (`--nets.width=64`)."""
    parser = Parser(
        prog="paragan",
        description="Train generative adversarial networks on one device, on many, and across slow networks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paragan {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train_command(commands)
    add_status_command(commands)
    add_sample_command(commands)
    add_project_command(commands)
    add_eval_command(commands)
    add_report_command(commands)
    add_watch_command(commands)
    add_export_command(commands)
    add_import_command(commands)
    add_serve_command(commands)
    add_label_command(commands)
    add_merge_command(commands)
    add_pool_command(commands)
    add_data_command(commands)
    add_bench_command(commands)
    add_plan_command(commands)
    add_recipes_command(commands)
    add_completion_command(commands, parser)
    return parser
