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
    SessionChange,
    make_endless_run,
    make_play_fn,
    make_session,
    no_change,
    random_dataset,
    require_d_grads,
    use_separate_resampling,
)
from benchmarks.lib.timing import (
    Spread,
    StepsFn,
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.data.dataset import Dataset, load_data

BLOCK_S = 1.0


def ablations(bf16: bool) -> dict[str, tuple[tuple[str, ...], SessionChange]]:
    """name: (settings, change) of the fast path with one ingredient less."""
    variants = {
        "fast": ((), no_change),
        "without rewritten convolutions": ((), use_separate_resampling),
        "without channels_last": (("device.channels_last=false",), no_change),
        "without frozen opponent": ((), require_d_grads),
        "without fused Adam": (("g.optimizer.fused=false", "d.optimizer.fused=false"), no_change),
        "without lanes (batch norm of the whole batch)": (("lanes=1",), no_change),
    }
    return variants | ({"without bf16": (("device.precision=float32",), no_change)} if bf16 else {})


# Measuring ------------------------------------------------------------------------------------------------


def benchmark_fashion(rounds: int, bf16: bool) -> Times:
    """The fast path, everything it is without, and the naive loop, in turns."""
    images = random_dataset(32, 1)
    naive = plain.PlainTrainer(make_endless_run("fashion", images), images)
    sessions = {
        name: make_session(make_endless_run("fashion", images, *settings), images, change=change)
        for name, (settings, change) in ablations(bf16).items()
    }
    contestants = {"naive": repeat_fn(naive.step)} | {name: make_play_fn(s) for name, s in sessions.items()}
    return time_contestants(contestants, "fast", rounds)


def benchmark_precisions(name: str, images: Dataset, rounds: int) -> Times:
    """bf16 against float32."""
    sessions = {
        p: make_session(make_endless_run(name, images, f"device.precision={p}"), images) for p in ("float32", "bf16")
    }
    return time_contestants({p: make_play_fn(s) for p, s in sessions.items()}, "bf16", rounds)


def time_contestants(contestants: dict[str, StepsFn], block: str, rounds: int) -> Times:
    """`block`: the contestant whose blocks last BLOCK_S."""
    return interleave(contestants, rounds=rounds, steps=count_steps(BLOCK_S, contestants[block]))


def format_times(times: Times, to: str) -> str:
    rows = [
        [name, *(f"{x:.2f}" for x in _format_spread(times.spread(name))), *_ratio(times, name, to)] for name in times.ms
    ]
    return format_table(["", "ms/step", "low", "high", f"to {to}", "low", "high"], rows)


def _ratio(times: Times, name: str, to: str) -> list[str]:
    return [f"{x:.2f}" for x in _format_spread(times.ratio(name, to))]


def _format_spread(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    where, images = describe_machine() | {"threads": torch.get_num_threads()}, random_dataset(32, 1)
    picked = make_endless_run("fashion", images).device.precision
    print(f"{format_machine(where)}\nprecision=auto picks {picked}")
    difference = plain.max_output_difference(make_endless_run("fashion", images), images)
    print(f"\nfashion's networks; outputs of fast (in float32) and naive differ by {difference:.1e} of the largest")
    times = benchmark_fashion(options.rounds, picked == "bf16")
    speedup = times.ratio("naive", "fast")
    print(f"{format_times(times, 'fast')}\nnaive / fast = {speedup}, wanted: at least 2")
    result: dict[str, Any] = {"machine": where, "outputs_differ": difference, "naive/fast": speedup.to_json()}
    result |= {"fashion": times.to_json("fast"), "auto_picks": picked, "precision": {}}
    for name, data in (("fashion", images), ("digits", load_data("digits", resolution=8))):
        other = benchmark_precisions(name, data, options.rounds)
        result["precision"][name] = other.to_json("float32")
        print(f"\nprecision, {name}\n{format_times(other, 'float32')}")
    save_json(options.json, result)
    return 0 if speedup.median >= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
