"""`paragan report`: one page about a run, or about several side by side."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError
from paragan.data.storage.filesystem import is_url

if TYPE_CHECKING:
    from paragan.config.run import Run

HELP = """With several RUN_DIRs they are drawn over each other, their last scores and the fields in
which they differ stand side by side.

A page shows the nearest training images of some fakes, and interpolations, as the end of training left them; where the
model is newer, or data that were streamed have not been looked at, they are made now, from the model and the data.
"""


def add_report_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    p.add_argument("--out", metavar="FILE.html", help="RUN_DIR/report.html; of several runs ./comparison.html")
    p.add_argument("--as-is", action="store_true", help="show what is in the folders; load no model and no data")
    p.add_argument("--features", default="pixels", metavar="SPACE", help="where neighbours are near (pixels)")
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    p.add_argument("--data", metavar="PATH", help="where the data lie now")
    p.add_argument("--nets", metavar="MODULE:CLASS", help="networks of your own, if it was trained with such")


def run_report(options: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    from paragan.report.comparison import write_comparison
    from paragan.report.page import write_report
    from paragan.report.run_data import read_run_data

    folders = [Path(name) for name in options.run_dirs]
    out = Path(options.out) if options.out else None
    if out and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} must end in .html, such as report.html")
    if out and not os.access(out.absolute().parent, os.W_OK):
        raise UsageError(f"--out {out}: its folder is not there, or cannot be written")
    for folder in folders:
        read_run_data(folder)
    if not options.as_is:
        _make_figures(folders, options)
    if len(folders) == 1:
        written = write_report(folders[0], out)
    else:
        written = write_comparison(folders, out or Path("comparison.html"))
    sys.stdout.write(f"{written}\n")
    return 0


def _make_figures(folders: list[Path], options: argparse.Namespace) -> None:
    """Make what the pages are to show and is not there. What cannot be made is said and left out; where it was asked
    for, that is refused."""
    load = functools.cache(_load_data)
    asked = options.data or options.nets or options.inception or options.features != "pixels"
    for folder in folders:
        if not any((folder / "model").glob("*.*")):
            continue  # no checkpoint yet
        try:
            _make_run_figures(folder, options, load)
        except (UsageError, OSError) as error:
            if asked:
                raise
            sys.stderr.write(f"{folder}: no neighbours and interpolations: {' '.join(str(error).split())}\n")


def _make_run_figures(folder: Path, options: argparse.Namespace, load_cached: Callable[[Any], Any]) -> None:
    from paragan.config.run import Run
    from paragan.core.devices import pick_device
    from paragan.train.callbacks.report_figures import MAX_THOROUGH_SEARCH_VALUES, is_outdated, make_figures
    from paragan.train.callbacks.scoring import make_feature_space

    if not is_outdated(folder, options.features):
        return
    run, reason, images, space = _load_run(folder, options.data), "", None, None
    if is_url(run.data.path) and not options.data:
        reason = "the data lie behind an address; `paragan report --data` with that address reads them"
    else:
        try:
            images = load_cached(Run(data=run.data))
        except UsageError as error:
            if options.data:
                raise
            reason = str(error)
    if images is not None and not images.numbers:
        inception = options.inception or run.evaluation.inception
        wanted = dataclasses.replace(run.evaluation, features=options.features, inception=inception)
        space = make_feature_space(wanted, images)
    device = pick_device("auto")
    make_figures(
        folder,
        images,
        nets=options.nets,
        device=device,
        space=space,
        max_search_values=MAX_THOROUGH_SEARCH_VALUES,
        no_neighbors_reason=reason,
    )


def _load_run(folder: Path, data: str | None) -> Any:
    """The run of a folder, but for its parts that may be code; its data where they lie now."""
    from paragan.config.run import load_without_user_code
    from paragan.core.schema import read_yaml

    run = load_without_user_code(read_yaml(folder / "run.yaml"))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=data)) if data else run


def _load_data(run: Run) -> Any:
    from paragan.config.resolve import load_dataset

    return load_dataset(run)
