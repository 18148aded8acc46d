"""`paragan plan --layout`: where a round's time goes, and what is faster here; and a run that decides by it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from paragan.config.validate import validate
from paragan.core.errors import Unusable
from paragan.plan.tune.layout_tuner import _changes, _word

MOST_ROWS = 14
HELP = """--layout plays a few rounds in every layout that may be faster: channels last or not in G and
in D, precision, threads, fused optimizers and more; then prints where a round's time goes, before and after, and what
each decision is worth. About a minute, kept under $XDG_CACHE_HOME/paragan. `paragan train --device.layout=measured`
trains with what was found. Any field of the run can be set: --batch=64. See docs/layout.md.
"""


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--layout", action="store_true", help="where a round's time goes here, and what is faster")
    p.add_argument("--again", action="store_true", help="measure even what was measured before")


def layout(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the operations of a round before and after, and every decision with its share."""
    from paragan.comm.world import World
    from paragan.config.resolve import load_images
    from paragan.core.devices import pick_device
    from paragan.train.trainer import resolved

    run = _asked(options, rest)
    validate(run)
    images = load_images(run)
    run = resolved(run, images)
    if run.per_label:
        raise Unusable("--layout looks at one game, and per-label plays many: leave --strategy out")
    world = World.solo(pick_device(run.device.kind))
    for line in told(run, images, world, options.again):
        sys.stdout.write(f"{line}\n")
    return 0


def _asked(options: argparse.Namespace, rest: list[str]) -> Any:
    from pathlib import Path

    from paragan.cli.common import _absolute, _settings
    from paragan.core.schema import plain, read_yaml
    from paragan.recipes import asked, recipe

    name = options.recipe
    data = read_yaml(Path(name)) if Path(name).suffix in (".yaml", ".yml") else plain(recipe(name))
    given = [(name, str(value)) for name in ("batch", "lanes", "kimg") if (value := getattr(options, name)) is not None]
    given += [("data.path", json.dumps(options.data))] if options.data else []
    return _absolute(asked(data, [*given, *_settings(rest)], "none")[0])


def told(run: Any, images: Any, world: Any, again: bool) -> list[str]:
    """The tables of a resolved run."""
    from paragan.core.schema import with_fields
    from paragan.plan.profile.hardware import peak_flops
    from paragan.plan.tune.layout_tuner import Worker, decided
    from paragan.plan.tune.op_profile import operations, tile_of

    device, found = world.device, decided(run, images, world, again)
    best = with_fields(run, found.layout)
    worker = Worker(run, images, world)
    tables = []
    for layout in ({}, found.layout):
        play = worker.player({**layout, "device.compile": False, "device.graph": False})  # cannot be looked into
        play()
        tables.append(operations(play, device, tile_of(device, best.device.precision)))
    peak = peak_flops(device, best.device.precision)
    timed = worker([{}, found.layout])
    flops = _flops(worker.run, images)
    lines = [f"{run.recipe}: {worker.run.batch} images a round in {worker.run.lanes} lanes, on {device.type}", ""]
    lines += _operations(*tables)
    lines += ["", *_decisions(run, best, found), ""]
    use = [f"{flops / min(t.seconds) / peak:.0%} {when}" for t, when in zip(timed, ("before", "after"))]
    product = f"of the {peak / 1e9:.3g} GFLOP/s that a product in {best.device.precision} reaches here"
    lines += [f"{product}, {', '.join(use)}"] if flops else []
    changed = " ".join(f"--{name}={_word(value)}" for name, value in _changes(run, found).items())
    return [*lines, f"--device.layout=measured does this; or: {changed}" if changed else "nothing is faster than this"]


def _flops(run: Any, images: Any) -> float:
    """Multiplications and additions of one round; 0 where they cannot be foreseen."""
    from paragan.plan.round_cost import few, of_a_round

    plainly = dataclasses.replace(run, device=dataclasses.replace(run.device, compile=False, kind="cpu", graph=False))
    try:
        return of_a_round(plainly, few(images)).flops
    except RuntimeError:  # networks of the user's own that ask for numbers
        return 0.0


def _operations(before: Any, after: Any) -> list[str]:
    """operation, shape, share of padding, share of the round and milliseconds before and after."""
    wholes = sum(before.values()), sum(after.values())
    rows = sorted({*before, *after}, key=lambda op: -max(before.get(op, 0.0), after.get(op, 0.0)))
    head = ["operation", "shape", "padding", "before", "ms", "after", "ms"]
    cells = [
        [op.name, op.shape, f"{op.padding:.0%}" if op.shape else ""]
        + [text for t, whole in zip((before, after), wholes) for text in _part(t.get(op), whole)]
        for op in rows[:MOST_ROWS]
    ]
    left = [sum(t.get(op, 0.0) for op in rows[MOST_ROWS:]) for t in (before, after)]
    if len(rows) > MOST_ROWS:
        cells.append(
            [f"{len(rows) - MOST_ROWS} smaller", "", "", *_part(left[0], wholes[0]), *_part(left[1], wholes[1])]
        )
    return _table([head, *cells])


def _part(seconds: float | None, whole: float) -> list[str]:
    return ["", ""] if seconds is None else [f"{seconds / whole:.1%}", f"{1000 * seconds:.2f}"]


def _decisions(before: Any, after: Any, found: Any) -> list[str]:
    from paragan.core.devices import pick_device
    from paragan.core.schema import field_of
    from paragan.plan.tune.layout_tuner import BUILD_S, switches_of

    untried = f"not tried: a run under {BUILD_S / 60:g} minutes"
    rows = [["decision", "before", "after", "times slower without"]]
    for switch in switches_of(before, pick_device(before.device.kind)):
        field = next(iter(switch.choices[0]))
        share = found.shares.get(switch.name)
        values = _word(field_of(before, field)), _word(field_of(after, field))
        worth = "" if share is None else f"{share:.2f}"
        rows.append([switch.name, *values, worth if field in found.layout else untried])
    return [*_table(rows), f"in all {found.total:.2f} times faster"]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]
