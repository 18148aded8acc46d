"""Time a training step of this checkout against another checkout, in turns.

    python -m benchmarks.speed.two_checkouts --reference ../before [--rounds 8] [--cases digits] [--json F]

A refactoring must not be slower. Every round runs `paragan train` once with each checkout, in alternating order, and
forms the ratio of their times per 1,000 images. A run's time is the median over its ticks without the first ones, in
which caches fill. Options are written in the words of commit a9548de and translated as in lib/bit_equality.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lib.bit_equality import Checkout
from benchmarks.lib.timing import Times, describe_machine, format_machine, format_table, save_json

COMMON = "--run-dir=run --seed=0 --evaluation.metrics=[] --output.checkpoint_kimg=0 --output.fakes_kimg=0"
SKIPPED_TICKS = 3
TIMEOUT_S = 300
CASES = {
    "digits": "train digits --kimg=24 --output.tick_kimg=1.024",
    "digits, two ranks": "train digits --kimg=24 --output.tick_kimg=1.024 --ranks=2",
    "digits, two ranks, int8": "train digits --kimg=24 --output.tick_kimg=1.024 --ranks=2 --strategy.wire=int8",
    "fashion networks": "train fashion --data=set.npz --kimg=2.56 --batch=64 --output.tick_kimg=0.128",
}


def write_dataset(path: Path) -> None:
    """Write 512 random grey images of 32 x 32 px in ten classes."""
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (512, 32, 32), dtype=np.uint8), labels=np.arange(512) % 10)


def time_run(checkout: Checkout, command: str) -> float:
    """Return the milliseconds per 1,000 images of one training run."""
    with tempfile.TemporaryDirectory(prefix="two_checkouts-") as name:
        folder = Path(name)
        write_dataset(folder / "set.npz")
        arguments = [checkout.translate(word, folder) for word in shlex.split(f"{command} {COMMON}")]
        checkout.run(["-m", "paragan", *arguments], folder, TIMEOUT_S)
        lines = [json.loads(line) for line in (folder / "run" / "stats.jsonl").read_text("utf-8").splitlines()]
    return 1000 * statistics.median(line["Timing/sec_per_kimg"] for line in lines[SKIPPED_TICKS:])


def main() -> int:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--current", type=Path, default=Path(__file__).parents[2], metavar="DIR", help="this one")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="runs of each checkout and case (8)")
    parser.add_argument("--cases", metavar="TEXT", default="", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="F", help="write the results to this file")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    checkouts = {
        "before": Checkout(options.reference, sys.executable),
        "after": Checkout(options.current, sys.executable),
    }
    results = {}
    rows = []
    for case, command in CASES.items():
        if options.cases not in case:
            continue
        ms: dict[str, list[float]] = {"before": [], "after": []}
        for number in range(options.rounds):
            names = list(ms) if number % 2 == 0 else list(ms)[::-1]
            for name in names:
                ms[name].append(time_run(checkouts[name], command))
        times = Times(ms)
        results[case] = times.to_json("before")
        rows.append([case, times.spread("before"), times.spread("after"), times.ratio("after", "before")])
        print(f"{case}: after / before {times.ratio('after', 'before')}", flush=True)
    print(format_table(["ms per 1,000 images", "before", "after", "after / before"], rows))
    save_json(options.json, {"machine": machine, "rounds": options.rounds, "cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
