"""Weak scaling by simulation: the paper's setting to 1,024 workers, and home computers to 100,000.

    python -m benchmarks.comm.scale --json benchmarks/results/scale.json --figure docs/figures/scale.svg

Nothing here is measured but the time that simulating takes: workers are operations over an assumed share of an assumed
peak, links are assumed. docs/planning.md shows what comes of it.
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

FLOP_COUNT_IMAGES = 8  # images
PAPER_EFFICIENCY = 0.91  # ParaGAN: BigGAN at 128 px on 1,024 TPU nodes, from 64
# a core of a TPU v3: 61.5 Tflop/s in bf16 (half a chip), of which a GAN is taken to reach three tenths; a torus
PAPER_NODE = {"peak_flops": 61.5e12, "share": 0.3, "images": 16, "link": Link(70e9, 1e-6), "ring": 32}
JITTERS = (0.0, 0.02, 0.05, 0.1)  # sigma of a round's lognormal
NODE_COUNTS = (64, 128, 256, 512, 1024)
# a home computer: 1 Tflop/s kept up; 20 Mbit/s up, 100 down, 40 ms; 1 % leave in an hour
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
    """A worker that computes a recipe's turns at so many operations a second."""
    run = get_recipe(name)
    with fake_tensor_mode():
        pair = build_networks(run, spec, torch.device("cpu"))
        sizes = [sum(p.numel() for p in net.parameters()) for net in (pair.g, pair.d)]
        z, y = torch.zeros(FLOP_COUNT_IMAGES, pair.latent), torch.zeros(FLOP_COUNT_IMAGES, dtype=torch.long)
        with torch.no_grad(), ResourceCounterMode() as of_g:
            made = pair.g(z, y)
        with torch.no_grad(), ResourceCounterMode() as of_d:
            run_discriminator(pair.d, made, y)
    g, d = of_g.flops / FLOP_COUNT_IMAGES, of_d.flops / FLOP_COUNT_IMAGES
    g_s, d_s = (operations / flops for operations in count_turn_flops(g, d, images, run.d_steps))
    halves = [
        TurnCost(_make_turn_profile(images, s / n), size, turns_per_round=n)
        for s, n, size in zip((g_s, d_s), (1, run.d_steps), sizes)
    ]
    return WorkerRound(images, halves[1], halves[0], DEFAULT_CODEC_COST)


def _make_turn_profile(images: int, seconds: float) -> TurnProfile:
    """Gradients come in the last half of the passes, which are 97 % of a turn."""
    passes = 0.97 * seconds
    return TurnProfile(
        images, tuple(passes * (0.5 + 0.5 * (i + 1) / NUM_READY_PARTS) for i in range(NUM_READY_PARTS)), passes, seconds
    )


def simulate_paper() -> dict[str, Any]:
    """BigGAN at 128 px, 16 images a worker: images a second, over as many times those of 64 workers."""
    job = make_worker_round(
        "biggan-imagenet128", Spec(128, 3, 1000), PAPER_NODE["images"], PAPER_NODE["peak_flops"] * PAPER_NODE["share"]
    )
    link = PAPER_NODE["link"]

    def rate(nodes: int, jitter: float, ring: int) -> float:
        crowd = FleetConfig(nodes, link.bandwidth, link.bandwidth, link.latency, jitter_sigma=jitter)
        return simulate_fleet(parse_strategy("sync"), job, crowd, group_size=ring, intra_host=link).images_per_s

    def row(jitter: float, ring: int) -> dict[str, Any]:
        found = {nodes: rate(nodes, jitter, ring) for nodes in NODE_COUNTS}
        relative = {n: found[n] / found[64] * 64 / n for n in NODE_COUNTS}
        return {"jitter": jitter, "ring": ring, "images_per_s": found, "efficiency": relative}

    rows = [row(jitter, PAPER_NODE["ring"]) for jitter in JITTERS] + [row(0.02, 1)]
    return {
        "numbers": job.d.numel + job.g.numel,
        "alone_ms": 1000 * job.compute_s,
        "assumed": PAPER_NODE | {"link": link.describe()},
        "paper": PAPER_EFFICIENCY,
        "rows": rows,
    }


def simulate_volunteers() -> dict[str, Any]:
    """SNGAN on CIFAR-10 among home computers."""
    job = make_worker_round("sngan-cifar10", Spec(32, 3, 10), HOME_COMPUTER["images"], HOME_COMPUTER["flops"])
    rows = list[dict[str, Any]]()
    for workers in FLEET_SIZES:
        for name, (strategy, groups) in STRATEGIES.items():
            crowd, start = dataclasses.replace(FLEET, workers=workers), time.perf_counter()
            link = Link(min(crowd.up_rate, crowd.down_rate), crowd.latency_s)
            rings = groups or max(1, math.isqrt(workers))
            seen = simulate_fleet(parse_strategy(strategy), job, crowd, rounds=96, group_size=rings, intra_host=link)
            rows.append({"name": name, "took_s": time.perf_counter() - start} | result_row(seen, job))
    about = {"numbers": job.d.numel + job.g.numel, "alone_ms": 1000 * job.compute_s}
    return about | {"assumed": HOME_COMPUTER, "crowd": dataclasses.asdict(FLEET), "rows": rows}


def result_row(seen: FleetResult, job: WorkerRound) -> dict[str, Any]:
    """What was simulated. trains: one model, 60 rounds an hour or more, whose ranks agree within 1,000 rounds."""
    alone = seen.workers * job.images * job.d.turns_per_round / job.compute_s
    found = dataclasses.asdict(seen) | {"rounds_per_h": seen.rounds_per_h, "of_alone": seen.images_per_s / alone}
    found |= {name: None for name in ("apart", "mixes") if not math.isfinite(found[name])}
    return found | {"trains": seen.rounds_per_h >= 60 and seen.mixing_rounds < 1000}


def plot_scale(found: dict[str, Any]) -> Figure:
    """Both, beside each other."""
    drawn = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for row in found["paper"]["rows"]:
        told = f"{row['jitter']:.0%} jitter" + ("" if row["ring"] > 1 else ", one flat ring")
        left.plot(
            NODE_COUNTS,
            [row["efficiency"][n] for n in NODE_COUNTS],
            marker=".",
            ls="-" if row["ring"] > 1 else ":",
            label=told,
        )
    left.plot([1024], [PAPER_EFFICIENCY], "x", color="#c1121f", label="the paper")
    left.set(xscale="log", ylim=(0, 1.05), xlabel="workers", ylabel="images/s, over those of 64 in proportion")
    left.set_xticks(NODE_COUNTS, [f"{n:,}" for n in NODE_COUNTS])
    left.minorticks_off()
    for name in STRATEGIES:
        rows = [row for row in found["volunteers"]["rows"] if row["name"] == name]
        right.plot([r["workers"] for r in rows], [max(r["of_alone"], 1e-5) for r in rows], marker=".", label=name)
    right.set(xscale="log", yscale="log", xlabel="home computers", ylabel="share of what they would do alone")
    left.legend(fontsize=7, frameon=False, loc="lower left")
    right.legend(fontsize=6, frameon=False, loc="lower left")
    return drawn


def _cells(row: dict[str, Any]) -> list[str]:
    apart = "never meet" if row["apart"] is None else f"{row['apart']:.2f}"
    cells = [row["name"], f"{row['workers']:,}", f"{row['images_per_s']:,.0f}", f"{row['of_alone']:.2%}"]
    cells += [f"{row['rounds_per_h']:,.0f}", f"{row['sent_bytes_per_h'] / 1e6:,.0f}", f"{row['computing']:.0%}"]
    mixed = "" if row["mixes"] is None else f"{row['mixes']:.3g}"
    return [*cells, *((apart, mixed) if row["rounds"] else ("", "")), f"{row['took_s']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--figure")
    options = parser.parse_args()
    found = {"machine": timing.describe_machine(), "paper": simulate_paper(), "volunteers": simulate_volunteers()}
    for row in found["paper"]["rows"]:
        print(row["jitter"], row["ring"], {n: f"{e:.3f}" for n, e in row["efficiency"].items()})
    head = (
        "strategy",
        "workers",
        "images/s",
        "of alone",
        "rounds/h",
        "MB an hour",
        "computing",
        "apart",
        "mixed",
        "took s",
    )
    rows = [_cells(row) for row in found["volunteers"]["rows"]]
    print(timing.format_table(head, rows))
    if options.figure:
        matplotlib.rcParams.update({"font.size": 9, "svg.hashsalt": "paragan", "svg.fonttype": "none"})
        plot_scale(found).savefig(Path(options.figure), metadata={"Date": None})
    timing.save_json(options.json, found)


if __name__ == "__main__":
    main()
