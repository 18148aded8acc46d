"""Games of the user's own parts."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import DeviceOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def custom() -> Run:
    """Networks, losses or numbers of your own: give --nets MODULE:CLASS and --data PATH (docs/custom_code.md)."""
    return Run(
        recipe="custom",
        g=PlayerOptim(Adam(lr=1e-3, betas=(0.5, 0.99))),
        d=DiscriminatorOptim(Adam(lr=1e-3, betas=(0.5, 0.99))),
        ema=EMAConfig(half_life_kimg=5.0),
        batch=128,
        device=DeviceOptions(precision="float32"),  # what is small gains nothing from less
        output=OutputOptions(tick_kimg=2.0, fakes_kimg=20.0, checkpoint_kimg=50.0),
    )
