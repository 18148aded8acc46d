"""Simulate weak scaling: the paper's setting up to 1,024 workers, and home computers up to 100,000.

    python -m benchmarks.comm.scale --json benchmarks/results/scale.json --figure docs/figures/scale.svg

Only the time of the simulation itself is measured. A worker's speed is an assumed share of an assumed peak, and links
are assumed. docs/planning.md shows the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from benchmarks.lib import timing
from paragan.core.types import run_discriminator
from paragan.nets import Spec
from paragan.plan.cost import count_turn_flops
from paragan.plan.large_scale.fleet import FleetConfig, FleetResult, simulate_fleet
from paragan.plan.large_scale.round_time import TurnCost, WorkerRound
from paragan.plan.links import Link
from paragan.plan.memory import ResourceCounterMode, fake_tensor_mode
from paragan.plan.profile.codec_cost import DEFAULT_CODEC_COST
from paragan.plan.profile.profile import NUM_READY_PARTS, TurnProfile
from paragan.plan.select.candidates import parse_strategy
from paragan.recipes import get_recipe
from paragan.train.build import build_networks

FLOP_COUNT_IMAGES = 8
PAPER_EFFICIENCY = 0.91  # ParaGAN: BigGAN at 128 px on 1,024 TPU nodes, from 64
# a core of a TPU v3: 61.5 Tflop/s in bf16 (half a chip), of which a GAN is assumed to reach three tenths; a torus
PAPER_NODE = {"peak_flops": 61.5e12, "share": 0.3, "images": 16, "link": Link(70e9, 1e-6), "ring": 32}
JITTERS = (0.0, 0.02, 0.05, 0.1)  # sigma of a round's lognormal
NODE_COUNTS = (64, 128, 256, 512, 1024)
# a home computer: 1 Tflop/s sustained; 20 Mbit/s up, 100 down, 40 ms; 1 % leave in an hour
HOME_COMPUTER = {"flops": 1e12, "images": 16}
FLEET = FleetConfig(
    0,
    up_rate=2.5e6,
    down_rate=12.5e6,
    latency_s=0.04,
    rate_sigma=0.3,
    speed_sigma=0.3,
    jitter_sigma=0.1,
    churn_per_h=0.01,
)
FLEET_SIZES = (10, 100, 1_000, 10_000, 100_000)
STRATEGIES = {
    "sync": ("sync", 1),
    "sync, rings of rings": ("sync", 0),
    "sync, int8, every 64th step, rings of rings": ("sync+int8+sync_period=64", 0),
    "async teams, int8": ("async+int8+snapshot_wire=int8+max_lead_rounds=2", 1),
    "gossip, one peer": ("gossip", 1),
    "gossip, one peer, int8": ("gossip+int8", 1),
    "gossip, one peer, int4, every 16th step": ("gossip+int4+sync_period=16", 1),
    "gossip, random ring, int8": ("gossip+topology=random-ring+int8", 1),
    "gossip, ring that lags by 16": ("async-gossip", 1),
    "per-label models": ("per-label", 1),
}


def make_worker_round(name: str, spec: Spec, images: int, flops: float) -> WorkerRound:
    """Return the round of a worker that computes a recipe's turns at `flops` operations a second."""
    run = get_recipe(name)
    with fake_tensor_mode():
        pair = build_networks(run, spec, torch.device("cpu"))
        sizes = [sum(p.numel() for p in net.parameters()) for net in (pair.g, pair.d)]
        z, y = torch.zeros(FLOP_COUNT_IMAGES, pair.latent), torch.zeros(FLOP_COUNT_IMAGES, dtype=torch.long)
        with torch.no_grad(), ResourceCounterMode() as g_counter:
            fakes = pair.g(z, y)
        with torch.no_grad(), ResourceCounterMode() as d_counter:
            run_discriminator(pair.d, fakes, y)
    g_flops, d_flops = g_counter.flops / FLOP_COUNT_IMAGES, d_counter.flops / FLOP_COUNT_IMAGES
    g_s, d_s = (turn / flops for turn in count_turn_flops(g_flops, d_flops, images, run.d_steps))
    g_cost, d_cost = (
        TurnCost(_make_turn_profile(images, seconds / turns), size, turns_per_round=turns)
        for seconds, turns, size in zip((g_s, d_s), (1, run.d_steps), sizes)
    )
    return WorkerRound(images, d_cost, g_cost, DEFAULT_CODEC_COST)


def _make_turn_profile(images: int, seconds: float) -> TurnProfile:
    """Assume that gradients are ready in the last half of the passes, which are 97 % of a turn."""
    passes_s = 0.97 * seconds
    ready_s = tuple(passes_s * (0.5 + 0.5 * (i + 1) / NUM_READY_PARTS) for i in range(NUM_READY_PARTS))
    return TurnProfile(images, ready_s, passes_s, seconds)


def simulate_paper() -> dict[str, Any]:
    """Simulate BigGAN at 128 px, 16 images a worker: images/s relative to those of 64 workers in proportion."""
    worker = make_worker_round(
        "biggan-imagenet128", Spec(128, 3, 1000), PAPER_NODE["images"], PAPER_NODE["peak_flops"] * PAPER_NODE["share"]
    )
    link = PAPER_NODE["link"]

    def rate(nodes: int, jitter: float, ring: int) -> float:
        fleet = FleetConfig(nodes, link.bandwidth, link.bandwidth, link.latency, jitter_sigma=jitter)
        return simulate_fleet(parse_strategy("sync"), worker, fleet, group_size=ring, intra_host=link).images_per_s

    def row(jitter: float, ring: int) -> dict[str, Any]:
        rates = {nodes: rate(nodes, jitter, ring) for nodes in NODE_COUNTS}
        efficiency = {n: rates[n] / rates[64] * 64 / n for n in NODE_COUNTS}
        return {"jitter": jitter, "ring": ring, "images_per_s": rates, "efficiency": efficiency}

    rows = [row(jitter, PAPER_NODE["ring"]) for jitter in JITTERS] + [row(0.02, 1)]
    return {
        "numbers": worker.d.numel + worker.g.numel,
        "alone_ms": 1000 * worker.compute_s,
        "assumed": PAPER_NODE | {"link": link.describe()},
        "paper": PAPER_EFFICIENCY,
        "rows": rows,
    }


def simulate_volunteers() -> dict[str, Any]:
    """Simulate SNGAN on CIFAR-10 on home computers."""
    worker = make_worker_round("sngan-cifar10", Spec(32, 3, 10), HOME_COMPUTER["images"], HOME_COMPUTER["flops"])
    rows = list[dict[str, Any]]()
    for workers in FLEET_SIZES:
        for name, (strategy, groups) in STRATEGIES.items():
            start = time.perf_counter()
            fleet = dataclasses.replace(FLEET, workers=workers)
            link = Link(min(fleet.up_rate, fleet.down_rate), fleet.latency_s)
            group_size = groups or max(1, math.isqrt(workers))
            result = simulate_fleet(
                parse_strategy(strategy), worker, fleet, rounds=96, group_size=group_size, intra_host=link
            )
            rows.append({"name": name, "took_s": time.perf_counter() - start} | result_row(result, worker))
    size = {"numbers": worker.d.numel + worker.g.numel, "alone_ms": 1000 * worker.compute_s}
    return size | {"assumed": HOME_COMPUTER, "fleet": dataclasses.asdict(FLEET), "rows": rows}


def result_row(result: FleetResult, worker: WorkerRound) -> dict[str, Any]:
    """Return the result as JSON. trains: 60 rounds an hour or more, and ranks that agree within 1,000 rounds."""
    independent = result.workers * worker.images * worker.d.turns_per_round / worker.compute_s
    row = dataclasses.asdict(result)
    row |= {"rounds_per_h": result.rounds_per_h, "of_independent": result.images_per_s / independent}
    row |= {name: None for name in ("replica_drift", "mixing_rounds") if not math.isfinite(row[name])}
    return row | {"trains": result.rounds_per_h >= 60 and result.mixing_rounds < 1000}


def plot_scale(results: dict[str, Any]) -> Figure:
    """Plot the paper's setting (left) and home computers (right)."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in results["paper"]["rows"]:
        efficiency = [row["efficiency"][n] for n in NODE_COUNTS]
        label = f"{row['jitter']:.0%} jitter"
        if row["ring"] > 1:
            left.plot(NODE_COUNTS, efficiency, marker=".", ls="-", label=label)
        else:
            left.plot(NODE_COUNTS, efficiency, marker=".", ls=":", label=f"{label}, one flat ring")
    left.plot([1024], [PAPER_EFFICIENCY], "x", color="#c1121f", label="the paper")
    left.set(xscale="log", ylim=(0, 1.05), xlabel="workers", ylabel="images/s relative to 64 workers")
    left.set_xticks(NODE_COUNTS, [f"{n:,}" for n in NODE_COUNTS])
    left.minorticks_off()
    for name in STRATEGIES:
        rows = [row for row in results["volunteers"]["rows"] if row["name"] == name]
        right.plot([r["workers"] for r in rows], [max(r["of_independent"], 1e-5) for r in rows], marker=".", label=name)
    right.set(xscale="log", yscale="log", xlabel="home computers", ylabel="images/s relative to independent workers")
    left.legend(fontsize=7, frameon=False, loc="lower left")
    right.legend(fontsize=6, frameon=False, loc="lower left")
    return figure


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], f"{row['workers']:,}", f"{row['images_per_s']:,.0f}", f"{row['of_independent']:.2%}"]
    cells += [f"{row['rounds_per_h']:,.0f}", f"{row['sent_bytes_per_h'] / 1e6:,.0f}", f"{row['compute_share']:.0%}"]
    drift = mixing = ""
    if row["rounds"]:
        drift = "unbounded" if row["replica_drift"] is None else f"{row['replica_drift']:.2f}"
        mixing = "" if row["mixing_rounds"] is None else f"{row['mixing_rounds']:.3g}"
    return [*cells, drift, mixing, f"{row['took_s']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--figure")
    options = parser.parse_args()
    results = {"machine": timing.describe_machine(), "paper": simulate_paper(), "volunteers": simulate_volunteers()}
    for row in results["paper"]["rows"]:
        print(row["jitter"], row["ring"], {n: f"{e:.3f}" for n, e in row["efficiency"].items()})
    header = (
        "strategy",
        "workers",
        "images/s",
        "of independent",
        "rounds/h",
        "MB/h",
        "computing",
        "drift",
        "mixing rounds",
        "took s",
    )
    rows = [_cells(row) for row in results["volunteers"]["rows"]]
    print(timing.format_table(header, rows))
    if options.figure:
        matplotlib.rcParams.update({"font.size": 9, "svg.hashsalt": "paragan", "svg.fonttype": "none"})
        plot_scale(results).savefig(Path(options.figure), metadata={"Date": None})
    timing.save_json(options.json, results)


if __name__ == "__main__":
    main()
