"""`paragan bench step`: measure the profile of one worker."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, parse_settings
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.plan.profile.profile import Profile
    from paragan.plan.profile.profiler import ProfileOptions

STEP_HELP = """One worker trains alone on this machine. Measured are the time of a turn by batch, memory, the
share of each kind of operation, the time that it waits for data, and the noise scale of the gradients: with a larger
batch, more images per step save few steps. Plans use the profile (docs/profiling.md). Any field of the run can be set:
--nets.width=64.
"""


def add_step_command(kinds: Any) -> None:
    """Add `paragan bench step`."""
    p = add_command(kinds, "step", _bench_step, "measure a step of one worker", details=STEP_HELP)
    p.add_argument("recipe", metavar="RECIPE | RUN.yaml", help="a named recipe, or the run.yaml of a run")
    p.add_argument("--data", metavar="PATH", help="as for `paragan train --data`")
    p.add_argument("--batches", metavar="N,N", help="images on this worker, whole lanes (from one lane to the batch)")
    p.add_argument("--seconds", type=float, default=30.0, metavar="X", help="about how long to measure (30)")
    p.add_argument(
        "--noise-kimg",
        type=float,
        default=10.0,
        metavar="K",
        help="training before the noise scale is measured (10; 0: do not measure it)",
    )
    p.add_argument("--remeasure", action="store_true", help="measure again what is in the cache")
    p.add_argument("--out", metavar="F", help="also write the profile to this file")


def _bench_step(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.cli.common import check_writable
    from paragan.comm.launch_info import LaunchInfo
    from paragan.plan.profile.profile import profile_to_yaml
    from paragan.plan.profile.table import format_profile

    if LaunchInfo.from_environment().size > 1:
        raise UsageError("bench step: measures one worker. Start it without a launcher")
    check_writable("--out", options.out)
    profile_options = _profile_options(options)
    profile, file = measure_run_profile(_build_run(options, rest), profile_options)
    text = profile_to_yaml(profile)
    if options.out:
        Path(options.out).write_text(text, "utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in [*format_profile(profile), describe_cache_file(file)]))
    return 0


def describe_cache_file(file: Path) -> str:
    """Say where a profile is cached, or that it could not be."""
    return f"cached in {file}" if os.access(file, os.R_OK) else f"not cached: {file} cannot be written"


def _profile_options(options: argparse.Namespace) -> ProfileOptions:
    from paragan.core.schema import from_dict
    from paragan.plan.profile.profiler import ProfileOptions

    words = options.batches.split(",") if options.batches else []
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise UsageError(f"--batches {options.batches}: they must be numbers of images, 1 or more. Use 8,16,32")
    fields = {"seconds": options.seconds, "noise_kimg": options.noise_kimg, "remeasure": options.remeasure}
    try:
        return from_dict(ProfileOptions, {"batches": [int(word) for word in words], **fields})
    except UsageError as error:
        raise UsageError("--" + str(error).replace("_", "-", 1)) from error


def _build_run(options: argparse.Namespace, rest: list[str]) -> Run:
    from paragan.config.validate import validate
    from paragan.core.schema import read_yaml, to_dict
    from paragan.recipes import build_run, get_recipe

    is_file = Path(options.recipe).suffix in (".yaml", ".yml")
    data = read_yaml(Path(options.recipe)) if is_file else to_dict(get_recipe(options.recipe))
    settings = parse_settings(rest)
    if options.data:
        settings.insert(0, ("data.path", json.dumps(options.data)))
    run, _ = build_run(data, settings)
    validate(run)
    return run


def measure_run_profile(run: Run, options: ProfileOptions) -> tuple[Profile, Path]:
    """Return the profile of a run and its file in the cache. Progress is written to stderr."""
    from paragan.comm.world import World
    from paragan.config.resolve import make_spec
    from paragan.config.user_code import is_user_defined
    from paragan.core.devices import pick_device
    from paragan.plan.profile.profile_cache import structure_digest
    from paragan.plan.profile.profiler import profile_run
    from paragan.train.build import build_networks
    from paragan.train.prepare import prepare
    from paragan.train.session import init_from_model, set_process_options

    set_process_options(run.device, World.solo())
    prepared = prepare(run)
    run = prepared.run
    images = prepared.dataset
    device = pick_device(run.device.kind)

    def make_networks() -> Any:
        nets = build_networks(run, make_spec(run.data, images), device)
        return init_from_model(nets, Path(run.init_from)) if run.init_from else nets

    structure = ""
    if is_user_defined(run.nets, run.objective):
        nets = make_networks()
        structure = structure_digest(nets.g, nets.d)
    return profile_run(
        run, images, make_networks, device, options, structure, lambda text: sys.stderr.write(f"{text}\n")
    )
