"""`paragan bench links`, `strategies` and `data`: measure links, exchanges and data. (`step`: bench_step.py.)"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.bench_step import add_step_command
from paragan.cli.common import (
    add_command,
    add_label_options,
    check_no_extra_arguments,
    check_writable,
    name_label_options,
    parse_size,
    run_in_world,
    without_ranks_option,
)
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.world import World
    from paragan.train.console import RunConsole

BENCH_HELP = """
  paragan bench step digits                                          time, memory and noise scale of one worker
  paragan bench links --ranks 2 --out links.yaml                     bandwidth and latency between hosts
  paragan bench strategies --ranks 2 --strategies sync,sync+int8     time of the exchanges
  paragan bench data --data photos/                                  images per second of the data pipeline
"""

STRATEGIES_HELP = """Start it with a launcher (torchrun, srun, mpirun), or with --ranks N. The game has no networks, so
what is timed is the exchange. `sync+int4` is a strategy with another wire,
`async+split=1:3+max_lead_rounds=2` one with other fields (without commas). --rounds is rounded up to whole
periods of snapshot_every and sync_period.
"""

LINKS_HELP = """Start it with a launcher (torchrun, srun, mpirun), or with --ranks N. For each pair of hosts in turn,
latency and rates are measured, in one direction, in the other, and in both; then for all hosts at once. A pair takes
about a second, more if the latency is high. The file can also be written by hand: see docs/planning.md.
"""


def add_bench_command(commands: Any) -> None:
    """Add `paragan bench` and its subcommands."""
    summary = "measure a worker, links, exchanges of strategies, or the data pipeline"
    bench = add_command(commands, "bench", None, summary, details=BENCH_HELP)
    kinds = bench.add_subparsers(required=True, metavar="step|links|strategies|data")
    add_step_command(kinds)
    _add_links_command(kinds)
    _add_strategies_command(kinds)
    _add_data_command(kinds)


def _add_links_command(kinds: Any) -> None:
    p = add_command(kinds, "links", _bench_links, "measure the links between hosts", details=LINKS_HELP)
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("--out", metavar="F", help="write the links to this file")


def _bench_links(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.plan.links import links_to_yaml

    check_no_extra_arguments(rest)
    _check_ranks(options.ranks)
    check_writable("--out", options.out)

    def measure(world: World, console: RunConsole) -> None:
        from paragan.plan.measure_links import measure_links

        links = measure_links(world, console.print)
        if world.is_main:
            sys.stdout.write(f"{links.describe()}\n")
            if options.out:
                Path(options.out).write_text(links_to_yaml(links), "utf-8")

    return _run_on_cpu_ranks(options, arguments, measure)


def _run_on_cpu_ranks(options: argparse.Namespace, arguments: list[str], action: Any) -> int:
    """Run `action` on the CPUs of all ranks of the launcher, or of the --ranks that are started here."""
    from paragan.comm.launch_info import LaunchInfo
    from paragan.config.run import Run

    launch_info = LaunchInfo.from_environment()
    if options.ranks and launch_info.size == 1:
        from paragan.train.local_launcher import launch

        return launch(options.ranks, without_ranks_option(arguments))
    run = dataclasses.replace(Run(), device=dataclasses.replace(Run().device, kind="cpu"))
    return run_in_world(run, launch_info, action)


def _check_ranks(ranks: int | None) -> None:
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: it must be 1 or more")


def _add_strategies_command(kinds: Any) -> None:
    summary = "measure the exchanges of strategies on these links"
    p = add_command(kinds, "strategies", _bench_strategies, summary, details=STRATEGIES_HELP)
    p.add_argument(
        "--strategies",
        default="sync,quantized",
        metavar="S,S+WIRE,S+FIELD=V",
        help="strategies, with their wires and fields: sync,sync+int8,async+split=1:3 (sync,quantized)",
    )
    size = p.add_mutually_exclusive_group()
    size.add_argument("--params", default="8M", metavar="N", help="parameters of both players together (8M)")
    size.add_argument("--recipe", metavar="R", help="as many parameters as this recipe has")
    p.add_argument("--compute-ms", type=float, default=0.0, metavar="X", help="emulated computing time of a step (0)")
    p.add_argument("--compute-share", type=float, default=0.5, metavar="X", help="D's part of the computing time (0.5)")
    p.add_argument("--rounds", type=int, default=10, metavar="N", help="timed steps (10)")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("--json", metavar="F", help="also write the rows to this file")


def _add_data_command(kinds: Any) -> None:
    p = add_command(kinds, "data", _bench_data, "measure how fast the data pipeline makes images")
    p.add_argument("--data", required=True, metavar="D", help="as for `paragan train --data`")
    p.add_argument("--resolution", metavar="R|WxH", help="crop and resize to this (chosen from the data)")
    add_label_options(p, "whether to read labels (yes)")
    p.add_argument(
        *("--range", "--data.range"),
        default="auto",
        metavar="MIN:MAX",
        help="stored values that become black and white: auto, full or MIN:MAX (auto)",
    )
    p.add_argument("--batch", type=int, default=64, metavar="N", help="images of a batch (64)")
    p.add_argument("--seconds", type=float, default=10.0, metavar="X", help="how long to measure (10)")
    p.add_argument("--json", metavar="F", help="also write the figures to this file")


def _bench_data(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.dataset import load_data
    from paragan.data.streaming import StreamingImages
    from paragan.data.tools.throughput import measure_throughput

    check_no_extra_arguments(rest)
    if options.batch < 1 or not 0 < options.seconds < 1e5:
        raise UsageError("--batch, --seconds: out of range. Use --batch 1 or more, --seconds above 0")
    size = parse_size(options.resolution)
    labels = options.labels and (options.label_key or True)
    with name_label_options():
        images = load_data(
            options.data,
            resolution=size.resolution if size else None,
            labels=labels,
            cache="stream",
            value_range=options.range,
        )
    assert isinstance(images.images, StreamingImages)
    sys.stdout.write(images.describe() + "\n")
    throughput = measure_throughput(images.images, options.batch, options.seconds)
    sys.stdout.write(throughput.to_line() + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(dataclasses.asdict(throughput), indent=1) + "\n")
    return 0


def _bench_strategies(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    check_no_extra_arguments(rest)
    if options.rounds < 1 or not 0 <= options.compute_ms <= 1e6 or not 0 <= options.compute_share <= 1:
        raise UsageError(
            "--rounds, --compute-ms, --compute-share: out of range. Use --rounds 1 or more, --compute-ms from 0 to "
            "1e6, --compute-share from 0 to 1"
        )
    _check_ranks(options.ranks)
    strategies = _parse_strategies(options.strategies)
    check_writable("--json", options.json)
    return _run_on_cpu_ranks(options, arguments, lambda world, console: _measure_strategies(options, strategies, world))


def _parse_strategies(text: str) -> dict[str, Any]:
    from paragan.plan.select.candidates import parse_strategy

    strategies = {name: parse_strategy(name) for name in text.split(",")}
    for name, strategy in strategies.items():
        if strategy.per_label:
            raise UsageError(f"--strategies {name}: its games send nothing to each other. Use the strategy of one game")
    return strategies


def _measure_strategies(options: argparse.Namespace, strategies: dict[str, Any], world: World) -> None:
    import torch

    from paragan.plan.measure_exchange import TABLE_HEADER, measure_exchange

    torch.set_num_threads(1)
    params = _count_recipe_parameters(options.recipe) if options.recipe else _parse_count(options.params)
    rows = []
    for name, strategy in strategies.items():
        settings = {
            "compute_ms": options.compute_ms,
            "d_compute_share": options.compute_share,
            "rounds": options.rounds,
        }
        row = measure_exchange(strategy, name, world, num_params=params, **settings)
        rows.append(dataclasses.asdict(row))
        if world.is_main:
            if len(rows) == 1:
                sys.stdout.write(TABLE_HEADER + "\n")
            sys.stdout.write(row.to_line() + "\n")
            sys.stdout.flush()
    if world.is_main and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def _parse_count(text: str) -> int:
    """Parse "8M", "500k" or a plain number."""
    unit = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise UsageError(f"--params {text}: it must be a number. Use 8M, 500k or 8000000") from None


def _count_recipe_parameters(name: str) -> int:
    import torch

    from paragan.nets import Spec
    from paragan.recipes import get_recipe
    from paragan.train.build import build_networks

    run = get_recipe(name)
    spec = Spec(run.data.resolution or 64, run.data.channels or 3, 10)
    networks = build_networks(run, spec, torch.device("cpu"))
    return sum(p.numel() for net in (networks.g, networks.d) for p in net.parameters())
