"""`paragan watch`: pages about runs that are refreshed while they are trained."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from paragan.cli.common import add_command, check_no_extra_arguments
from paragan.core.errors import UsageError

DETAILS = """The page of a run shows its curves, samples, scores and findings, which process trains it and
the time left. It refreshes itself, and takes at most a twentieth of a processor. From another machine, forward the
port: `ssh -L 6007:localhost:6007 HOST`.
"""
EXAMPLES = """examples:
  paragan watch runs                 all runs in a folder, also those that are started later
  paragan watch runs/00000-digits    one run
"""
LOW_PRIORITY = 10  # of the processor, below that of training


def add_watch_command(commands: Any) -> None:
    p = add_command(commands, "watch", _watch, "serve live pages about runs", details=DETAILS, epilog=EXAMPLES)
    p.add_argument("folders", nargs="+", metavar="FOLDER", help="a run folder, or a folder with run folders in it")
    p.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on; 0.0.0.0: all interfaces (127.0.0.1)"
    )
    p.add_argument("--port", type=int, default=6007, metavar="N", help="0: any free port (6007)")


def _watch(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.web_server import check_port, serve_until_interrupted, trusted_hosts
    from paragan.watch.application import create_watch_app
    from paragan.watch.pages import LivePages

    check_no_extra_arguments(rest)
    check_port(options.port)
    for folder in options.folders:
        _check_folder(folder)
    pages = LivePages(list(map(Path, options.folders)))
    app = create_watch_app(pages, trusted_hosts(options.host))
    os.nice(LOW_PRIORITY)
    serve_until_interrupted(app, options.host, options.port, f"shows {', '.join(options.folders)}", sys.stdout)
    return 0


def _check_folder(name: str) -> None:
    from paragan.data.storage.object_folder import is_object_address

    if is_object_address(name):
        raise UsageError(f"FOLDER {name}: is in an object store. Use `paragan report {name}`, which copies it")
    if not Path(name).is_dir():
        problem = "is a file, not a folder" if Path(name).exists() else "does not exist"
        raise UsageError(
            f"FOLDER {name}: {problem}. Use a run folder, or the folder that `paragan train` makes them in"
        )
