"""Networks with the hyper-parameters they were published with, on the data they were published on.

Of SNGAN, SAGAN, BigGAN and ContraGAN: those of StudioGAN's configurations (CIFAR10, CIFAR100, Tiny_ImageNet, ImageNet),
whose scores `docs/networks.md` quotes: optimizers, steps of D, batch, widths, embedding, average, mirrored images, and
its number of steps as kimg. BigGAN on ImageNet at 2,048 images: its `BigGAN-Mod2048`, the paper's own rates; eps 1e-6
as in Brock's PyTorch code. Of R3GAN: the authors' presets for CIFAR-10 and ImageNet-64, where rates, penalties and
betas are scheduled: here they stay at their first value, betas at their last, and images are not augmented. Of
StyleGAN2: the configurations of Karras et al. 2020, "Training Generative Adversarial Networks with Limited Data",
appendix, with ADA; at 64 and 128 px, where they have none, that of 256 px with a weight of R1 by their rule.

Of GAT: those of B on ImageNet's latents, for images.

Ours: lanes (batch norm and standard deviations see a lane's images; `--lanes 1` is one GPU's), everything of BigGAN at
256 px and above but the paper's rates and batch, and R3GAN's widths and penalties on data that its authors have no
preset for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paragan.config.run import Run
from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.losses.augment import ADA, DiffAugment
from paragan.nets import GAT, R3GAN, SAGAN, SNGAN, BigGAN, ContraGAN, Nets, StyleGAN2
from paragan.optim.optimizers import Adam, PlayerOptim, as_discriminator_optim

MAX_SCORED_RESOLUTION = 64  # pixels a side: a set of larger ones does not fit into memory as features


@dataclass(frozen=True)
class Hyperparameters:
    """How the players of a published run learn. g, d: rates; steps: of G, in thousands."""

    batch: int
    g_lr: float
    d_lr: float
    d_steps: int
    g_ksteps: float
    beta1: float = 0.0
    eps: float = 1e-8

    def make_player_optim(self, lr: float) -> PlayerOptim:
        return PlayerOptim(Adam(lr=lr, betas=(self.beta1, 0.999), eps=self.eps))

    @property
    def kimg(self) -> float:
        return self.g_ksteps * self.batch * self.d_steps


CIFAR_D5 = Hyperparameters(64, 2e-4, 2e-4, d_steps=5, g_ksteps=100, beta1=0.5)
TTUR_256 = Hyperparameters(256, 1e-4, 4e-4, d_steps=1, g_ksteps=100)
LOW_LR_256 = Hyperparameters(256, 5e-5, 2e-4, d_steps=2, g_ksteps=200, eps=1e-6)
TTUR_1024 = Hyperparameters(1024, 1e-4, 4e-4, d_steps=1, g_ksteps=100, eps=1e-6)
LOW_LR_2048 = Hyperparameters(2048, 5e-5, 2e-4, d_steps=2, g_ksteps=200, eps=1e-6)

# family: (for CIFAR, for Tiny ImageNet at 64 px, for ImageNet at 128 px)
HYPERPARAMETERS: dict[str, tuple[Hyperparameters, Hyperparameters, Hyperparameters]] = {
    "sngan": (CIFAR_D5, TTUR_256, replace(LOW_LR_256, g_ksteps=500, eps=1e-8)),
    "sagan": (CIFAR_D5, TTUR_256, replace(TTUR_256, g_ksteps=1000)),
    "biggan": (CIFAR_D5, TTUR_1024, LOW_LR_2048),
    "contragan": (CIFAR_D5, TTUR_1024, LOW_LR_256),
}
DATASETS = {"cifar10": (32, 0), "cifar100": (32, 0), "tinyimagenet64": (64, 1), "imagenet128": (128, 2)}


def make_nets(family: str, resolution: int) -> Nets:
    """The networks of a family as they were published at a resolution."""
    width, latent = {32: (96, 80), 64: (80, 100), 128: (96, 120)}[resolution]
    if family == "sngan":
        return SNGAN(block_width="out") if resolution == 32 else SNGAN(width=64, d_width=64, block_width="out")
    if family == "sagan":
        return SAGAN()
    if family == "biggan":
        return BigGAN(width=width, latent=latent)
    return ContraGAN(width=width, latent=latent, embedding={32: 512, 64: 768, 128: 1536}[resolution])


def published_run(family: str, data: str) -> Run:
    """One family on one set."""
    resolution, which = DATASETS[data]
    hyperparameters = HYPERPARAMETERS[family][which]
    averaged = family in ("biggan", "contragan")
    lanes = max(4, hyperparameters.batch // 32)
    return Run(
        recipe=f"{family}-{data}",
        data=DataOptions(resolution=resolution, channels=3, mirror=True),
        nets=make_nets(family, resolution),
        objective=Adversarial(contrastive=1.0 if family == "contragan" else 0.0),
        g=hyperparameters.make_player_optim(hyperparameters.g_lr),
        d=as_discriminator_optim(hyperparameters.make_player_optim(hyperparameters.d_lr)),
        d_steps=hyperparameters.d_steps,
        ema=EMAConfig(
            half_life_kimg=ema_half_life_kimg(hyperparameters) if averaged else ema_half_life_kimg(hyperparameters) / 10
        ),
        batch=hyperparameters.batch,
        lanes=lanes,
        kimg=hyperparameters.kimg,
        evaluation=make_evaluation(resolution),
        device=DeviceOptions(lanes_per_pass=8 if lanes > 8 else 0),
        output=make_output(hyperparameters.kimg),
    )


def ema_half_life_kimg(hyperparameters: Hyperparameters) -> float:
    """Of an average that keeps 0.9999 of itself a step of G, kimg."""
    return round(6.931 * hyperparameters.batch * hyperparameters.d_steps, 1)


def make_evaluation(resolution: int) -> EvaluationOptions:
    metrics = ("fd", "kid") if resolution <= 32 else ("kid",)
    return EvaluationOptions(metrics=metrics if resolution <= MAX_SCORED_RESOLUTION else ())


def make_output(kimg: float) -> OutputOptions:
    """A line of stats a hundred times in a thousand, grids and checkpoints a hundred times."""
    return OutputOptions(tick_kimg=min(kimg / 1000, 100.0), fakes_kimg=kimg / 100, checkpoint_kimg=kimg / 100)


def large_biggan_run(resolution: int) -> Run:
    """BigGAN on ImageNet at 256 px and above: fewer images a lane and a pass, the larger they are."""
    base = published_run("biggan", "imagenet128")
    images = {256: 32, 512: 16, 1024: 8}[resolution]
    parts = {256: 7, 512: 8, 1024: 9}[resolution]
    return replace(
        base,
        recipe=f"biggan-imagenet{resolution}",
        data=replace(base.data, resolution=resolution),
        nets=BigGAN(width=96, latent=20 * parts, checkpointing=resolution == 1024),
        lanes=base.batch // images,
        device=DeviceOptions(lanes_per_pass=1),
        evaluation=make_evaluation(resolution),
    )


# data: (width, images a step, first gamma, kimg)
R3GAN_SETTINGS = {
    "cifar10": (768, 512, 0.05, 20_000.0),
    "cifar100": (768, 512, 0.05, 20_000.0),
    "tinyimagenet64": (768, 512, 1.0, 20_000.0),
    "imagenet128": (1152, 2048, 10.0, 200_000.0),
}


def r3gan_run(data: str) -> Run:
    """R3GAN on one set."""
    resolution, _ = DATASETS[data]
    width, batch, gamma, kimg = R3GAN_SETTINGS[data]
    side = PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.99)))
    return Run(
        recipe=f"r3gan-{data}",
        data=DataOptions(resolution=resolution, channels=3, mirror=True),
        nets=R3GAN(width=width),
        objective=Adversarial(loss="relativistic", r1=gamma, r2=gamma),
        g=side,
        d=as_discriminator_optim(side),
        ema=EMAConfig(half_life_kimg=500.0),
        batch=batch,
        lanes=batch // 32,
        kimg=kimg,
        evaluation=make_evaluation(resolution),
        device=DeviceOptions(lanes_per_pass=8),
        output=make_output(kimg),
    )


@dataclass(frozen=True)
class StyleSettings:
    """How a StyleGAN2 learns: its widest maps times their side, layers of the mapping network, images of a standard
    deviation, weight of R1, half-life of the average."""

    resolution: int
    batch: int = 64
    lr: float = 2.5e-3
    channel_base: int = 16384
    mapping_layers: int = 8
    stddev_group: int = 8
    r1: float = 1.0
    ema_kimg: float = 20.0
    kimg: float = 25_000.0


CIFAR_STYLES = StyleSettings(32, 64, 2.5e-3, 32768, 2, 32, 0.01, 500.0, 100_000.0)
STYLE_SETTINGS = {
    "cifar10": CIFAR_STYLES,
    "cifar100": CIFAR_STYLES,
    "tinyimagenet64": StyleSettings(64, r1=0.0128),
    "imagenet128": StyleSettings(128, r1=0.0512),
    "256": StyleSettings(256),
    "512": StyleSettings(512, channel_base=32768, r1=0.5),
    "1024": StyleSettings(1024, 32, 2e-3, 32768, stddev_group=4, r1=2.0, ema_kimg=10.0),
}
LAZY_R1, LAZY_PATH_LENGTH = 16, 4  # steps between two regularizations


def stylegan2_run(data: str) -> Run:
    """StyleGAN2 with adaptive augmentation. Style mixing and path length are off for CIFAR, as in the paper."""
    settings = STYLE_SETTINGS[data]
    is_small = settings.resolution <= 32
    g, d = (lazy_optim(settings.lr, interval) for interval in (0 if is_small else LAZY_PATH_LENGTH, LAZY_R1))
    return Run(
        recipe=f"stylegan2-{data}",
        data=DataOptions(resolution=settings.resolution, channels=3, mirror=True),
        nets=StyleGAN2(
            channel_base=settings.channel_base,
            mapping_layers=settings.mapping_layers,
            stddev_group=settings.stddev_group,
            style_mixing=0.0 if is_small else 0.9,
        ),
        objective=Adversarial(
            loss="nonsaturating",
            r1=settings.r1,
            r1_every=LAZY_R1,
            path_length=0.0 if is_small else 2.0,
            path_length_every=LAZY_PATH_LENGTH,
            augment=ADA(),
        ),
        g=g,
        d=as_discriminator_optim(d),
        ema=EMAConfig(half_life_kimg=settings.ema_kimg),
        batch=settings.batch,
        lanes=8,
        kimg=settings.kimg,
        evaluation=make_evaluation(settings.resolution),
        output=make_output(settings.kimg),
    )


def lazy_optim(lr: float, interval: int) -> PlayerOptim:
    """Adam for a player that is regularized every `interval` steps (0: never), corrected as in Karras et al. 2020,
    appendix B: with c = interval / (interval + 1), the rate times c and the betas to the power of c."""
    c = interval / (interval + 1) if interval else 1.0
    return PlayerOptim(Adam(lr=lr * c, betas=(0.0, 0.99**c)))


@dataclass(frozen=True)
class TransformerSettings:
    """A GAT and its batch: see paragan/nets/gat.py. The resolution is 0 for latents, whose size the data say."""

    resolution: int
    patch: int
    width: int = 384
    depth: int = 12
    heads: int = 6
    batch: int = 512
    kimg: float = 50_000.0


GAT_SETTINGS = {
    "cifar10": TransformerSettings(32, 2),
    "cifar100": TransformerSettings(32, 2),
    "tinyimagenet64": TransformerSettings(64, 4),
    "imagenet128": TransformerSettings(128, 8),
    "latents": TransformerSettings(0, 2),
    "tiny-cifar10": TransformerSettings(32, 4, width=128, depth=4, heads=4, batch=64, kimg=2_000.0),
}
GAT_LR, GAT_LR_WIDTH, GAT_LR_BATCH = 2e-4, 768, 512  # a learning rate, and the networks and batch that it is for


def gat_run(data: str) -> Run:
    """GAT with the authors' settings for B on ImageNet: the rate is inversely proportional to the width, and
    proportional to the root of the batch."""
    settings = GAT_SETTINGS[data]
    lr = GAT_LR * GAT_LR_WIDTH / settings.width * math.sqrt(settings.batch / GAT_LR_BATCH)
    side = PlayerOptim(Adam(lr=float(f"{lr:.3g}"), betas=(0.0, 0.99)), max_norm=1.0)
    images = DataOptions(resolution=settings.resolution, channels=3, mirror=True)
    augment = DiffAugment()
    evaluation = make_evaluation(settings.resolution)
    if data == "latents":  # no images, to be flipped or to have colours
        images = DataOptions()
        augment = DiffAugment(policy=("translation", "cutout"))
        evaluation = EvaluationOptions(metrics=())  # the decoded images may be of any size
    return Run(
        recipe=f"gat-{data}",
        data=images,
        nets=GAT(width=settings.width, depth=settings.depth, heads=settings.heads, patch=settings.patch),
        objective=Adversarial(
            loss="relativistic",
            r1=0.1,
            r2=0.1,
            r1_r2_method="finite_difference",
            noise_levels=4,
            augment=augment,
        ),
        g=side,
        d=as_discriminator_optim(side),
        ema=EMAConfig(half_life_kimg=500.0 * settings.batch / GAT_LR_BATCH),
        batch=settings.batch,
        lanes=8,
        kimg=settings.kimg,
        evaluation=evaluation,
        output=make_output(settings.kimg),
    )


FAMILY_TITLES = {"sngan": "SNGAN", "sagan": "SAGAN", "biggan": "BigGAN", "contragan": "ContraGAN", "r3gan": "R3GAN"}
DATASET_TITLES = {
    "cifar10": "CIFAR-10 (32 px)",
    "cifar100": "CIFAR-100 (32 px)",
    "tinyimagenet64": "Tiny ImageNet (64 px)",
    "imagenet128": "ImageNet at 128 px",
}


def _with_docstring(make: Callable[[], Run], about: str) -> Callable[[], Run]:
    make.__doc__ = f"{about}: give --data PATH."
    return make


def published_recipes() -> dict[str, Callable[[], Run]]:
    """By name."""
    recipes: dict[str, Callable[[], Run]] = {}
    for family, title in FAMILY_TITLES.items():
        for data, about in DATASET_TITLES.items():
            make = (
                functools.partial(r3gan_run, data)
                if family == "r3gan"
                else functools.partial(published_run, family, data)
            )
            recipes[f"{family}-{data}"] = _with_docstring(make, f"{title} on {about}")
    for data in STYLE_SETTINGS:
        about = DATASET_TITLES.get(data, f"your images at {data} px")
        recipes[f"stylegan2-{data}"] = _with_docstring(
            functools.partial(stylegan2_run, data), f"StyleGAN2 with ADA on {about}"
        )
    for data in GAT_SETTINGS:
        size, _, images = data.rpartition("-")
        title = DATASET_TITLES.get(images, "latents that `paragan data encode` wrote")
        about = f"{'A tiny GAT, for two cores,' if size else 'GAT-S'} on {title}"
        recipes[f"gat-{data}"] = _with_docstring(functools.partial(gat_run, data), about)
    for resolution in (256, 512, 1024):
        about = f"BigGAN on ImageNet at {resolution} px"
        recipes[f"biggan-imagenet{resolution}"] = _with_docstring(
            functools.partial(large_biggan_run, resolution), about
        )
    return recipes
