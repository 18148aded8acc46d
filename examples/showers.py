"""Showers of particles in a calorimeter: energies in 8 x 8 x 8 cells. `python -m examples.showers`

Shows user-defined networks for volumes [N, 1, D, H, W], and compares physical quantities of fakes and reals: the total
energy, its depth and its width. RUN_DIR/fakes*.png has a row of layers for each shower. Options of `paragan train` may
follow.
"""

from __future__ import annotations

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
SIZE = 8
KINDS = ("electron", "photon")
NOISE_FLOOR = 0.01  # GeV: networks get log(1 + E / 10 MeV)


def simulate_showers(count: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Return energies [N, 1, D, H, W] in GeV and the kind of each shower, [N].

    A toy version of Longo and Sestili (1975): energy follows a gamma distribution along the depth t (radiation lengths)
    and an exponential across; the shower of a photon starts at its first interaction. Each GeV is 200 particles.
    """
    rng = np.random.default_rng(0)
    kinds = rng.integers(2, size=count)
    energy = rng.uniform(2, 10, count)  # GeV
    start = np.where(kinds == 1, rng.exponential(9 / 7, count), 0.0)
    shape = 1 + 0.5 * (np.log(energy / 0.01) - 0.5 + 0.3 * rng.standard_normal(count))
    width = 0.6 * rng.lognormal(0, 0.15, count)  # cells
    showers = np.zeros((count, SIZE, SIZE, SIZE), np.float32)
    for i in range(count):
        quanta = rng.poisson(200 * energy[i])
        depth = (start[i] + rng.gamma(shape[i], 2.0, quanta)) / 24 * SIZE  # 24 radiation lengths in all
        radius = width[i] * rng.exponential(1 + 0.15 * depth)
        angle = rng.uniform(0, 2 * np.pi, quanta)
        position = np.stack([depth, SIZE / 2 + radius * np.cos(angle), SIZE / 2 + radius * np.sin(angle)])
        inside = ((position >= 0) & (position < SIZE)).all(0)
        np.add.at(showers[i], tuple(position[:, inside].astype(int)), 1 / 200)
    return showers[:, None], kinds


def to_log(energy: np.ndarray) -> np.ndarray:
    """Convert GeV to the input of the networks."""
    return np.log1p(energy / NOISE_FLOOR, dtype=np.float32)


def to_energy(x: np.ndarray) -> np.ndarray:
    """Convert the output of G to GeV, at least 0."""
    return NOISE_FLOOR * np.expm1(np.maximum(x, 0))


def summaries(energy: np.ndarray) -> dict[str, np.ndarray]:
    """Return the total energy (GeV), mean depth and mean radius (cells) of showers [N, 1, D, H, W], each [N]."""
    cells = energy[:, 0]
    total = cells.sum((1, 2, 3)) + 1e-9
    depth = (cells.sum((2, 3)) * (np.arange(SIZE) + 0.5)).sum(1) / total
    radius = np.hypot(*np.meshgrid(*[np.arange(SIZE) + 0.5 - SIZE / 2] * 2))
    return {"energy": total, "depth": depth, "radius": (cells.sum(1) * radius).sum((1, 2)) / total}


def wasserstein_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Wasserstein distance of two samples, in standard deviations of the first."""
    levels = (np.arange(500) + 0.5) / 500
    return float(np.abs(np.quantile(a, levels) - np.quantile(b, levels)).mean() / a.std())


def profile(energy: np.ndarray) -> np.ndarray:
    """Return the fraction of the energy in each layer, [D]."""
    layers = energy[:, 0].sum((0, 2, 3))
    return layers / layers.sum()


class Generator(nn.Module):
    """z [N, latent], y [N] or None -> log energies [N, 1, 8, 8, 8], none negative."""

    def __init__(self, latent: int, width: int, classes: int):
        super().__init__()
        self.start = nn.Linear(latent, 4 * width * 8)
        self.kind = nn.Embedding(max(classes, 1), 4 * width * 8)
        nn.init.normal_(self.kind.weight, std=0.1)
        self.ups = nn.Sequential(
            nn.LeakyReLU(0.2),
            nn.ConvTranspose3d(4 * width, 2 * width, 4, 2, 1),  # 2 -> 4
            nn.LeakyReLU(0.2),
            nn.ConvTranspose3d(2 * width, width, 4, 2, 1),  # 4 -> 8
            nn.LeakyReLU(0.2),
            nn.Conv3d(width, 1, 3, padding=1),
            nn.Softplus(),
        )
        nn.init.constant_(self.ups[-2].bias, -2)  # most cells are empty

    def forward(self, z: Tensor, y: Tensor | None) -> Tensor:
        h = self.start(z)
        h = h if y is None else h + self.kind(y)
        return self.ups(h.view(len(z), -1, 2, 2, 2))


class Discriminator(nn.Module):
    """Log energies [N, 1, 8, 8, 8], y [N] or None -> logits [N]. It also gets the energy of every layer."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.downs = nn.Sequential(
            nn.Conv3d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv3d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(16 * width + SIZE + 1, 128), nn.LeakyReLU(0.2))
        self.logit, self.kind = nn.Linear(128, 1), nn.Embedding(max(classes, 1), 128)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        energy = torch.expm1(x.clamp(0, 8)).sum((1, 3, 4)) * NOISE_FLOOR  # [N, D] GeV
        energies = torch.cat([energy, energy.sum(1, keepdim=True) / 5], 1)
        h = self.head(torch.cat([self.downs(x), energies], 1))
        logits = self.logit(h).squeeze(1)
        return logits if y is None else logits + (h * self.kind(y)).sum(1)


@config_class
class Nets:
    """Three-dimensional convolutional networks."""

    name: str = "showers"
    latent: int = 32
    width: int = 12

    def check(self, spec: Spec) -> None:
        if spec.shape != (1, SIZE, SIZE, SIZE):
            raise pg.UsageError(f"nets: these networks are for volumes [1, 8, 8, 8]; the data are {list(spec.shape)}")

    def generator(self, spec: Spec) -> nn.Module:
        return Generator(self.latent, self.width, spec.classes)

    def discriminator(self, spec: Spec) -> nn.Module:
        return Discriminator(self.width, spec.classes)


def main(arguments: Sequence[str]) -> int:
    folder = Path("runs") / "showers"
    folder.mkdir(parents=True, exist_ok=True)
    real, kinds = simulate_showers()
    np.savez(folder / "showers.npz", x=to_log(real), labels=kinds, classes=np.array(KINDS))
    print(f"{len(real):,} showers of {real.sum((1, 2, 3, 4)).mean():.2f} GeV on average, in {folder}/showers.npz")
    if status := paragan_main(["train", RECIPE, f"--data={folder}/showers.npz", f"--run-dir={folder}/run", *arguments]):
        return status
    model = pg.load(folder / "run", nets="examples.showers:Nets")
    indices = range(len(real))
    labels = model.sampler.labels(indices, 0)
    fakes = to_energy(model.sampler.images(indices, labels).numpy())
    of_reals = summaries(real)
    of_fakes = summaries(fakes)
    print("            real            fake           distance (standard deviations)")
    for name in of_reals:
        real_values = of_reals[name]
        fake_values = of_fakes[name]
        texts = (f"{values.mean():6.2f} +- {values.std():5.2f}" for values in (real_values, fake_values))
        print(f"{name:<8} {'  '.join(texts)}   {wasserstein_distance(real_values, fake_values):.3f}")
    if labels is not None:
        for label, kind in enumerate(KINDS):
            real_depth = of_reals["depth"][kinds == label].mean()
            fake_depth = of_fakes["depth"][labels == label].mean()
            print(f"mean depth of {kind}s: {real_depth:.2f} cells real, {fake_depth:.2f} fake")
    print(f"longitudinal profile: {np.abs(profile(real) - profile(fakes)).sum() / 2:.2%} of the energy in other layers")
    print(f"layer by layer: {folder}/run/fakes*.png, {folder}/run/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
