"""`paragan bench step`: the profile of one worker."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, parse_settings
from paragan.config.validate import validate
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run

STEP_HELP = """One worker plays the game alone, here: how long a turn takes by batch, what memory and
which operations it takes, how long it waits for data, and how noisy its gradients are, which says beyond which batch
more images a step stop paying. Any field of the run can be set: --nets.width=64. Plans go by it: docs/profiling.md.
"""


def add_step_command(kinds: Any) -> None:
    p = add_command(kinds, "step", _bench_step, "measure a step of one worker", details=STEP_HELP)
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
    p.add_argument("--remeasure", action="store_true", help="measure even what was measured before")
    p.add_argument("--out", metavar="F", help="also write the profile to this file")


def _bench_step(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.common import check_writable
    from paragan.comm.world import LaunchInfo
    from paragan.plan.profile.profile import profile_to_yaml
    from paragan.plan.profile.table import format_profile

    if LaunchInfo.from_environment().size > 1:
        raise UsageError("bench step is of one worker: start it without a launcher")
    check_writable("--out", options.out)
    asked = _profile_options(options)
    profile, file = measure_run_profile(_build_run(options, rest), asked)
    text = profile_to_yaml(profile)
    if options.out:
        Path(options.out).write_text(text, "utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in [*format_profile(profile), describe_cache_file(file)]))
    return 0


def describe_cache_file(file: Path) -> str:
    """What is said of a profile that was to be kept there."""
    return f"kept in {file}" if os.access(file, os.R_OK) else f"not kept, since {file} cannot be written"


def _profile_options(options: argparse.Namespace) -> Any:
    from paragan.core.schema import from_dict
    from paragan.plan.profile.profiler import ProfileOptions

    words = options.batches.split(",") if options.batches else []
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise UsageError(f"--batches {options.batches}: numbers of images, 1 or more: 8,16,32")
    fields = {"seconds": options.seconds, "noise_kimg": options.noise_kimg, "remeasure": options.remeasure}
    try:
        return from_dict(ProfileOptions, {"batches": [int(word) for word in words], **fields})
    except UsageError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from error


def _build_run(options: argparse.Namespace, rest: list[str]) -> Any:
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else to_dict(get_recipe(options.recipe))
    given = [("data.path", json.dumps(options.data))] if options.data else []
    run, _ = build_run(data, [*given, *parse_settings(rest)])
    validate(run)
    return run


def measure_run_profile(run: Run, options: Any) -> Any:
    """The profile of a run, and where it is kept; whether it takes time is said."""
    from paragan.comm.world import World
    from paragan.config.resolve import make_spec
    from paragan.config.user_code import is_user_defined
    from paragan.core.devices import pick_device
    from paragan.plan.profile.profile_cache import structure_digest
    from paragan.plan.profile.profiler import profile_run
    from paragan.train.build import build_networks
    from paragan.train.prepare import prepare
    from paragan.train.session import init_from_model, set_threads

    set_threads(run, World.solo())
    prepared = prepare(run)
    run = prepared.run
    images = prepared.dataset
    device = pick_device(run.device.kind)

    def make_networks() -> Any:
        nets = build_networks(run, make_spec(run, images), device)
        return init_from_model(nets, Path(run.init_from)) if run.init_from else nets

    structure = ""
    if is_user_defined(run.nets, run.objective):
        nets = make_networks()
        structure = structure_digest(nets.g, nets.d)
    return profile_run(
        run, images, make_networks, device, options, structure, lambda text: sys.stderr.write(f"{text}\n")
    )
