"""Mixtures of Gaussians in the plane: 8 on a ring, or 25 on a square. `python -m examples.mixture [ring|square]`

Shows user-defined networks for vectors [N, 2]. RUN_DIR/fakes*.png shows how the points move during training. Options of
`paragan train` may follow: `python -m examples.mixture square --strategy async --ranks 2`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import paragan as pg
from paragan.cli.main import main as paragan_main
from paragan.core.schema import config_class
from paragan.nets import Spec

RECIPE = str(Path(__file__).with_suffix(".yaml"))
SPREAD = 0.05  # standard deviation of a mode; neighbors are 0.77 (ring) and 0.5 (square) apart


def modes(name: str) -> np.ndarray:
    """Return the centres of the modes, [K, 2]."""
    if name == "ring":
        turns = np.arange(8) / 8 * 2 * np.pi
        return np.stack([np.cos(turns), np.sin(turns)], 1).astype(np.float32)
    steps = np.linspace(-1, 1, 5, dtype=np.float32)
    return np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)


def sample_points(name: str, count: int = 5_000) -> tuple[np.ndarray, np.ndarray]:
    """Return points, float32 [N, 2], and the index of the mode of each, [N]."""
    rng, centres = np.random.default_rng(0), modes(name)
    labels = rng.integers(len(centres), size=count)
    noise = SPREAD * rng.standard_normal((count, 2), dtype=np.float32)
    return centres[labels] + noise, labels


def count_covered_modes(points: np.ndarray, centres: np.ndarray) -> tuple[int, float]:
    """Return the number of covered modes and the fraction of points within three standard deviations of a mode.

    A mode is covered if it has at least a tenth of its share of the points.
    """
    distances = np.linalg.norm(points[:, None] - centres, axis=2)  # [n, K]
    is_close = distances.min(1) < 3 * SPREAD
    counts = np.bincount(distances.argmin(1)[is_close], minlength=len(centres))
    return int((counts > 0.1 * len(points) / len(centres)).sum()), float(is_close.mean())


class Network(nn.Module):
    """(x [N, inputs], y [N] or None) -> [N, outputs]. Labels, if any, are part of the input."""

    def __init__(self, inputs: int, outputs: int, classes: int, width: int):
        super().__init__()
        self.classes = classes
        sizes = [inputs + classes, width, width, width]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
        self.body = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        if y is not None and self.classes:
            x = torch.cat([x, nn.functional.one_hot(y, self.classes).to(x.dtype)], 1)
        return self.body(x)


class Discriminator(Network):
    """Points [N, 2] -> logits [N]."""

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return super().forward(x, y).squeeze(1)


@config_class
class Nets:
    """Two multilayer perceptrons, for vectors of any length."""

    name: str = "perceptrons"
    latent: int = 16
    width: int = 128

    def generator(self, spec: Spec) -> nn.Module:
        return Network(self.latent, spec.shape[0], spec.classes, self.width)

    def discriminator(self, spec: Spec) -> nn.Module:
        return Discriminator(spec.shape[0], 1, spec.classes, self.width)


def main(arguments: Sequence[str]) -> int:
    name, *train_options = arguments if arguments and arguments[0] in ("ring", "square") else ("ring", *arguments)
    folder = Path("runs") / f"mixture-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    x, labels = sample_points(name)
    np.savez(folder / "points.npz", x=x, labels=labels)
    print(f"{len(x):,} points around {len(modes(name))} modes, in {folder}/points.npz")
    if status := paragan_main(
        ["train", RECIPE, f"--data={folder}/points.npz", f"--run-dir={folder}/run", *train_options]
    ):
        return status
    model = pg.load(folder / "run", nets="examples.mixture:Nets")
    indices = range(4000)
    points = model.sampler.images(indices, model.sampler.labels(indices, 0)).numpy()
    num_covered, close_fraction = count_covered_modes(points, modes(name))
    print(f"{num_covered} of {len(modes(name))} modes covered, {close_fraction:.1%} of points within 3 deviations")
    print(f"the points during training: {folder}/run/fakes*.png, {folder}/run/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
