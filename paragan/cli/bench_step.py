"""`paragan bench step`: the profile of one worker."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from paragan.cli.common import _command, _settings
from paragan.config.validate import validate
from paragan.core.errors import Unusable

STEP_HELP = """One worker plays the game alone, here: how long a turn takes by batch, what memory and
which operations it takes, how long it waits for data, and how noisy its gradients are, which says beyond which batch
more images a step stop paying. Any field of the run can be set: --nets.width=64. Plans go by it: docs/profile.md.
"""


def step_parser(kinds: Any) -> None:
    p = _command(kinds, "step", _bench_step, "measure a step of one worker", more=STEP_HELP)
    p.add_argument("recipe", metavar="RECIPE | RUN.yaml", help="a named recipe, or the record of a run")
    p.add_argument("--data", metavar="PATH", help="whatever `paragan train --data` takes")
    p.add_argument("--batches", metavar="N,N", help="images on this worker, whole lanes (from one lane to the batch)")
    p.add_argument("--seconds", type=float, default=30.0, metavar="X", help="about how long to measure (30)")
    p.add_argument(
        "--noise-kimg",
        type=float,
        default=10.0,
        metavar="K",
        help="train so far before noise is taken (10; 0: not)",
    )
    p.add_argument("--again", action="store_true", help="measure even what was measured before")
    p.add_argument("--out", metavar="F", help="also write the profile to this file")


def _bench_step(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.common import _check_writable
    from paragan.comm.world import Place
    from paragan.plan.profile.profile import written_profile
    from paragan.plan.profile.table import lines

    if Place.from_environment().size > 1:
        raise Unusable("bench step is of one worker: start it without a launcher")
    _check_writable("--out", options.out)
    asked = _asked(options)
    profile, file = profiled(_run(options, rest), asked)
    text = written_profile(profile)
    if options.out:
        Path(options.out).write_text(text, "utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in [*lines(profile), where(file)]))
    return 0


def where(file: Path) -> str:
    """What is said of a profile that was to be kept there."""
    return f"kept in {file}" if os.access(file, os.R_OK) else f"not kept, since {file} cannot be written"


def _asked(options: argparse.Namespace) -> Any:
    from paragan.core.schema import build
    from paragan.plan.profile.profiler import Asked

    words = options.batches.split(",") if options.batches else []
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise Unusable(f"--batches {options.batches}: numbers of images, 1 or more: 8,16,32")
    fields = {"seconds": options.seconds, "noise_kimg": options.noise_kimg, "again": options.again}
    try:
        return build(Asked, {"batches": [int(word) for word in words], **fields})
    except Unusable as error:
        raise Unusable(f"--{str(error).replace('_', '-', 1)}") from error


def _run(options: argparse.Namespace, rest: list[str]) -> Any:
    from paragan.core.schema import plain, read_yaml
    from paragan.recipes import asked, recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else plain(recipe(options.recipe))
    given = [("data.path", json.dumps(options.data))] if options.data else []
    run, _ = asked(data, [*given, *_settings(rest)])
    validate(run)
    return run


def profiled(run: Any, asked: Any) -> Any:
    """The profile of a run, and where it is kept; whether it takes time is said."""
    from paragan.comm.world import World
    from paragan.config.resolve import load_images, spec_of
    from paragan.config.user_code import is_own
    from paragan.core.devices import pick_device
    from paragan.plan.profile.profile_cache import structure_of
    from paragan.plan.profile.profiler import profile_of
    from paragan.train.build import build_nets
    from paragan.train.session import initialise, set_threads
    from paragan.train.trainer import resolved

    set_threads(run, World.solo())
    images = load_images(run)
    run = resolved(run, images)
    device = pick_device(run.device.kind)

    def pair() -> Any:
        nets = build_nets(run, spec_of(run, images), device)
        return initialise(nets, Path(run.init_from)) if run.init_from else nets

    structure = ""
    if is_own(run.nets, run.objective):
        nets = pair()
        structure = structure_of(nets.g, nets.d)
    return profile_of(run, images, pair, device, asked, structure, lambda text: sys.stderr.write(f"{text}\n"))
