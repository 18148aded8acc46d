"""Data that arrives in time: the figures of docs/data.md, on a machine of two cores that does nothing else.

    python -m benchmarks.data.pipeline congestion --images NPZ [--seconds 90]     about 35 minutes
    python -m benchmarks.data.pipeline decode     --images NPZ                    about 5 minutes
    python -m benchmarks.data.pipeline plot                                       docs/figures/pipeline.svg, and tables

congestion : how long a training step waits, when nginx serves JPEG shards over a network that is congested in bursts
             (congestion.py): ours, torch's DataLoader as it is by default and at its best, webdataset (loaders.py)
decode     : JPEGs a second from local shards, beside the decoder alone (decoding.py)

NPZ holds images uint8 [N, 32, 32, 3] and labels, say a part of CIFAR-10.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.data import data_wait as waiting
from benchmarks.data import decoding
from benchmarks.data import make_shards as shards
from benchmarks.data.congested_server import CongestedNetwork, CongestedServer, make_bursts, measure_network, run_server
from benchmarks.data.plot_pipeline import plot_pipeline
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.plots import DOCS, RESULTS, STYLE

WORKERS = PREFETCH = (2, 4, 8, 16)
BEST_DATALOADER = "dataloader, best setting"
CONGESTION, DECODE = RESULTS / "pipeline_congestion.json", RESULTS / "pipeline_decode.json"


# Congestion -----------------------------------------------------------------------------------------------


def benchmark_congestion(options: argparse.Namespace) -> dict[str, Any]:
    network = CongestedNetwork(options.latency_ms, options.mb_s, options.times)
    when = make_bursts(
        options.seconds, options.seed, calm_s=options.calm, length_s=options.burst, interval_s=options.apart
    )
    play = waiting.ContestOptions(options.seconds, options.step_ms, options.real, when)
    result: dict[str, Any] = {"network": dataclasses.asdict(network), "play": dataclasses.asdict(play)}
    with tempfile.TemporaryDirectory() as folder:
        data = shards.write_shards(options.images, Path(folder), 64)
        with run_server(Path(folder), network) as server:
            size = (Path(folder) / data.names[0]).stat().st_size
            result |= {
                "data": data.describe(),
                "checked": measure_network(server, data.names[0], size, int(data.size.mean())),
            }
            print(json.dumps(result["checked"], indent=1), flush=True)
            contestants: dict[str, tuple[str, dict[str, int]]] = {
                name: (name, {}) for name in ("ours", "dataloader", "webdataset")
            }
            if options.search_seconds:
                result["search"] = search_dataloader(
                    server, data, dataclasses.replace(play, seconds=options.search_seconds)
                )
                best = result["search"][0]
                contestants[BEST_DATALOADER] = (
                    "dataloader",
                    {"workers": best["workers"], "prefetch": best["prefetch"]},
                )
            selected = {name: one for name, one in contestants.items() if name in (options.only or contestants)}
            result["contestants"] = run_interleaved(server, data, play, selected, options.rounds)
    return result


def search_dataloader(
    server: CongestedServer, data: shards.Shards, play: waiting.ContestOptions
) -> list[dict[str, Any]]:
    """Every static setting of DataLoader for a short while: first the one that waits least, of equals (to 1 % of the
    time) the one that takes least memory."""
    rows = []
    for workers in WORKERS:
        for prefetch in PREFETCH:
            options = {"workers": workers, "prefetch": prefetch}
            one = waiting.measure_contestant("dataloader", options, server, data, play)
            rows.append({**options, **{name: one[name] for name in ("share", "memory_mb", "start_s")}})
            print(rows[-1], flush=True)
    return sorted(rows, key=lambda row: (round(row["share"], 2), row["memory_mb"]))


def run_interleaved(
    server: CongestedServer,
    data: shards.Shards,
    play: waiting.ContestOptions,
    selected: dict[str, tuple[str, dict[str, int]]],
    rounds: int,
) -> dict[str, Any]:
    """A block each a round, all over the same bursts; time lines are kept of the first round."""
    result: dict[str, Any] = {label: {"options": one[1], "rounds": []} for label, one in selected.items()}
    names = list(selected)
    for r in range(rounds):
        for label in names[r % len(names) :] + names[: r % len(names)]:
            name, options = selected[label]
            one = waiting.measure_contestant(name, options, server, data, play)
            lines = {part: one.pop(part) for part in ("timeline", "gauges", "waits")}
            result[label] |= {} if r else lines
            result[label]["rounds"].append(one)
            displayed = f"waits {one['share']:.1%}, {one['images_s']:.0f} images/s, {one['memory_mb']:.0f} MB"
            print(f"round {r + 1}, {label}: {displayed}", flush=True)
    for one in result.values():
        one["share"] = statistics.median(row["share"] for row in one["rounds"])
    return result


# Decoding -------------------------------------------------------------------------------------------------


def benchmark_decode(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"sizes": []}
    for resolution, count, batches in ((64, 8192, 512), (256, 2048, 96)):
        with tempfile.TemporaryDirectory() as folder:
            data = shards.write_shards(options.images, Path(folder), resolution, count)
            result["sizes"].append(decoding.measure(Path(folder), data, batches, options.rounds))
        print(format_table(DECODE_HEAD, decode_rows(result["sizes"][-1])), flush=True)
    return result


# Tables and the plot --------------------------------------------------------------------------------------

DECODE_HEAD = ("JPEGs a second", "median", "lowest", "highest", "of the decoder", "ours is faster")
WAIT_HEAD = (
    "", "waits", "lowest", "highest", "before bursts", "in bursts", "wait p50, ms", "p99", "max",
    "images/s", "CPU, s", "memory, MB", "start, s",
)  # fmt: skip


def decode_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, one in result["contestants"].items():
        rates = (one["images_s"]["median"], *one["images_s"]["range"])
        shares = [f"{one['of_the_limit']:.0%}", f"{one['ours_is_faster']:.2f}x"]
        rows.append([f"{result['data']['resolution']} px, {name}", *(f"{rate:,.0f}" for rate in rates), *shares])
    return rows


def wait_rows(result: dict[str, Any]) -> list[list[str]]:
    """Medians over rounds."""
    rows = []
    for label, one in result["contestants"].items():
        shares = [row["share"] for row in one["rounds"]]

        def median(read: Any, rounds: list[dict[str, Any]] = one["rounds"]) -> float:
            return statistics.median(read(row) for row in rounds)

        parts = [one["share"], min(shares), max(shares)]
        parts += [median(lambda row: row["share_before_bursts"]), median(lambda row: row["share_in_bursts"] or 0.0)]
        waits = [median(lambda row, p=p: row["wait_ms"][p]) for p in ("p50", "p99", "max")]
        rest = [median(lambda row, p=p: row[p]) for p in ("images_s", "cpu_s", "memory_mb", "start_s")]
        setting = f" ({one['options']['workers']} x {one['options']['prefetch']})" if one["options"] else ""
        numbers = [f"{part:.1%}" for part in parts] + [f"{number:,.0f}" for number in (*waits, *rest[:3])]
        rows.append([label + setting, *numbers, f"{rest[3]:.1f}"])
    return rows


def plot(options: argparse.Namespace) -> None:
    waited, decoded = (json.loads(path.read_text()) for path in (options.congestion, options.decode))
    with matplotlib.rc_context(STYLE):
        options.out.parent.mkdir(exist_ok=True)
        plot_pipeline(waited).savefig(options.out, metadata={"Date": None})
    print(_markdown(WAIT_HEAD, wait_rows(waited)), "\n")
    print(_markdown(DECODE_HEAD, [row for one in decoded["sizes"] for row in decode_rows(one)]))


def _markdown(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command, out in ((benchmark_congestion, CONGESTION), (benchmark_decode, DECODE)):
        sub = commands.add_parser(command.__name__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(run=command)
        sub.add_argument("--images", type=Path, required=True, metavar="NPZ", help="images uint8 [N, H, W, 3], labels")
        sub.add_argument("--json", metavar="F", default=str(out), help="where everything is written")
        sub.add_argument(
            "--rounds", type=int, default=3 if command is benchmark_congestion else 5, help="turns of everyone"
        )
        if command is benchmark_congestion:
            _about_congestion(sub)
    sub = commands.add_parser("plot")
    sub.set_defaults(run=plot)
    sub.add_argument("--congestion", type=Path, default=CONGESTION, metavar="F")
    sub.add_argument("--decode", type=Path, default=DECODE, metavar="F")
    sub.add_argument("--out", type=Path, default=DOCS / "pipeline.svg", metavar="F")
    options = parser.parse_args()
    if options.run is plot:
        return plot(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nginx ends with it
    about = {"machine": describe_machine(), "command": f"pipeline.py {' '.join(sys.argv[1:])}"}
    print(format_machine(about["machine"]), flush=True)
    result = {**about, **options.run(options)}
    if options.run is benchmark_congestion:
        print(format_table(WAIT_HEAD, wait_rows(result)))
    return save_json(options.json, result)


def _about_congestion(sub: argparse.ArgumentParser) -> None:
    network = CongestedNetwork()
    sub.add_argument("--seconds", type=float, default=90.0, help="of everyone's turn")
    sub.add_argument("--search-seconds", type=float, default=30.0, help="of each of DataLoader's settings; 0 for none")
    sub.add_argument("--only", nargs="+", metavar="NAME", help="of the contestants")
    sub.add_argument("--step-ms", type=float, default=300.0, help="an emulated training step, of 64 images")
    sub.add_argument("--real", action="store_true", help="a small network learns instead")
    sub.add_argument("--latency-ms", type=float, default=network.latency_ms, help="of a request in the calm")
    sub.add_argument("--mb-s", type=float, default=network.mb_s, help="of the link in the calm")
    sub.add_argument("--times", type=float, default=network.burst_slowdown, help="how much worse both are in a burst")
    sub.add_argument("--calm", type=float, default=10.0, help="seconds before the first burst")
    sub.add_argument("--burst", type=float, nargs=2, default=(2.0, 5.0), help="seconds, between these")
    sub.add_argument("--apart", type=float, nargs=2, default=(2.0, 4.0), help="seconds, between these")
    sub.add_argument("--seed", type=int, default=0, help="of the bursts")


if __name__ == "__main__":
    main()
