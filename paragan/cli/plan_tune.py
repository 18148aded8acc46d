"""`paragan plan --tune`: where the time of a round goes, and which settings are faster on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.data.dataset import Dataset
    from paragan.plan.tune.greedy_search import TrialTimes, TuneResult
    from paragan.plan.tune.op_profile import Operation

MAX_ROWS = 14  # of operations
HELP = """--tune times a few rounds with each setting that may be faster: channels last in G and in D, precision,
threads, fused optimizers and more. It prints where the time of a round goes, before and after, and the gain of each
decision. It takes about a minute; the result is cached under $XDG_CACHE_HOME/paragan, and used by
`paragan train --device.tune=measured`. Any field of the run can be set: --batch=64. See docs/tuning.md.
"""


def add_tune_options(p: argparse.ArgumentParser) -> None:
    """Add the options of --tune."""
    p.add_argument("--tune", action="store_true", help="show where a round's time goes here, and what is faster")
    p.add_argument("--remeasure", action="store_true", help="measure again what is in the cache")


def print_tuning(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the operations of a round before and after, and the gain of every decision."""
    from paragan.comm.world import World
    from paragan.core.devices import pick_device
    from paragan.train.prepare import prepare

    run = _build_run(options, rest)
    prepared = prepare(run)
    run = prepared.run
    images = prepared.dataset
    if run.per_label:
        raise UsageError("--strategy per-label: --tune is for one game. Leave --strategy out")
    world = World.solo(pick_device(run.device.kind))
    for line in format_tuning(run, images, world, options.remeasure):
        sys.stdout.write(f"{line}\n")
    return 0


def _build_run(options: argparse.Namespace, rest: list[str]) -> Any:
    from pathlib import Path

    from paragan.cli.common import parse_settings, with_absolute_paths
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else to_dict(get_recipe(options.recipe))
    settings: list[tuple[str, str]] = []
    for name in ("batch", "lanes", "kimg"):
        value = getattr(options, name)
        if value is not None:
            settings.append((name, str(value)))
    if options.data:
        settings.append(("data.path", json.dumps(options.data)))
    run, _ = build_run(data, [*settings, *parse_settings(rest)], "none")
    return with_absolute_paths(run)


def format_tuning(run: Run, dataset: Dataset, world: World, remeasure: bool) -> list[str]:
    """Tune a resolved run, and format the tables."""
    from paragan.core.schema import replace_fields
    from paragan.plan.profile.hardware import measure_peak_flops
    from paragan.plan.tune.layout_tuner import TrialWorker, format_setting, layout_changes, tune_run
    from paragan.plan.tune.op_profile import profile_ops, tile_for

    device = world.device
    result = tune_run(run, dataset, world, remeasure)
    best = replace_fields(run, result.overrides)
    worker = TrialWorker(run, dataset, world)
    op_seconds: list[dict[Operation, float]] = []
    for overrides in ({}, result.overrides):
        # Single operations are only visible in uncompiled passes.
        trial = worker.make_trial({**overrides, "device.compile": False, "device.capture_passes": False})
        trial()
        op_seconds.append(profile_ops(trial, device, tile_for(device, best.device.precision)))
    peak_flops = measure_peak_flops(device, best.device.precision)
    trial_times = worker([{}, result.overrides])
    lines = [
        f"{run.recipe}: {worker.run.batch} images a round in {worker.run.lanes} lanes, on {device.type}",
        "",
        *_operation_table(op_seconds[0], op_seconds[1]),
        "",
        *_decision_table(run, best, result),
        "",
        *_utilization_lines(_estimate_flops(worker.run, dataset), trial_times, peak_flops, best.device.precision),
    ]
    changed = " ".join(f"--{name}={format_setting(value)}" for name, value in layout_changes(run, result).items())
    lines.append(f"use --device.tune=measured, or {changed}" if changed else "the current settings are the fastest")
    return lines


def _utilization_lines(round_flops: float, times: Sequence[TrialTimes], peak_flops: float, precision: str) -> list[str]:
    if not round_flops:
        return []
    before, after = (f"{round_flops / min(trial.round_s) / peak_flops:.0%}" for trial in times)
    peak = f"{peak_flops / 1e9:.3g} GFLOP/s that a matrix product in {precision} reaches here"
    return [f"of the {peak}, {before} before, {after} after"]


def _estimate_flops(run: Run, dataset: Dataset) -> float:
    """Return the operations of a round; 0 if user-defined networks cannot be estimated."""
    from paragan.plan.round_cost import blank_dataset, estimate_round

    device = dataclasses.replace(run.device, compile=False, kind="cpu", capture_passes=False)
    try:
        return estimate_round(dataclasses.replace(run, device=device), blank_dataset(dataset)).flops
    except RuntimeError:  # their forward pass depends on the values of tensors
        return 0.0


def _operation_table(before: Mapping[Operation, float], after: Mapping[Operation, float]) -> list[str]:
    """Format for each operation its shape, padding, and share and milliseconds of a round, before and after."""
    before_s = sum(before.values())
    after_s = sum(after.values())
    operations = sorted({*before, *after}, key=lambda op: -max(before.get(op, 0.0), after.get(op, 0.0)))
    rows = [["operation", "shape", "padding", "before", "ms", "after", "ms"]]
    for op in operations[:MAX_ROWS]:
        padding = f"{op.padding_share:.0%}" if op.shape else ""
        times = [*_share_and_ms(before.get(op), before_s), *_share_and_ms(after.get(op), after_s)]
        rows.append([op.name, op.shape, padding, *times])
    smaller = operations[MAX_ROWS:]
    if smaller:
        smaller_before_s = sum(before.get(op, 0.0) for op in smaller)
        smaller_after_s = sum(after.get(op, 0.0) for op in smaller)
        times = [*_share_and_ms(smaller_before_s, before_s), *_share_and_ms(smaller_after_s, after_s)]
        rows.append([f"{len(smaller)} smaller", "", "", *times])
    return _align_columns(rows)


def _share_and_ms(seconds: float | None, total_s: float) -> list[str]:
    return ["", ""] if seconds is None else [f"{seconds / total_s:.1%}", f"{1000 * seconds:.2f}"]


def _decision_table(before: Run, after: Run, result: TuneResult) -> list[str]:
    from paragan.core.devices import pick_device
    from paragan.core.schema import get_field
    from paragan.plan.tune.layout_tuner import MIN_RUN_FOR_BUILD_S, format_setting, options_for

    rows = [["decision", "before", "after", "slowdown without"]]
    for option in options_for(before, pick_device(before.device.kind)):
        field = next(iter(option.choices[0]))
        slowdown = result.slowdown_without.get(option.name)
        if field not in result.overrides:
            gain = f"not tried: the run takes less than {MIN_RUN_FOR_BUILD_S / 60:g} minutes"
        elif slowdown is None:
            gain = ""
        else:
            gain = f"{slowdown:.2f}x"
        rows.append(
            [option.name, format_setting(get_field(before, field)), format_setting(get_field(after, field)), gain]
        )
    return [*_align_columns(rows), f"in all {result.speedup:.2f} times faster"]


def _align_columns(rows: list[list[str]]) -> list[str]:
    """Align the first two columns left and the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2])]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        lines.append("  ".join(cells))
    return lines
