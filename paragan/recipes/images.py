"""Runs on images the user brings."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import DataOptions, EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.nets import SNGAN
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def fashion() -> Run:
    """Fashion-MNIST (28 -> 32 px, grey, 10 classes): give --data PATH.npz with images and labels."""
    return Run(
        recipe="fashion",
        data=DataOptions(resolution=32, channels=1),
        nets=SNGAN(width=64),
        objective=Adversarial(loss="hinge"),
        g=PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.9))),
        d=DiscriminatorOptim(Adam(lr=4e-4, betas=(0.0, 0.9))),
        ema=EMAConfig(half_life_kimg=20.0),
        batch=128,
        kimg=500.0,
        evaluation=EvaluationOptions(metrics=("fd", "kid")),  # prdc costs the square of the reals: minutes
        output=OutputOptions(tick_kimg=2.0, fakes_kimg=20.0, checkpoint_kimg=50.0),
    )


def folder() -> Run:
    """Any images, 32 to 64 px, with or without classes: give --data PATH or ADDRESS (docs/data.md)."""
    return Run(
        recipe="folder",
        nets=SNGAN(width=128),
        objective=Adversarial(loss="hinge"),
        g=PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.9))),
        d=DiscriminatorOptim(Adam(lr=2e-4, betas=(0.0, 0.9))),
        ema=EMAConfig(half_life_kimg=20.0),
        batch=128,
        kimg=2000.0,
        evaluation=EvaluationOptions(metrics=("kid",)),  # 64 x 64 pixels in colour are too many for fd
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=50.0, checkpoint_kimg=100.0),
    )
