"""`paragan bench ...`: measure links, strategies and data where they are; a worker: cli_step.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from paragan.cli.bench_step import step_parser
from paragan.cli.common import _check_writable, _command, _in_world, _nothing_left, _without_ranks
from paragan.core.errors import Unusable

BENCH_HELP = """
  paragan bench step digits                                          what one worker does: time, memory, noise
  paragan bench links --ranks 2 --out links.yaml                     what lies between ranks, and between hosts
  paragan bench strategies --ranks 2 --strategies sync,sync+int8     what agreeing costs
  paragan bench pipeline --data photos/                              how fast images come, and how fast they could
"""

STRATEGIES_HELP = """Under any launcher (torchrun, srun), or --ranks N: the game has no networks,
so what is timed is agreeing. `sync+int4` is a strategy with another wire, `async+split=1:3+lead=2` with other fields
(without commas); --rounds is rounded up to whole periods of snapshot_every and every.
"""

LINKS_HELP = """Under any launcher (torchrun, srun), or --ranks N. Pairs of hosts one after another:
latency, rates one way, the other, and both at once; then all at once. About a second a pair, more where latency is
high. The file can be written by hand too: see docs/plan.md.
"""


def bench_parser(commands: Any) -> None:
    about = "measure a worker, links, strategies on the links there are, or data"
    bench = _command(commands, "bench", None, about, more=BENCH_HELP)
    kinds = bench.add_subparsers(required=True, metavar="step|links|strategies|pipeline")
    step_parser(kinds)
    _links_parser(kinds)
    _strategies_parser(kinds)
    _pipeline_parser(kinds)


def _links_parser(kinds: Any) -> None:
    p = _command(kinds, "links", _bench_links, "measure what lies between ranks, and between hosts", more=LINKS_HELP)
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("--out", metavar="F", help="write the links to this file")


def _bench_links(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.plan.links import written_links

    _nothing_left(rest)
    _check_ranks(options.ranks)
    _check_writable("--out", options.out)

    def measure(world: Any, screen: Any) -> None:
        from paragan.plan.measure_links import measure_links

        links = measure_links(world, screen.say)
        if world.first:
            sys.stdout.write(f"{links.told()}\n")
            if options.out:
                Path(options.out).write_text(written_links(links), "utf-8")

    return _among_ranks(options, arguments, measure)


def _among_ranks(options: argparse.Namespace, arguments: list[str], action: Any) -> int:
    """Do it on the CPUs of all ranks of the launcher, or of as many as are asked for."""
    from paragan.comm.world import Place
    from paragan.config.run import Run

    place = Place.from_environment()
    if options.ranks and place.size == 1:
        from paragan.train.local_launcher import launch

        return launch(options.ranks, _without_ranks(arguments))
    run = dataclasses.replace(Run(), device=dataclasses.replace(Run().device, kind="cpu"))
    return _in_world(run, place, action)


def _check_ranks(ranks: int | None) -> None:
    if ranks is not None and ranks < 1:
        raise Unusable(f"--ranks {ranks} must be 1 or more")


def _strategies_parser(kinds: Any) -> None:
    about = "measure what strategies cost on the links there are"
    p = _command(kinds, "strategies", _bench, about, more=STRATEGIES_HELP)
    p.add_argument(
        "--strategies",
        default="sync,quantized",
        metavar="S,S+WIRE,S+FIELD=V",
        help="in turn, with a wire and fields of their own: sync,sync+int8,async+lead=2+split=1:3 (sync,quantized)",
    )
    size = p.add_mutually_exclusive_group()
    size.add_argument("--params", default="8M", metavar="N", help="parameters of both players together (8M)")
    size.add_argument("--recipe", metavar="R", help="as many parameters as this recipe has")
    p.add_argument("--compute-ms", type=float, default=0.0, metavar="X", help="wait so long a step, as computing would")
    p.add_argument("--compute-share", type=float, default=0.5, metavar="X", help="D's own part of it (0.5)")
    p.add_argument("--rounds", type=int, default=10, metavar="N", help="steps that are timed (10)")
    p.add_argument("--ranks", type=int, metavar="N", help="start N processes on this machine")
    p.add_argument("--json", metavar="F", help="also write the rows to this file")


def _pipeline_parser(kinds: Any) -> None:
    p = _command(kinds, "pipeline", _bench_pipeline, "measure how fast images come, and how fast they could")
    p.add_argument("--data", required=True, metavar="D", help="whatever `paragan train --data` takes")
    p.add_argument("--resolution", type=int, metavar="R", help="crop and resize to this (chosen from the data)")
    p.add_argument("--batch", type=int, default=64, metavar="N", help="images of a batch (64)")
    p.add_argument("--seconds", type=float, default=10.0, metavar="X", help="how long to measure (10)")
    p.add_argument("--json", metavar="F", help="also write the figures to this file")


def _bench_pipeline(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.dataset import load
    from paragan.data.streaming import Streamed
    from paragan.data.tools.throughput import measure

    _nothing_left(rest)
    if options.batch < 1 or not 0 < options.seconds < 1e5:
        raise Unusable("--batch must be 1 or more, --seconds above 0")
    images = load(options.data, resolution=options.resolution, hold="stream")
    assert isinstance(images.images, Streamed)
    sys.stdout.write(images.describe() + "\n")
    speed = measure(images.images, options.batch, options.seconds)
    sys.stdout.write(speed.line() + "\n")
    if options.json:
        Path(options.json).write_text(json.dumps(dataclasses.asdict(speed), indent=1) + "\n")
    return 0


def _bench(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    _nothing_left(rest)
    if options.rounds < 1 or not 0 <= options.compute_ms < 1e6 or not 0 <= options.compute_share <= 1:
        raise Unusable("--rounds must be 1 or more, --compute-ms from 0 to 1e6, --compute-share between 0 and 1")
    _check_ranks(options.ranks)
    strategies = {name: _strategy(name) for name in options.strategies.split(",")}
    _check_writable("--json", options.json)
    return _among_ranks(options, arguments, lambda world, screen: _probe(options, strategies, world))


def _strategy(name: str) -> Any:
    """A strategy by its name, with `+wire` and `+field=value`."""
    from paragan.config.run import Run
    from paragan.core.schema import build, override
    from paragan.strategies.per_label_wcgan import NAMES

    kind, *more = name.split("+")
    fields = [word if "=" in word else f"wire={word}" for word in more]
    if kind in NAMES:
        raise Unusable(f"--strategies {kind}: its games send each other nothing; name what is within, such as sync")
    settings = [(f"strategy.{field}", value) for field, _, value in (word.partition("=") for word in fields)]
    return build(Run, override({"strategy": {"name": kind}}, settings)).strategy


def _probe(options: argparse.Namespace, strategies: dict[str, Any], world: Any) -> None:
    import torch

    from paragan.plan.measure_exchange import HEADING, probe

    torch.set_num_threads(1)
    params = _parameters_of(options.recipe) if options.recipe else _count(options.params)
    rows = []
    for name, strategy in strategies.items():
        settings = {"compute_ms": options.compute_ms, "share": options.compute_share, "rounds": options.rounds}
        row = probe(strategy, name, world, params=params, **settings)
        rows.append(dataclasses.asdict(row))
        if world.first:
            sys.stdout.write((HEADING + "\n" if len(rows) == 1 else "") + row.line() + "\n")
            sys.stdout.flush()
    if world.first and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def _count(text: str) -> int:
    """8M, 500k or a plain number."""
    unit = {"k": 1_000, "M": 1_000_000, "G": 1_000_000_000}.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise Unusable(f"--params {text} is not a number: 8M, 500k or 8000000") from None


def _parameters_of(name: str) -> int:
    import torch

    from paragan.nets import Spec
    from paragan.recipes import recipe
    from paragan.train.build import build_nets

    run = recipe(name)
    pair = build_nets(run, Spec(run.data.resolution or 64, run.data.channels or 3, 10), torch.device("cpu"))
    return sum(p.numel() for net in (pair.g, pair.d) for p in net.parameters())
