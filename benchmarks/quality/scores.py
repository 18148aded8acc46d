"""What scores cost after features are there: `python -m benchmarks.quality.scores fd prdc [--json F]`

fd   : the Fréchet distance of 50,000 x 2048 features, in batches of 64 as a network gives them, to a reference that is
       known. Beside it scipy's way (numpy's mean and covariance, `scipy.linalg.sqrtm` of their product), and the limit:
       half a matrix product of all rows, and the eigenvalues of one symmetric matrix of that size.
prdc : precision, recall, density and coverage of 10,000 x 10,000 x 2048, with the memory it takes; beside it the
       three matrix products of all pairs, in float64.

Each in turn, `--rounds` times; the least of them counts, for others only add to it.
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
    """[count, width] float32, above 0 and correlated, their variances over four magnitudes, as those of a network."""
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
    """As pytorch-fid has it, by scipy's square root of a matrix."""
    mean, covariance = x.numpy().mean(0, dtype=np.float64), np.cov(x.numpy().astype(np.float64), rowvar=False)
    root = scipy.linalg.sqrtm(covariance @ known.covariance.numpy()).real
    apart = mean - known.mean.numpy()
    return float(apart @ apart + np.trace(covariance) + np.trace(known.covariance.numpy()) - 2 * np.trace(root))


def time_fns(rounds: int, parts: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of each, the least of some rounds in turn; and what each gave."""
    seconds, given = dict.fromkeys(parts, float("inf")), dict[str, Any]()
    for _ in range(rounds):
        for name, part in parts.items():
            start = time.perf_counter()
            given[name] = part()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds, given


def benchmark_fd(count: int, width: int, rounds: int) -> dict[str, Any]:
    known, x = fit_gaussian(random_features(count, width, 0)), random_features(count, width, 1)
    fakes = fit_gaussian(x)
    whole = x.double()
    seconds, given = time_fns(
        rounds,
        {
            "ours": lambda: frechet_distance(known, fit_gaussian(x)),
            "of which the distance": lambda: frechet_distance(known, fakes),
            "scipy's way": lambda: scipy_frechet(x, known),
            "product of all rows": lambda: whole.T @ whole,
            "eigenvalues": lambda: torch.linalg.eigvalsh(fakes.covariance),
        },
    )
    ours, theirs = given["ours"], given["scipy's way"]
    return {
        "features": [count, width],
        "seconds": seconds,
        "limit_s": seconds["product of all rows"] / 2 + seconds["eigenvalues"],
        "value": ours.value,
        "error": ours.error,
        "differs_from_scipy": abs(ours.value - theirs) / theirs,
    }


def benchmark_prdc(count: int, width: int, rounds: int) -> dict[str, Any]:
    x, y = random_features(count, width, 0), random_features(count, width, 1)
    real, fake = (FeatureShard(z, count, BATCH) for z in (x, y))
    before = peak_rss_bytes()
    seconds, given = time_fns(rounds, {"ours": lambda: prdc(real, fake)})
    taken = peak_rss_bytes() - before
    a, b = x.double(), y.double()
    pairs, _ = time_fns(
        rounds, {"products of all pairs": lambda: [(p @ q.T)[0, 0] for p, q in ((a, a), (b, b), (a, b))]}
    )
    return {
        "features": [count, count, width],
        "seconds": seconds | pairs,
        "peak_bytes_beyond_features": taken,
        "prdc": list(given["ours"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["fd", "prdc"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a tenth of the images, an eighth of the features")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    by, width = (10, 256) if options.small else (1, 2048)
    run = {
        "fd": lambda: benchmark_fd(50_000 // by, width, options.rounds),
        "prdc": lambda: benchmark_prdc(10_000 // by, width, options.rounds),
    }
    found: dict[str, Any] = {"machine": describe_machine()}
    for what in dict.fromkeys(options.what):
        found[what] = run[what]()
        print(f"{what} of {' x '.join(map(str, found[what]['features']))}")
        for name, value in found[what].items():
            if name == "seconds":
                print("\n".join(f"  {part:<24} {s:8.2f} s" for part, s in value.items()))
            elif name != "features":
                print(f"  {name:<24} {value}")
    if options.json:
        save_json(str(options.json), found)


if __name__ == "__main__":
    main()
