"""Predicted beside measured: strategies on laboratories of slow networks, with emulated computing (docs/prediction.md).

    sudo python -m benchmarks.plan.prediction measure --json F [--only NAME] [--seconds X]     about 15 minutes in all
    python -m benchmarks.plan.prediction report --json F [--figure G]                    what the model says of it now
    sudo python -m benchmarks.plan.prediction scaling --json F                                 1 to 8 hosts
    sudo python -m benchmarks.plan.prediction own --json F            an exchange and a topology of tests/own_strategies

`measure` goes on where it was cut off: networks that are in F already are not measured again. Each is one laboratory
(lab.py) in which every host first measures, all at the same time, what predictions are made of: the links (as
`paragan bench links`), what handling numbers costs, and what a worker takes that plays alone. Then strategies play
(the game of `paragan bench strategies`), round after round without meeting; a step is the median over blocks of the
slowest rank's mean. No time of a strategy enters any prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.comm.flat_params import bucket_bytes
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World
from paragan.config.run import Run
from paragan.config.sections import DataOptions
from paragan.core.rng import LaneRng
from paragan.core.schema import from_dict, from_yaml
from paragan.core.types import Batch
from paragan.plan.links import Links, links_to_yaml
from paragan.plan.measure_exchange import WARM_UP_ROUNDS, make_emulated_game, play_role_round
from paragan.plan.measure_links import measure_links
from paragan.plan.predict.predict import Prediction, predict
from paragan.plan.profile.codec_cost import measure_codec_cost
from paragan.plan.profile.profile import NUM_READY_PARTS, DeviceInfo, Profile, TurnProfile
from paragan.plan.select.candidates import parse_strategy
from paragan.strategies.sync import Sync

BENCHMARKS_DIR = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS_DIR.parent / "tests"))
from own_strategies import OWN_STRATEGIES  # noqa: E402

BLOCKS = 4
D_COMPUTE_SHARE = 0.5  # of computing, D's own
LANES = 2  # of a host, an image each
BATCH_FACTOR = 3  # a worker is measured with its images, and with so many times as many


@dataclass(frozen=True)
class Case:
    """A network, a game, and the strategies that are compared there."""

    links: tuple[str, ...]
    params: int
    compute_ms: float
    strategies: tuple[str, ...]


EXACT_STRATEGIES = ("sync", "sync+int8", "sync+sign", "gossip", "async+snapshot_every=4")
CASES: dict[str, Case] = {
    "4 hosts, 20 Mbit/s, 1 ms": Case(("--hosts=4", "--rate=20mbit", "--latency=1ms"), 400_000, 250, EXACT_STRATEGIES),
    "8 hosts, 50 Mbit/s, 2 ms": Case(
        ("--hosts=8", "--rate=50mbit", "--latency=2ms"), 800_000, 400,
        ("sync", "sync+int4", "gossip+topology=ring", "gossip+int8", "sync+sync_period=4"),
    ),
    "4 hosts, 100 Mbit/s, 5 ms": Case(
        ("--hosts=4", "--rate=100mbit", "--latency=5ms"), 1_000_000, 250,
        ("sync", "sync+int8", "quantized+int4", "gossip", "async+max_lead_rounds=2"),
    ),
    "8 hosts, 100 Mbit/s": Case(
        ("--hosts=8", "--rate=100mbit"), 2_000_000, 500,
        ("sync", "quantized", "gossip", "gossip+int4", "async+split=3:5+snapshot_every=2"),
    ),
    "2 hosts, 200 Mbit/s, 10 ms": Case(
        ("--hosts=2", "--rate=200mbit", "--latency=10ms"), 4_000_000, 250,
        ("sync", "sync+bf16", "sync+int8", "gossip", "async+snapshot_wire=int8"),
    ),
    "4 hosts, 200 Mbit/s, 20 ms": Case(
        ("--hosts=4", "--rate=200mbit", "--latency=20ms"), 2_000_000, 300,
        ("sync", "sync+sign", "gossip", "gossip+rounds=2", "sync+sync_period=4+int8"),
    ),
    "8 hosts, 200 Mbit/s, 20 ms": Case(
        ("--hosts=8", "--rate=200mbit", "--latency=20ms"), 400_000, 400,
        ("sync", "sync+order=simultaneous", "gossip", "gossip+topology=ring", "async-gossip"),
    ),
    "4 hosts, 500 Mbit/s": Case(
        ("--hosts=4", "--rate=500mbit"), 8_000_000, 300,
        ("sync", "sync+int8", "sync+bf16", "gossip+topology=ring", "async+snapshot_every=4"),
    ),
    "2 hosts, 1 Gbit/s": Case(
        ("--hosts=2", "--rate=1gbit"), 16_000_000, 300,
        ("sync", "sync+int8", "quantized+sign", "gossip", "async+max_lead_rounds=2"),
    ),
    "4 hosts, 1 Gbit/s": Case(
        ("--hosts=4", "--rate=1gbit"), 8_000_000, 300,
        ("sync", "sync+int4", "gossip+int8", "sync+sync_period=2", "async+split=1:3+max_lead_rounds=2"),
    ),
    "4 hosts, 50 Mbit/s, 50 ms": Case(
        ("--hosts=4", "--rate=50mbit", "--latency=50ms"), 200_000, 300,
        ("sync", "sync+int8", "gossip", "gossip+sync_period=4", "async+max_lead_rounds=2"),
    ),
    "4 hosts, one of 20 Mbit/s, 100 Mbit/s, 1 ms": Case(
        ("--hosts=4", "--rates=20mbit,100mbit", "--latency=1ms"), 600_000, 300,
        ("sync", "sync+int8", "gossip+topology=ring", "async-gossip", "sync+sync_period=4"),
    ),
}  # fmt: skip
OWN_CASES: dict[str, Case] = {
    "4 hosts, 100 Mbit/s, 5 ms": Case(
        ("--hosts=4", "--rate=100mbit", "--latency=5ms"), 1_000_000, 250, ("sync", *OWN_STRATEGIES)
    ),
    "4 hosts, 500 Mbit/s": Case(("--hosts=4", "--rate=500mbit"), 4_000_000, 250, ("sync", *OWN_STRATEGIES)),
}
SCALING_STRATEGIES = ("sync", "sync+int8", "gossip", "async+max_lead_rounds=2")


def make_strategy(name: str) -> Any:
    """Make a strategy of the library, or one of OWN_STRATEGIES."""
    return OWN_STRATEGIES[name]() if name in OWN_STRATEGIES else parse_strategy(name)


# measured, on every host ----------------------------------------------------------------------------------------------


def measure_on_host(options: argparse.Namespace) -> None:
    """One host's part."""
    torch.set_num_threads(1)
    case = Case((), options.params, options.compute_ms, tuple(options.strategies.split(",")))
    result: dict[str, Any] = {}
    with World.join(LaunchInfo.from_environment(), torch.device("cpu"), 120.0) as world:
        links = measure_links(world) if world.size > 1 else Links(hosts=1, up=1e9, latency=0.0)
        result["links"] = from_yaml(links_to_yaml(links), "links")
        result["handling"] = _median_over_hosts(world, measure_codec_cost())
        result["turns"] = [
            _median_over_hosts(world, _measure_worker(world.size, case, many)) for many in (1, BATCH_FACTOR)
        ]
        result["strategies"] = {}
        for name in case.strategies:
            result["strategies"][name] = _measure_throughput(world, case, name, options.seconds)
            if world.is_main:
                print(f"{name:<40}{1000 * result['strategies'][name]['step_s']:9.1f} ms", flush=True)
    if world.is_main:
        Path(options.json).write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    os._exit(0)  # threads of links that were left may still wait


def _median_over_hosts(world: World, mine: dict[str, float]) -> dict[str, float]:
    """The medians over hosts, which all measured at once."""
    rows = _gather_row(world, list(mine.values()))
    return {name: statistics.median(row[i] for row in rows) for i, name in enumerate(mine)}


def _gather_row(world: World, row: Sequence[float]) -> list[list[float]]:
    rows, work = world.all_ranks.all_gather(torch.tensor(row, dtype=torch.float64))
    work.wait()
    return rows.tolist()


def _measure_worker(ranks: int, case: Case, many: int) -> dict[str, float]:
    """Seconds of a worker's turns, alone."""
    lanes = LANES
    game = make_emulated_game(case.params, case.compute_ms / 1000 / lanes, D_COMPUTE_SHARE, bucket_bytes(Sync().wire))
    role = Sync().role(game, World.solo(), lanes * many)
    workers = [Batch(torch.zeros(lanes * many, 1), None, LaneRng(0, 0, role.share.lanes, 1))]
    times: dict[str, list[float]] = {}
    for step in range(4):
        for (turn,) in role.round:
            start, name = time.perf_counter(), turn.player.name
            turn.player.prepare_step(step)
            with turn.player.exchanging(turn.exchange, step, passes=1):
                list(turn.backward(workers, step))
                times.setdefault(f"{name} backward", []).append(time.perf_counter() - start)
            turn.player.step(step, 1)
            times.setdefault(f"{name} whole", []).append(time.perf_counter() - start)
    return {"batch": lanes * many} | {name: statistics.median(some[1:]) for name, some in times.items()}


def _measure_throughput(world: World, case: Case, name: str, seconds: float) -> dict[str, Any]:
    """Rounds that nobody waits between: the slowest rank's mean in each of some blocks, the median."""
    strategy, lanes = make_strategy(name), LANES * world.size
    game = make_emulated_game(case.params, case.compute_ms / 1000 / LANES, D_COMPUTE_SHARE, bucket_bytes(strategy.wire))
    role = strategy.role(game, world, lanes)
    workers = [Batch(torch.zeros(len(role.share.lanes), 1), None, LaneRng(0, 0, role.share.lanes, 1))]
    period = max(getattr(strategy, field, 1) for field in ("sync_period", "snapshot_every"))
    warm = period * -(-WARM_UP_ROUNDS // period)
    start = time.perf_counter()
    for step in range(warm):
        play_role_round(role, workers, step)
    if role.drain:  # before all meet
        role.drain()
    elapsed_s = max(row[0] for row in _gather_row(world, [(time.perf_counter() - start) / warm]))
    each = period * max(1, round(seconds / BLOCKS / elapsed_s / period))
    marks = [time.perf_counter()]
    for block in range(BLOCKS):
        for step in range(warm + block * each, warm + (block + 1) * each):
            play_role_round(role, workers, step)
        marks.append(time.perf_counter())
    if role.drain:
        role.drain()
    blocks = [(b - a) / each for a, b in itertools.pairwise(marks)]
    slowest = [max(block) for block in zip(*_gather_row(world, blocks))]
    return {"step_s": statistics.median(slowest), "blocks": slowest, "rounds": BLOCKS * each}


def measure_case(case: Case, seconds: float) -> dict[str, Any]:
    """What was found in one laboratory."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        what = [f"--params={case.params}", f"--compute-ms={case.compute_ms}", f"--seconds={seconds}", f"--json={rows}"]
        command = [
            sys.executable,
            "-m",
            "benchmarks.plan.prediction",
            "inside",
            *what,
            f"--strategies={','.join(case.strategies)}",
        ]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.netns_lab", *case.links, "--timeout=900", "--", *command], check=True
        )
        return {"links": list(case.links), "found": json.loads(rows.read_text())}


# predicted ------------------------------------------------------------------------------------------------------------


def make_profile(case: Case, result: dict[str, Any]) -> Profile:
    """The profile of the emulated worker, as it was measured alone; its gradients come as `emulated` makes them."""
    g, d = (1 - D_COMPUTE_SHARE) / 4, D_COMPUTE_SHARE / 8  # of a pass
    fills = {"G": [g + 2 * d + 2 * g * (i + 1) / NUM_READY_PARTS for i in range(NUM_READY_PARTS)]}
    fills["D"] = [g + 4 * d + 2 * d * (i + 1) / NUM_READY_PARTS for i in range(NUM_READY_PARTS)]

    def turn(name: str, row: dict[str, float]) -> TurnProfile:
        backward, full = row[f"{name} backward"], row[f"{name} whole"]
        ready = tuple(backward * at / fills[name][-1] for at in fills[name])
        return TurnProfile(round(row["batch"]), ready, backward, full)

    device = DeviceInfo("cpu", "emulated", 1, "float32", 1.0, 1, torch.__version__, "")
    turns = {name: tuple(turn(name, row) for row in result["turns"]) for name in ("G", "D")}
    params = (case.params - case.params // 2, case.params // 2)
    return Profile("emulated", "", device, params, 0.0, turns["G"], turns["D"], codec_cost=result["handling"])


def predict_case(case: Case, result: dict[str, Any], name: str) -> Prediction:
    links = from_dict(Links, result["links"])
    lanes = LANES * links.hosts
    data = DataOptions(resolution=1, channels=1, labels=False)
    run = dataclasses.replace(Run(), strategy=make_strategy(name), batch=lanes, lanes=lanes, data=data)
    run = dataclasses.replace(run, device=dataclasses.replace(run.device, precision="float32"))
    return predict(run, make_profile(case, result), links)


def compare_case(name: str, case: Case, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every strategy."""
    rows = []
    for strategy, row in result["strategies"].items():
        expected = predict_case(case, result, strategy)
        ratio = expected.step_s / row["step_s"]
        spent = {reason: round(1000 * s, 1) for reason, s in expected.breakdown_s.items()}
        rows.append(
            {
                "network": name, "strategy": strategy, "measured_ms": 1000 * row["step_s"],
                "predicted_ms": 1000 * expected.step_s, "error": ratio - 1, "spent_ms": spent,
            }
        )  # fmt: skip
    return rows


def is_choice_right(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether what is predicted to be fastest is, or within 5 % of it."""
    first, best = (min(rows, key=lambda row: row[what]) for what in ("predicted_ms", "measured_ms"))
    behind = first["measured_ms"] / best["measured_ms"] - 1
    return {"chosen": first["strategy"], "best": best["strategy"], "behind": behind, "right": behind <= 0.05}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    networks = dict.fromkeys(row["network"] for row in rows)
    errors = sorted(abs(row["error"]) for row in rows)
    choices = {name: is_choice_right([row for row in rows if row["network"] == name]) for name in networks}
    right = sum(one["right"] for one in choices.values())
    return {
        "configurations": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "choices_right": f"{right} of {len(choices)}",
        "choices": choices,
    }


def format_report(options: argparse.Namespace) -> None:
    stored = json.loads(Path(options.json).read_text())
    rows: list[dict[str, Any]] = []
    for name, laboratory in stored["laboratories"].items():
        if options.only in (None, name):
            rows += compare_case(name, CASES[name], laboratory["found"])
    for row in rows:
        times = f"{row['measured_ms']:9.1f}{row['predicted_ms']:9.1f}{row['error']:+8.1%}"
        print(f"{row['network']:<40}{row['strategy']:<36}{times}  {row['spent_ms']}")
    summary = summarize(rows)
    for name, one in summary.pop("choices").items():
        print(f"{name:<40}{one['chosen']:<36}best: {one['best']} ({one['behind']:+.1%})")
    print(summary)
    if options.only is None:
        stored["rows"], stored["summary"] = rows, summarize(rows)
        Path(options.json).write_text(json.dumps(stored, indent=1) + "\n")
        if options.figure:
            from benchmarks.plots import plot_prediction, save_plot

            save_plot(lambda: plot_prediction(rows), Path(options.figure))


def run_measure(options: argparse.Namespace) -> None:
    from benchmarks.lib.timing import describe_machine, format_machine, save_json

    path = Path(options.json)
    stored = json.loads(path.read_text()) if path.exists() else {"machine": describe_machine(), "laboratories": {}}
    print(format_machine(stored["machine"]))
    for name, case in CASES.items():
        if options.only in (None, name) and name not in stored["laboratories"]:
            print(f"\n{name}", flush=True)
            stored["laboratories"][name] = measure_case(case, options.seconds)
            save_json(options.json, stored)


def run_own(options: argparse.Namespace) -> None:
    """Measure and predict the strategies of tests/own_strategies.py, of which the library knows nothing."""
    from benchmarks.lib.timing import describe_machine, save_json

    rows: list[dict[str, Any]] = []
    result = {"machine": describe_machine(), "rows": rows, "laboratories": {}}
    for name, case in OWN_CASES.items():
        result["laboratories"][name] = measure_case(case, options.seconds)
        rows += compare_case(name, case, result["laboratories"][name]["found"])
        save_json(options.json, result)
    for row in rows:
        print(
            f"{row['network']:<28}{row['strategy']:<36}{row['measured_ms']:9.1f}{row['predicted_ms']:9.1f}{row['error']:+8.1%}"
        )


def run_scaling(options: argparse.Namespace) -> None:
    """1 to 8 hosts, each with as many images as one has alone."""
    from benchmarks.lib.timing import describe_machine, save_json

    path = Path(options.json)
    stored = json.loads(path.read_text()) if path.exists() else {"machine": describe_machine(), "hosts": {}}
    for hosts in (1, 2, 4, 8):
        case = Case(
            (f"--hosts={hosts}", "--rate=200mbit"), 1_000_000, 400, SCALING_STRATEGIES if hosts > 1 else ("sync",)
        )
        if str(hosts) not in stored["hosts"]:
            stored["hosts"][str(hosts)] = measure_case(case, options.seconds)
        rows = compare_case(f"{hosts} hosts", case, stored["hosts"][str(hosts)]["found"])
        single = 1000 * stored["hosts"]["1"]["found"]["strategies"]["sync"]["step_s"]
        for row in rows:
            row |= {what: single / row[f"{what}_ms"] for what in ("measured", "predicted")}
            print(f"{hosts} {row['strategy']:<20}{row['measured']:8.1%}{row['predicted']:8.1%}", flush=True)
        stored["hosts"][str(hosts)]["rows"] = rows
        save_json(options.json, stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, action in {
        "measure": run_measure,
        "report": format_report,
        "scaling": run_scaling,
        "own": run_own,
        "inside": measure_on_host,
    }.items():
        p = kinds.add_parser(name)
        p.set_defaults(action=action)
        p.add_argument("--json", required=True, metavar="F")
        p.add_argument("--only", choices=CASES, metavar="NAME")
        p.add_argument("--seconds", type=float, default=8.0, metavar="X", help="of each strategy (8)")
        p.add_argument("--figure", metavar="G")
        p.add_argument("--params", type=int, default=1_000_000)
        p.add_argument("--compute-ms", type=float, default=0.0)
        p.add_argument("--strategies", default="sync")
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
