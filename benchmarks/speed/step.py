"""What the fast path is worth: `python -m benchmarks.speed.step [--json F] [--rounds N]`. One process, all threads.

    fast   a step of the `fashion` recipe's networks (SNGAN, 32 px, grey, 10 classes) as `paragan train` plays it by
           default: channels_last, frozen opponent, fused Adam, bf16 where the processor multiplies bf16
    naive  the same networks with the same weights in plain PyTorch, float32, NCHW (see plain.py)

on random images of that shape, timed in turns. Then each ingredient's own share: the fast path with that one
thing turned off. Shares do not add up to the whole: ingredients help each other (bf16 saves most where
convolutions are most of the time). Afterwards bf16 against float32 for fashion and digits, which is what
`--device.precision=auto` has to decide.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib.session_fixture import (
    Change,
    convolve_as_written,
    endless,
    noise,
    playing,
    session,
    thaw,
    unchanged,
)
from benchmarks.lib.timing import Play, Spread, Times, describe, interleave, machine, repeated, save, steps_for, table
from paragan.data.dataset import Images, load

BLOCK_S = 1.0


def without(bf16: bool) -> dict[str, tuple[tuple[str, ...], Change]]:
    """name: (settings, change) of the fast path with one ingredient less."""
    variants = {
        "fast": ((), unchanged),
        "without rewritten convolutions": ((), convolve_as_written),
        "without channels_last": (("device.channels_last=false",), unchanged),
        "without frozen opponent": ((), thaw),
        "without fused Adam": (("g.optimizer.fused=false", "d.optimizer.fused=false"), unchanged),
        "without lanes (batch norm of the whole batch)": (("lanes=1",), unchanged),
    }
    return variants | ({"without bf16": (("device.precision=float32",), unchanged)} if bf16 else {})


# Measuring ------------------------------------------------------------------------------------------------


def fashion(rounds: int, bf16: bool) -> Times:
    """The fast path, everything it is without, and the naive loop, in turns."""
    images = noise(32, 1)
    naive = plain.Naive(endless("fashion", images), images)
    sessions = {
        name: session(endless("fashion", images, *settings), images, change=change)
        for name, (settings, change) in without(bf16).items()
    }
    contestants = {"naive": repeated(naive.step)} | {name: playing(s) for name, s in sessions.items()}
    return timed(contestants, "fast", rounds)


def precisions(name: str, images: Images, rounds: int) -> Times:
    """bf16 against float32."""
    sessions = {p: session(endless(name, images, f"device.precision={p}"), images) for p in ("float32", "bf16")}
    return timed({p: playing(s) for p, s in sessions.items()}, "bf16", rounds)


def timed(contestants: dict[str, Play], block: str, rounds: int) -> Times:
    """`block`: the contestant whose blocks last BLOCK_S."""
    return interleave(contestants, rounds=rounds, steps=steps_for(BLOCK_S, contestants[block]))


def shown(times: Times, to: str) -> str:
    rows = [[name, *(f"{x:.2f}" for x in _three(times.of(name))), *_ratio(times, name, to)] for name in times.ms]
    return table(["", "ms/step", "low", "high", f"to {to}", "low", "high"], rows)


def _ratio(times: Times, name: str, to: str) -> list[str]:
    return [f"{x:.2f}" for x in _three(times.ratio(name, to))]


def _three(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    where, images = machine() | {"threads": torch.get_num_threads()}, noise(32, 1)
    picked = endless("fashion", images).device.precision
    print(f"{describe(where)}\nprecision=auto picks {picked}")
    difference = plain.same_function(endless("fashion", images), images)
    print(f"\nfashion's networks; outputs of fast (in float32) and naive differ by {difference:.1e} of the largest")
    times = fashion(options.rounds, picked == "bf16")
    speedup = times.ratio("naive", "fast")
    print(f"{shown(times, 'fast')}\nnaive / fast = {speedup}, wanted: at least 2")
    found: dict[str, Any] = {"machine": where, "outputs_differ": difference, "naive/fast": speedup.to_json()}
    found |= {"fashion": times.to_json("fast"), "auto_picks": picked, "precision": {}}
    for name, data in (("fashion", images), ("digits", load("digits", resolution=8))):
        other = precisions(name, data, options.rounds)
        found["precision"][name] = other.to_json("float32")
        print(f"\nprecision, {name}\n{shown(other, 'float32')}")
    save(options.json, found)
    return 0 if speedup.median >= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
