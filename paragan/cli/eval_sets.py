"""`paragan eval --reals A --fakes B`: scores of two sets of images, or of files of their statistics."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paragan.cli.common import (
    advise_on_memory,
    check_writable,
    count_ranks,
    is_launched,
    parse_size,
    progress_bar,
    run_in_world,
    select_device,
    without_ranks_option,
)
from paragan.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.eval.evaluate import Score
    from paragan.train.compare_sets import Comparison, ComparisonOptions
    from paragan.train.console import RunConsole

QUIET_S = 10.0  # until metrics are named on stderr where that is no terminal
MEMORY_ADVICE = "Use --device cpu"
DEFAULT_METRICS = "fd,kid,prdc"
RUN_ONLY = ("reference", "data", "nets", "follow", "truncation", "patience")  # options that score a run
SETS_ONLY = ("fakes", "resolution", "channels", "range", "json")  # options that score two sets


def check_options_of_runs(options: argparse.Namespace) -> None:
    """Raise UsageError if a run is scored with options for two sets, or there is neither."""
    given = [name for name in SETS_ONLY if getattr(options, name) is not None]
    if given and not options.run_dir:
        raise UsageError(f"--{given[0]}: there is no --reals. Use --reals A --fakes B")
    if given:
        raise UsageError(f"--{given[0]}: is for two sets of images. Use it with --reals A --fakes B and no RUN_DIR")
    if not options.run_dir:
        raise UsageError("RUN_DIR: is missing. Use a run folder, or --reals A --fakes B for two sets of images")


def eval_sets(options: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Score two sets on as many ranks as the launcher or --ranks says. Returns the exit status.

    Args:
        options: of the command.
        parser: knows the defaults of the options.
        arguments: the whole command line, for the processes that --ranks starts.
    """
    from paragan.comm.launch_info import LaunchInfo
    from paragan.config.run import Run
    from paragan.train.compare_sets import ComparisonOptions

    _check_options(options, parser)
    launch_info = LaunchInfo.from_environment()
    ranks = count_ranks(options.ranks, launch_info)
    if ranks > 1 and not is_launched(launch_info):
        from paragan.train.local_launcher import launch

        return launch(ranks, without_ranks_option(arguments))
    size = parse_size(options.resolution)
    comparison_options = ComparisonOptions(
        metrics=tuple((_default_metrics(options) if options.metrics is None else options.metrics).split(",")),
        features=options.features or "",
        inception=options.inception or "",
        resolution=size.resolution if size else 0,
        channels=options.channels or 0,
        count=options.count or 0,
        seed=options.seed or 0,
        range=options.range or "auto",
    )

    def score_sets(world: World, console: RunConsole) -> None:
        with advise_on_memory(MEMORY_ADVICE):
            _score_sets(options, comparison_options, world, console)

    device = select_device(options.device, "auto", launch_info.local_rank)
    return run_in_world(Run(), launch_info, score_sets, device=device)


def _default_metrics(options: argparse.Namespace) -> str:
    """Return the metrics that images allow, or those that files of statistics do."""
    from paragan.eval.reference_stats import is_reference_stats

    return "fd" if is_reference_stats(options.reals) or is_reference_stats(options.fakes) else DEFAULT_METRICS


def _check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.run_dir:
        raise UsageError(f"{options.run_dir}: is scored without --reals. Use RUN_DIR, or --reals A --fakes B")
    if options.fakes is None:
        raise UsageError(f"--reals {options.reals}: there is no --fakes. Use --reals A --fakes B")
    for name in RUN_ONLY:
        if getattr(options, name) != parser.get_default(name):
            raise UsageError(f"--{name}: is for the model of a run. Leave it out with --reals and --fakes")
    if options.count is not None and options.count < 1:
        raise UsageError(f"--count {options.count}: must be positive. Use 1 or more")
    parse_size(options.resolution)
    check_writable("--json", options.json)


def _score_sets(
    options: argparse.Namespace, comparison_options: ComparisonOptions, world: World, console: RunConsole
) -> None:
    """Score on this rank; rank 0 prints and writes.

    Raises:
        RunError: after the others were written, if a score could not be computed.
    """
    from paragan.config.sections import DeviceOptions
    from paragan.train.callbacks.scoring import format_failures, format_scores_with_notes
    from paragan.train.compare_sets import prepare_comparison, score_comparison
    from paragan.train.rank_agreement import LOAD_TIMEOUT_S, check_same_sets, check_same_versions, on_all_ranks
    from paragan.train.session import set_process_options

    set_process_options(DeviceOptions(), world)
    check_same_versions(world)

    def prepare() -> Comparison:
        return prepare_comparison(options.reals, options.fakes, comparison_options)

    comparison = on_all_ranks(world, prepare, LOAD_TIMEOUT_S)
    check_same_sets(comparison, world)
    for line in comparison.describe():
        console.print(line)
    start_s = time.monotonic()

    def show_metric(name: str) -> None:
        if world.is_main and (sys.stderr.isatty() or time.monotonic() - start_s > QUIET_S):
            sys.stderr.write(f"computing {name}\n")

    with progress_bar("images", enabled=world.is_main) as show_progress:
        scores = score_comparison(
            comparison,
            world.all_ranks,
            world.device,
            lambda side, done, count: show_progress(done, count),
            show_metric,
        )
    for line in format_scores_with_notes(scores):
        console.print(line)
    if options.json and world.is_main:
        _write_json(comparison, scores, Path(options.json))
    failures = format_failures(scores)
    if failures:
        raise RunError("; ".join(dict.fromkeys(failures)), same_on_all_ranks=True)


def _write_json(comparison: Comparison, scores: list[Score], out: Path) -> None:
    from paragan.core.atomic_write import atomic_output

    with atomic_output(out) as path:
        path.write_text(json.dumps(comparison.to_json(scores), indent=1) + "\n")
