"""Train an image tokenizer: an autoencoder with a codebook, whose discriminator starts late."""

from __future__ import annotations

from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.losses.reconstruction import Reconstruction
from paragan.nets import VQAutoencoder
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def tokenizer() -> Run:
    """Images to a grid of tokens and back, as VQGAN and LlamaGen do: give --data PATH (docs/tokenizer.md)."""
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
        evaluation=EvaluationOptions(metrics=("psnr", "fd"), count=5000),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=40.0, checkpoint_kimg=40.0),
    )
