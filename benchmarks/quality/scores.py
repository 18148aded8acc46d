"""Measure the cost of scores once features are computed: `python -m benchmarks.quality.scores fd prdc [--json F]`

fd   : Fréchet distance of 50,000 x 2048 features, in batches of 64 as a network returns them, to a fitted reference.
       Compared with scipy (numpy's mean and covariance, `scipy.linalg.sqrtm` of their product), and with a lower bound:
       half a matrix product of all rows, and the eigenvalues of one symmetric matrix of that size.
prdc : precision, recall, density and coverage of 10,000 x 10,000 x 2048, and the memory used; compared with the three
       matrix products of all pairs, in float64.

All are timed in turn, `--rounds` times; the minimum is reported, since other load only adds to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from benchmarks.lib.timing import describe_machine, peak_rss_bytes, save_json
from paragan.eval.frechet import Gaussian, RunningMoments, frechet_distance
from paragan.eval.precision_recall import prdc
from paragan.eval.sharding import FeatureShard

BATCH = 64


def random_features(count: int, width: int, seed: int) -> Tensor:
    """Return features [count, width]: float32, non-negative, correlated, with variances over four magnitudes."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=draw) * torch.logspace(0, -2, width) / width**0.5
    return torch.cat([torch.randn(n, width, generator=draw).mm(mix).relu() for n in _chunk_sizes(count)])


def _chunk_sizes(count: int) -> list[int]:
    return [min(5000, count - low) for low in range(0, count, 5000)]


def fit_gaussian(x: Tensor) -> Gaussian:
    moments = RunningMoments(x.shape[1])
    for batch in x.split(BATCH):
        moments.update(batch)
    return moments.compute()


def scipy_frechet(x: Tensor, known: Gaussian) -> float:
    """Compute the Fréchet distance as pytorch-fid does, by scipy's square root of a matrix."""
    mean = x.numpy().mean(0, dtype=np.float64)
    covariance = np.cov(x.numpy().astype(np.float64), rowvar=False)
    root = scipy.linalg.sqrtm(covariance @ known.covariance.numpy()).real
    difference = mean - known.mean.numpy()
    return float(
        difference @ difference + np.trace(covariance) + np.trace(known.covariance.numpy()) - 2 * np.trace(root)
    )


def time_fns(rounds: int, parts: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Time functions in turn; return the least seconds of each over the rounds, and their last results."""
    seconds = dict.fromkeys(parts, float("inf"))
    outputs: dict[str, Any] = {}
    for _ in range(rounds):
        for name, part in parts.items():
            start = time.perf_counter()
            outputs[name] = part()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds, outputs


def benchmark_fd(count: int, width: int, rounds: int) -> dict[str, Any]:
    known = fit_gaussian(random_features(count, width, 0))
    x = random_features(count, width, 1)
    fakes = fit_gaussian(x)
    x64 = x.double()
    seconds, outputs = time_fns(
        rounds,
        {
            "ours": lambda: frechet_distance(known, fit_gaussian(x)),
            "of which the distance": lambda: frechet_distance(known, fakes),
            "scipy's way": lambda: scipy_frechet(x, known),
            "product of all rows": lambda: x64.T @ x64,
            "eigenvalues": lambda: torch.linalg.eigvalsh(fakes.covariance),
        },
    )
    result = outputs["ours"]
    scipy_value = outputs["scipy's way"]
    return {
        "features": [count, width],
        "seconds": seconds,
        "limit_s": seconds["product of all rows"] / 2 + seconds["eigenvalues"],
        "value": result.value,
        "error": result.error,
        "differs_from_scipy": abs(result.value - scipy_value) / scipy_value,
    }


def benchmark_prdc(count: int, width: int, rounds: int) -> dict[str, Any]:
    x, y = random_features(count, width, 0), random_features(count, width, 1)
    real, fake = (FeatureShard(z, count, BATCH) for z in (x, y))
    before = peak_rss_bytes()
    seconds, outputs = time_fns(rounds, {"ours": lambda: prdc(real, fake)})
    extra_bytes = peak_rss_bytes() - before
    a = x.double()
    b = y.double()
    pairs, _ = time_fns(
        rounds, {"products of all pairs": lambda: [(p @ q.T)[0, 0] for p, q in ((a, a), (b, b), (a, b))]}
    )
    return {
        "features": [count, count, width],
        "seconds": seconds | pairs,
        "peak_bytes_beyond_features": extra_bytes,
        "prdc": list(outputs["ours"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["fd", "prdc"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a tenth of the images, an eighth of the features")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    divisor, width = (10, 256) if options.small else (1, 2048)
    run = {
        "fd": lambda: benchmark_fd(50_000 // divisor, width, options.rounds),
        "prdc": lambda: benchmark_prdc(10_000 // divisor, width, options.rounds),
    }
    results: dict[str, Any] = {"machine": describe_machine()}
    for what in dict.fromkeys(options.what):
        results[what] = run[what]()
        print(f"{what} of {' x '.join(map(str, results[what]['features']))}")
        for name, value in results[what].items():
            if name == "seconds":
                print("\n".join(f"  {part:<24} {s:8.2f} s" for part, s in value.items()))
            elif name != "features":
                print(f"  {name:<24} {value}")
    if options.json:
        save_json(str(options.json), results)


if __name__ == "__main__":
    main()
