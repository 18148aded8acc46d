"""Recipes with a reconstruction against loops as the field writes them.

    python -m benchmarks.speed.reconstruction [RECIPE ...] [--json F] [--rounds N] [--precision bf16]

A step is one turn of D and one of G: of `tokenizer` (with a perceptual term, as VQGAN has it, on features of an
untrained ResNet-20), `super-resolution` and `vocoder` with everything as `paragan train` sets it, D started, and of a
plain PyTorch loop with the order of operations of LlamaGen, Real-ESRGAN and HiFi-GAN (lib/plain_reconstruction.py).
Both start from the same weights, on random images of 32 x 32 pixels or random waves of 4,096 samples, one process, all
threads, in turns. Where a step takes longer than 2 s, the batch is halved. Ends with status 1 where a ratio is below
1.3.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.lib.plain_reconstruction import PLAIN_LOOPS, max_output_difference
from benchmarks.lib.session_fixture import make_endless_run, make_play_fn, make_session, random_dataset
from benchmarks.lib.timing import (
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.config.run import Run
from paragan.data.dataset import Dataset

PERCEPTUAL = (
    "objective.perceptual=0.1",
    "objective.perceptual_features=benchmarks.lib.cifar_resnet20:untrained_features",
)
# recipe: settings
RECIPES = {
    "tokenizer": ("data.resolution=32", "d.start_kimg=0", *PERCEPTUAL),
    "super-resolution": ("data.resolution=32", "d.start_kimg=0"),
    "vocoder": (),
}
SEGMENT = 2048
MAX_STEP_S = 2.0
BLOCK_S = 2.0
WANTED = 1.3


def random_waves(count: int = 256) -> Dataset:
    """Return random waves [1, SEGMENT]."""
    waves = np.random.default_rng(0).normal(0, 0.1, (count, 1, SEGMENT)).astype(np.float32)
    return Dataset(waves, None, (), "random")


def make_data(recipe: str) -> Dataset:
    """Return random data of the recipe's shape."""
    return random_waves() if recipe == "vocoder" else random_dataset(32, 3)


def make_run(recipe: str, data: Dataset, *settings: str) -> Run:
    """Return the run of a recipe whose D trains from the start."""
    return make_endless_run(recipe, data, *RECIPES[recipe], *settings)


def time_step(run: Run, data: Dataset) -> float:
    """Return the seconds of the second step."""
    play = make_play_fn(make_session(run, data))
    play(1)
    start = time.perf_counter()
    play(1)
    return time.perf_counter() - start


def choose_batch(recipe: str, data: Dataset, *settings: str) -> Run:
    """Return the run of a recipe, its batch halved until a step takes at most MAX_STEP_S."""
    run = make_run(recipe, data, *settings)
    while run.batch > run.lanes and time_step(run, data) > MAX_STEP_S:
        run = make_run(recipe, data, *settings, f"batch={run.batch // 2}")
    return run


def compare(run: Run, data: Dataset, bf16: bool, rounds: int) -> Times:
    """Time both loops in turns."""
    plain = PLAIN_LOOPS[run.recipe](run, data, bf16)
    contestants = {"plain": repeat_fn(plain.step), "paragan": make_play_fn(make_session(run, data))}
    return interleave(contestants, rounds=rounds, steps=count_steps(BLOCK_S, contestants["paragan"]))


def report(run: Run, times: Times, difference: float) -> dict[str, Any]:
    """Print the times of a recipe, and return them."""
    unit = "segments/s" if run.recipe == "vocoder" else "img/s"
    speedup = times.ratio("plain", "paragan")
    rows = [[name, str(times.spread(name)), f"{1000 * run.batch / times.spread(name).median:.4g}"] for name in times.ms]
    print(f"\n{run.recipe}, batch {run.batch}; outputs differ by {difference:.1e} of the largest")
    print(f"{format_table(['', 'ms/step', unit], rows)}\nplain / paragan = {speedup}, wanted: at least {WANTED}")
    return {
        "batch": run.batch,
        "outputs_differ": difference,
        "plain/paragan": speedup.to_json(),
        "per_second": {name: 1000 * run.batch / times.spread(name).median for name in times.ms},
        "times": times.to_json("paragan"),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", choices=[*RECIPES, []], help="recipes to time (all)")
    parser.add_argument("--rounds", type=int, default=15, help="that are timed of either loop (15)")
    parser.add_argument("--precision", default="float32", choices=("float32", "bf16"), help="of both loops (float32)")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    warnings.simplefilter("ignore")
    where = describe_machine() | {"threads": torch.get_num_threads()}
    print(f"{format_machine(where)}\n{options.precision}")
    result: dict[str, Any] = {"machine": where, "precision": options.precision, "recipes": {}}
    for recipe in options.recipe or RECIPES:
        data = make_data(recipe)
        run = choose_batch(recipe, data, f"device.precision={options.precision}")
        difference = max_output_difference(run, data)
        times = compare(run, data, options.precision == "bf16", options.rounds)
        result["recipes"][recipe] = report(run, times, difference)
    save_json(options.json, result)
    return 0 if all(r["plain/paragan"]["median"] >= WANTED for r in result["recipes"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
