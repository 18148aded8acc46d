"""The first run: real handwritten digits that a dependency carries."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.nets import DCGAN
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def digits() -> Run:
    """1,797 handwritten digits (8 px, grey, 10 classes) in about a minute on two cores."""
    return Run(
        recipe="digits",
        data=DataOptions(path="digits", resolution=8, channels=1),
        nets=DCGAN(width=32, latent=64),
        objective=Adversarial(loss="hinge"),
        g=PlayerOptim(Adam(lr=1e-3, betas=(0.5, 0.99))),
        d=DiscriminatorOptim(Adam(lr=2e-3, betas=(0.5, 0.99))),
        ema=EMAConfig(half_life_kimg=5.0),
        batch=128,
        kimg=160.0,
        evaluation=EvaluationOptions(metrics=("fd", "kid", "prdc"), count=5000),
        device=DeviceOptions(precision="float32", threads=1),  # reproducible; bf16 gains a fifth (docs/tuning.md)
        output=OutputOptions(tick_kimg=2.0, fakes_kimg=20.0, checkpoint_kimg=20.0),
    )
