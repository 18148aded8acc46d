"""Diffusion models, and generators of one step that are distilled from them."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.denoising import Denoising
from paragan.losses.distribution_matching import DistributionMatching
from paragan.nets import EDM
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim

KIMG = 2000.0


def diffusion() -> Run:
    """A small diffusion model (EDM), one player: give --data PATH, or digits (docs/diffusion.md)."""
    return Run(
        recipe="diffusion",
        nets=EDM(),
        objective=Denoising(),
        g=PlayerOptim(Adam(lr=1e-3, betas=(0.9, 0.999)), warm_up_kimg=20.0),
        ema=EMAConfig(half_life_kimg=50.0),
        batch=128,
        kimg=KIMG,
        evaluation=EvaluationOptions(metrics=("kid",)),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=100.0, checkpoint_kimg=100.0),
    )


def distill() -> Run:
    """A diffusion model distilled into one step (DMD2): give --data PATH and --teacher RUN_DIR (docs/diffusion.md)."""
    learning = Adam(lr=1e-4, betas=(0.0, 0.999))
    return Run(
        recipe="distill",
        nets=EDM(steps=1, critic="score"),
        objective=DistributionMatching(),
        g=PlayerOptim(learning),
        d=DiscriminatorOptim(learning),
        d_steps=5,
        ema=EMAConfig(half_life_kimg=20.0),
        batch=128,
        kimg=KIMG,
        evaluation=EvaluationOptions(metrics=("kid",)),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=100.0, checkpoint_kimg=100.0),
    )
