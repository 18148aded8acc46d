"""Networks that are given real data and compared with them: an image tokenizer, and an upscaler."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.losses.reconstruction import Reconstruction
from paragan.nets import SuperResolution, VQAutoencoder
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def tokenizer() -> Run:
    """Images to tokens and back, as VQGAN and LlamaGen: give --data PATH (docs/reconstruction.md)."""
    return Run(
        recipe="tokenizer",
        nets=VQAutoencoder(),
        objective=Reconstruction(
            l1=1.0,
            outputs={"commitment": 0.25},
            adversarial_weight=0.5,
            weighting="adaptive",
            adversarial=Adversarial(loss="hinge"),
        ),
        g=PlayerOptim(Adam(lr=4e-4, betas=(0.5, 0.9))),
        d=DiscriminatorOptim(Adam(lr=4e-4, betas=(0.5, 0.9)), start_kimg=100.0),
        ema=EMAConfig(half_life_kimg=10.0),
        batch=128,
        kimg=600.0,
        evaluation=EvaluationOptions(metrics=("fd",), count=5000),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=40.0, checkpoint_kimg=40.0),
    )


def super_resolution() -> Run:
    """Twice the pixels, of degraded images, as Real-ESRGAN trains: give --data PATH (docs/reconstruction.md)."""
    return Run(
        recipe="super-resolution",
        nets=SuperResolution(),
        objective=Reconstruction(l1=1.0, adversarial_weight=0.02, adversarial=Adversarial(loss="nonsaturating")),
        g=PlayerOptim(Adam(lr=4e-4, betas=(0.9, 0.99))),
        d=DiscriminatorOptim(Adam(lr=4e-4, betas=(0.9, 0.99)), start_kimg=100.0),
        ema=EMAConfig(half_life_kimg=10.0),
        batch=128,
        kimg=600.0,
        evaluation=EvaluationOptions(metrics=("fd",), count=5000),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=40.0, checkpoint_kimg=40.0),
    )
