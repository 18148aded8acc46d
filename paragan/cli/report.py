"""`paragan report`: one page about a run, or a comparison of several.

`paragan.report` only reads files. This command also makes the figures that need the model and the data (nearest
neighbors, interpolations), if those in the run folder are missing or of an older model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import (
    add_command,
    add_nets_option,
    check_no_extra_arguments,
    check_writable,
    local_folder,
)
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from torch import device as Device

    from paragan.config.run import Run

HELP = """With several RUN_DIRs the page shows their curves in common charts, and their last scores and
the settings that differ side by side.

A page shows the nearest training images of some fakes, and interpolations. Training leaves them in the run folder. If
the model is newer, or streamed data have not been searched yet, this command makes them from the model and the data.
"""


def add_report_command(commands: Any) -> None:
    p = add_command(commands, "report", _report, "write one HTML page about a run, or about several", details=HELP)
    p.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    p.add_argument("--out", metavar="FILE.html", help="RUN_DIR/report.html; for several runs ./comparison.html")
    p.add_argument("--as-is", action="store_true", help="show what is in the folders; load no model and no data")
    p.add_argument("--features", default="pixels", metavar="SPACE", help="the space of nearest neighbors (pixels)")
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    p.add_argument("--data", metavar="PATH", help="the data of the run, if they have moved")
    add_nets_option(p)


def _report(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.report.comparison import write_comparison
    from paragan.report.page import write_report
    from paragan.report.run_data import read_run_data
    from paragan.train.saved_run import require_current_format

    check_no_extra_arguments(rest)
    folders = [Path(local_folder(name)) for name in options.run_dirs]
    out = Path(options.out) if options.out else None
    if out and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: not an HTML file. Use a name that ends in .html")
    check_writable("--out", options.out)
    for folder in folders:
        read_run_data(folder)
    if len(folders) == 1 and out is None:
        require_current_format(folders[0])  # the page of that version would be replaced by a poorer one
    if not options.as_is:
        _make_figures(folders, options)
    if len(folders) == 1:
        page = write_report(folders[0], out)
    else:
        page = write_comparison(folders, out or Path("comparison.html"))
    sys.stdout.write(f"{page}\n")
    return 0


def _make_figures(folders: list[Path], options: argparse.Namespace) -> None:
    """Make missing figures. Failures are printed, or raised if the user gave options for figures."""
    from paragan.config.resolve import load_dataset

    load = functools.cache(load_dataset)
    has_options = options.data or options.nets or options.inception or options.features != "pixels"
    for folder in folders:
        if not any((folder / "model").glob("*.*")):
            continue  # no checkpoint yet
        try:
            _make_run_figures(folder, options, load)
        except (UsageError, OSError) as error:
            if has_options:
                raise
            sys.stderr.write(f"{folder}: no neighbors and interpolations: {' '.join(str(error).split())}\n")


def _make_run_figures(folder: Path, options: argparse.Namespace, load_cached: Callable[[Any], Any]) -> None:
    from paragan.data.storage.filesystem import is_url
    from paragan.train.callbacks.report_figures import MAX_THOROUGH_SEARCH_VALUES, is_outdated, make_figures
    from paragan.train.callbacks.scoring import make_feature_space

    if not is_outdated(folder, options.features):
        return
    run = _load_run(folder, options.data)
    dataset = None
    reason = ""
    if is_url(run.data.path) and not options.data:
        reason = "the data are at a URL; `paragan report --data` with that URL reads them"
    else:
        try:
            dataset = load_cached(run.data)
        except UsageError as error:
            if options.data:
                raise
            reason = str(error)
    space = None
    if dataset is not None and dataset.shows_images:
        inception = options.inception or run.evaluation.inception
        evaluation = dataclasses.replace(run.evaluation, features=options.features, inception=inception)
        space = make_feature_space(evaluation, dataset)
    make_figures(
        folder,
        dataset,
        nets=options.nets,
        device=_pick_device(),
        space=space,
        max_search_values=MAX_THOROUGH_SEARCH_VALUES,
        no_neighbors_reason=reason,
    )


def _pick_device() -> Device:
    """Return a GPU, or the CPU if there is none that torch has code for."""
    from paragan.core.devices import pick_device

    try:
        return pick_device("auto")
    except UsageError:  # which advises the CPU
        return pick_device("cpu")


def _load_run(folder: Path, data: str | None) -> Run:
    """Load the run of a folder without running user code; `data` replaces the path of its data."""
    from paragan.train.saved_run import load_run_without_user_code

    run = load_run_without_user_code(folder)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=data)) if data else run
