"""Quantized against exact on a mixture of Gaussians in the plane, the first experiment of DQGAN (Chen et al. 2020).

    python -m benchmarks.quality.mixture_wires [--ranks 4] [--seeds 0,1,2] [--json F]            about a minute a run

Trains `examples/mixture.py` (8 modes on a ring) by optimistic Adam and by DQGAN's own gradient steps, each exactly and
with coarser and coarser wires, with and without error feedback. Every case sees as many images. Measured: modes that
are covered, the share of points within three deviations of a mode, and the bytes that a rank sends. The rates of the
gradient steps were found by trying a few on the exact wire.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.document import ROOT
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from paragan.core.jsonl import read_jsonl

GRADIENT_STEPS = (
    *("--strategy=DQGAN", "--g.optimizer=sgd", "--g.optimizer.lr=0.05"),
    *("--d.optimizer=sgd", "--d.optimizer.lr=0.3"),
)
CASES: dict[str, tuple[str, ...]] = {  # by the names of the paper; quantized: optimistic Adam with error feedback
    "CPOAdam": ("--strategy=CPOAdam",),
    **{
        f"CPOAdam-GQ, {wire}": ("--strategy=CPOAdam-GQ", f"--strategy.wire={wire}") for wire in ("int8", "int2", "sign")
    },
    **{f"quantized, {wire}": ("--strategy=quantized", f"--strategy.wire={wire}") for wire in ("int8", "int2", "sign")},
    **{f"DQGAN, {wire}": (*GRADIENT_STEPS, f"--strategy.wire={wire}") for wire in ("exact", "int8", "int2", "sign")},
    **{
        f"DQGAN, {wire}, feedback 0": (*GRADIENT_STEPS, f"--strategy.wire={wire}", "--strategy.feedback=0")
        for wire in ("int8", "int2", "sign")
    },
}
RESULT = re.compile(r"(\d+) of \d+ modes covered, ([\d.]+)% of points")


def train_case(settings: Sequence[str], ranks: int, seed: int) -> dict[str, Any]:
    """Train a case; return its scores, or None in their place if it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "examples.mixture", "ring", *settings, f"--ranks={ranks}", f"--seed={seed}"]
        command += ["--evaluation.every_kimg=0", "--evaluation.metrics=fd", "--output.fakes_kimg=1e9"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        result = RESULT.search(done.stdout)
        if not result:
            print(done.stderr.strip().rpartition("\n")[2], flush=True)
            return {"modes": None, "close": None, "sent_bytes": None}
        lines = read_jsonl(Path(folder) / "runs/mixture-ring/run/stats.jsonl")
        sent = sum(value for line in lines for name, value in line.items() if name.endswith("/sent_bytes"))
        return {"modes": int(result[1]), "close": float(result[2]) / 100, "sent_bytes": round(sent)}


def summarize(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for every case: medians over the seeds that did not diverge, and how many did."""
    lines: list[tuple[str, ...]] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        finite = [row for row in mine if row["modes"] is not None]
        scores = ("-", "-", "-")
        if finite:
            modes, close, sent = (
                statistics.median(row[name] for row in finite) for name in ("modes", "close", "sent_bytes")
            )
            scores = (f"{modes:g}", f"{close:.1%}", f"{sent / 1e6:.1f}")
        lines.append((case, *scores, f"{len(mine) - len(finite)} of {len(mine)}"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", help=f"names, separated by ; (all: {'; '.join(CASES)})")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kimg", type=float, default=1000.0)
    parser.add_argument("--json", metavar="F", help="results: finished runs are not repeated")
    options = parser.parse_args()
    results = {"machine": describe_machine(), "ranks": options.ranks, "kimg": options.kimg, "rows": []}
    if options.json and Path(options.json).exists():
        results = json.loads(Path(options.json).read_text())
    print(format_machine(results["machine"]))
    rows: list[dict[str, Any]] = results["rows"]
    for seed in map(int, options.seeds.split(",")):
        for case in options.cases.split(";") if options.cases else CASES:
            if any((row["case"], row["seed"]) == (case, seed) for row in rows):
                continue
            scores = train_case((*CASES[case], f"--kimg={results['kimg']:g}"), results["ranks"], seed)
            rows.append({"case": case, "seed": seed, **scores})
            print(rows[-1], flush=True)
            save_json(options.json, results)
    print(format_table(("case", "modes", "close", "MB", "diverged"), summarize(rows)))


if __name__ == "__main__":
    main()
