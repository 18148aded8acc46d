"""`paragan plan --tune`: where a round's time goes, and what is faster here; and a run that decides by it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError
from paragan.plan.tune.layout_tuner import format_setting, layout_changes

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.config.run import Run
    from paragan.data.dataset import Dataset

MAX_ROWS = 14
HELP = """--tune plays a few rounds in every layout that may be faster: channels last or not in G and
in D, precision, threads, fused optimizers and more; then prints where a round's time goes, before and after, and what
each decision is worth. About a minute, kept under $XDG_CACHE_HOME/paragan. `paragan train --device.tune=measured`
trains with what was found. Any field of the run can be set: --batch=64. See docs/tuning.md.
"""


def add_tune_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tune", action="store_true", help="where a round's time goes here, and what is faster")
    p.add_argument("--remeasure", action="store_true", help="measure even what was measured before")


def print_tuning(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the operations of a round before and after, and every decision with its share."""
    from paragan.comm.world import World
    from paragan.core.devices import pick_device
    from paragan.train.prepare import prepare

    run = _build_run(options, rest)
    prepared = prepare(run)
    run = prepared.run
    images = prepared.dataset
    if run.per_label:
        raise UsageError("--tune looks at one game, and per-label plays many: leave --strategy out")
    world = World.solo(pick_device(run.device.kind))
    for line in format_tuning(run, images, world, options.remeasure):
        sys.stdout.write(f"{line}\n")
    return 0


def _build_run(options: argparse.Namespace, rest: list[str]) -> Any:
    from pathlib import Path

    from paragan.cli.common import parse_settings, with_absolute_paths
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    name = options.recipe
    data = read_yaml(Path(name)) if Path(name).suffix in (".yaml", ".yml") else to_dict(get_recipe(name))
    given = [(name, str(value)) for name in ("batch", "lanes", "kimg") if (value := getattr(options, name)) is not None]
    given += [("data.path", json.dumps(options.data))] if options.data else []
    return with_absolute_paths(build_run(data, [*given, *parse_settings(rest)], "none")[0])


def format_tuning(run: Run, dataset: Dataset, world: World, remeasure: bool) -> list[str]:
    """The tables of a resolved run."""
    from paragan.core.schema import replace_fields
    from paragan.plan.profile.hardware import measure_peak_flops
    from paragan.plan.tune.layout_tuner import TrialWorker, tune_run
    from paragan.plan.tune.op_profile import profile_ops, tile_for

    device, found = world.device, tune_run(run, dataset, world, remeasure)
    best = replace_fields(run, found.overrides)
    worker = TrialWorker(run, dataset, world)
    tables = []
    for layout in ({}, found.overrides):
        play = worker.make_trial(
            {**layout, "device.compile": False, "device.capture_passes": False}
        )  # cannot be looked into
        play()
        tables.append(profile_ops(play, device, tile_for(device, best.device.precision)))
    peak = measure_peak_flops(device, best.device.precision)
    timed = worker([{}, found.overrides])
    flops = _estimate_flops(worker.run, dataset)
    lines = [f"{run.recipe}: {worker.run.batch} images a round in {worker.run.lanes} lanes, on {device.type}", ""]
    lines += _operation_table(*tables)
    lines += ["", *_decision_table(run, best, found), ""]
    use = [f"{flops / min(t.round_s) / peak:.0%} {when}" for t, when in zip(timed, ("before", "after"))]
    product = f"of the {peak / 1e9:.3g} GFLOP/s that a product in {best.device.precision} reaches here"
    lines += [f"{product}, {', '.join(use)}"] if flops else []
    changed = " ".join(f"--{name}={format_setting(value)}" for name, value in layout_changes(run, found).items())
    return [*lines, f"--device.tune=measured does this; or: {changed}" if changed else "nothing is faster than this"]


def _estimate_flops(run: Run, dataset: Dataset) -> float:
    """Multiplications and additions of one round; 0 where they cannot be foreseen."""
    from paragan.plan.round_cost import blank_dataset, estimate_round

    plainly = dataclasses.replace(
        run, device=dataclasses.replace(run.device, compile=False, kind="cpu", capture_passes=False)
    )
    try:
        return estimate_round(plainly, blank_dataset(dataset)).flops
    except RuntimeError:  # networks of the user's own that ask for numbers
        return 0.0


def _operation_table(before: Any, after: Any) -> list[str]:
    """operation, shape, share of padding, share of the round and milliseconds before and after."""
    wholes = sum(before.values()), sum(after.values())
    rows = sorted({*before, *after}, key=lambda op: -max(before.get(op, 0.0), after.get(op, 0.0)))
    head = ["operation", "shape", "padding", "before", "ms", "after", "ms"]
    cells = [
        [op.name, op.shape, f"{op.padding_share:.0%}" if op.shape else ""]
        + [text for t, whole in zip((before, after), wholes) for text in _share_and_ms(t.get(op), whole)]
        for op in rows[:MAX_ROWS]
    ]
    left = [sum(t.get(op, 0.0) for op in rows[MAX_ROWS:]) for t in (before, after)]
    if len(rows) > MAX_ROWS:
        cells.append(
            [
                f"{len(rows) - MAX_ROWS} smaller",
                "",
                "",
                *_share_and_ms(left[0], wholes[0]),
                *_share_and_ms(left[1], wholes[1]),
            ]
        )
    return _align_columns([head, *cells])


def _share_and_ms(seconds: float | None, total_s: float) -> list[str]:
    return ["", ""] if seconds is None else [f"{seconds / total_s:.1%}", f"{1000 * seconds:.2f}"]


def _decision_table(before: Any, after: Any, result: Any) -> list[str]:
    from paragan.core.devices import pick_device
    from paragan.core.schema import get_field
    from paragan.plan.tune.layout_tuner import MIN_RUN_FOR_BUILD_S, options_for

    untried = f"not tried: a run under {MIN_RUN_FOR_BUILD_S / 60:g} minutes"
    rows = [["decision", "before", "after", "times slower without"]]
    for switch in options_for(before, pick_device(before.device.kind)):
        field = next(iter(switch.choices[0]))
        share = result.slowdown_without.get(switch.name)
        values = format_setting(get_field(before, field)), format_setting(get_field(after, field))
        worth = "" if share is None else f"{share:.2f}"
        rows.append([switch.name, *values, worth if field in result.overrides else untried])
    return [*_align_columns(rows), f"in all {result.speedup:.2f} times faster"]


def _align_columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]
