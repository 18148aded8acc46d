"""Networks with the hyper-parameters they were published with, on the data they were published on.

Of SNGAN, SAGAN, BigGAN and ContraGAN: those of StudioGAN's configurations (CIFAR10, CIFAR100, Tiny_ImageNet, ImageNet),
whose scores `docs/networks.md` quotes: optimizers, steps of D, batch, widths, embedding, average, mirrored images, and
its number of steps as kimg. BigGAN on ImageNet at 2,048 images: its `BigGAN-Mod2048`, the paper's own rates; eps 1e-6
as in Brock's PyTorch code. Of R3GAN: the authors' presets for CIFAR-10 and ImageNet-64, where rates, penalties and
betas are scheduled: here they stay at their first value, betas at their last, and images are not augmented.

Ours: lanes (batch norm sees a lane's images; `--lanes 1` is one GPU's), everything at 256 px and above but the rates
and the batch of the BigGAN paper, and R3GAN's widths and penalties on data that its authors have no preset for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from paragan.config.run import Run
from paragan.config.sections import Data, Device, Evaluation, Output
from paragan.game.ema import Decay
from paragan.losses.adversarial import Adversarial
from paragan.nets import R3GAN, SAGAN, SNGAN, BigGAN, ContraGAN, Nets
from paragan.optim.optimizers import Adam, Side

MOST_SCORED = 64  # pixels a side: a set of larger ones does not fit into memory as features


@dataclass(frozen=True)
class Learning:
    """How the players of a published run learn. g, d: rates; steps: of G, in thousands."""

    batch: int
    g: float
    d: float
    d_steps: int
    steps: float
    beta1: float = 0.0
    eps: float = 1e-8

    def side(self, lr: float) -> Side:
        return Side(Adam(lr=lr, betas=(self.beta1, 0.999), eps=self.eps))

    @property
    def kimg(self) -> float:
        return self.steps * self.batch * self.d_steps


CIFAR = Learning(64, 2e-4, 2e-4, d_steps=5, steps=100, beta1=0.5)
TTUR = Learning(256, 1e-4, 4e-4, d_steps=1, steps=100)
SLOW = Learning(256, 5e-5, 2e-4, d_steps=2, steps=200, eps=1e-6)
BIG = Learning(1024, 1e-4, 4e-4, d_steps=1, steps=100, eps=1e-6)
HUGE = Learning(2048, 5e-5, 2e-4, d_steps=2, steps=200, eps=1e-6)

# family: (for CIFAR, for Tiny ImageNet at 64 px, for ImageNet at 128 px)
LEARNING: dict[str, tuple[Learning, Learning, Learning]] = {
    "sngan": (CIFAR, TTUR, replace(SLOW, steps=500, eps=1e-8)),
    "sagan": (CIFAR, TTUR, replace(TTUR, steps=1000)),
    "biggan": (CIFAR, BIG, HUGE),
    "contragan": (CIFAR, BIG, SLOW),
}
DATA = {"cifar10": (32, 0), "cifar100": (32, 0), "tinyimagenet64": (64, 1), "imagenet128": (128, 2)}


def nets(family: str, resolution: int) -> Nets:
    """The networks of a family as they were published at a resolution."""
    width, latent = {32: (96, 80), 64: (80, 100), 128: (96, 120)}[resolution]
    if family == "sngan":
        return SNGAN(hidden="out") if resolution == 32 else SNGAN(width=64, d_width=64, hidden="out")
    if family == "sagan":
        return SAGAN()
    if family == "biggan":
        return BigGAN(width=width, latent=latent)
    return ContraGAN(width=width, latent=latent, embedding={32: 512, 64: 768, 128: 1536}[resolution])


def published(family: str, data: str) -> Run:
    """One family on one set."""
    resolution, which = DATA[data]
    how = LEARNING[family][which]
    averaged = family in ("biggan", "contragan")
    lanes = max(4, how.batch // 32)
    return Run(
        recipe=f"{family}-{data}",
        data=Data(resolution=resolution, channels=3, mirror=True),
        nets=nets(family, resolution),
        objective=Adversarial(contrastive=1.0 if family == "contragan" else 0.0),
        g=how.side(how.g),
        d=how.side(how.d),
        d_steps=how.d_steps,
        average=Decay(half_life_kimg=half_life(how) if averaged else half_life(how) / 10),
        batch=how.batch,
        lanes=lanes,
        kimg=how.kimg,
        evaluation=scored(resolution),
        device=Device(merge=8 if lanes > 8 else 0),
        output=written(how.kimg),
    )


def half_life(how: Learning) -> float:
    """Of an average that keeps 0.9999 of itself a step of G, kimg."""
    return round(6.931 * how.batch * how.d_steps, 1)


def scored(resolution: int) -> Evaluation:
    metrics = ("fd", "kid") if resolution <= 32 else ("kid",)
    return Evaluation(metrics=metrics if resolution <= MOST_SCORED else ())


def written(kimg: float) -> Output:
    """A line of stats a hundred times in a thousand, grids and checkpoints a hundred times."""
    return Output(tick_kimg=min(kimg / 1000, 100.0), fakes_kimg=kimg / 100, checkpoint_kimg=kimg / 100)


def large(resolution: int) -> Run:
    """BigGAN on ImageNet at 256 px and above: fewer images a lane and a pass, the larger they are."""
    base = published("biggan", "imagenet128")
    images = {256: 32, 512: 16, 1024: 8}[resolution]
    parts = {256: 7, 512: 8, 1024: 9}[resolution]
    return replace(
        base,
        recipe=f"biggan-imagenet{resolution}",
        data=replace(base.data, resolution=resolution),
        nets=BigGAN(width=96, latent=20 * parts, checkpointing=resolution == 1024),
        lanes=base.batch // images,
        device=Device(merge=1),
        evaluation=scored(resolution),
    )


# data: (width, images a step, first gamma, kimg)
R3 = {
    "cifar10": (768, 512, 0.05, 20_000.0),
    "cifar100": (768, 512, 0.05, 20_000.0),
    "tinyimagenet64": (768, 512, 1.0, 20_000.0),
    "imagenet128": (1152, 2048, 10.0, 200_000.0),
}


def r3gan(data: str) -> Run:
    """R3GAN on one set."""
    resolution, _ = DATA[data]
    width, batch, gamma, kimg = R3[data]
    side = Side(Adam(lr=2e-4, betas=(0.0, 0.99)))
    return Run(
        recipe=f"r3gan-{data}",
        data=Data(resolution=resolution, channels=3, mirror=True),
        nets=R3GAN(width=width),
        objective=Adversarial(loss="relativistic", r1=gamma, r2=gamma),
        g=side,
        d=side,
        average=Decay(half_life_kimg=500.0),
        batch=batch,
        lanes=batch // 32,
        kimg=kimg,
        evaluation=scored(resolution),
        device=Device(merge=8),
        output=written(kimg),
    )


TITLES = {"sngan": "SNGAN", "sagan": "SAGAN", "biggan": "BigGAN", "contragan": "ContraGAN", "r3gan": "R3GAN"}
SETS = {
    "cifar10": "CIFAR-10 (32 px)",
    "cifar100": "CIFAR-100 (32 px)",
    "tinyimagenet64": "Tiny ImageNet (64 px)",
    "imagenet128": "ImageNet at 128 px",
}


def _named(make: Callable[[], Run], about: str) -> Callable[[], Run]:
    make.__doc__ = f"{about}: give --data PATH."
    return make


def recipes() -> dict[str, Callable[[], Run]]:
    """By name."""
    found: dict[str, Callable[[], Run]] = {}
    for family, title in TITLES.items():
        for data, about in SETS.items():
            make = functools.partial(r3gan, data) if family == "r3gan" else functools.partial(published, family, data)
            found[f"{family}-{data}"] = _named(make, f"{title} on {about}")
    for resolution in (256, 512, 1024):
        about = f"BigGAN on ImageNet at {resolution} px"
        found[f"biggan-imagenet{resolution}"] = _named(functools.partial(large, resolution), about)
    return found
