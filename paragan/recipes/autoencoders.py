"""Networks that are given real data and compared with them: an image tokenizer, an upscaler, and a vocoder."""

from __future__ import annotations

from typing import Any

from paragan.config.run import Run
from paragan.config.sections import DataOptions, EvaluationOptions, OutputOptions
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.losses.reconstruction import Reconstruction
from paragan.nets import HiFiGAN, SuperResolution, VQAutoencoder
from paragan.optim.optimizers import Adam, DiscriminatorOptim, PlayerOptim


def tokenizer() -> Run:
    """Images to tokens and back, as VQGAN and LlamaGen: give --data PATH (docs/reconstruction.md)."""
    objective = Reconstruction(
        l1=1.0,
        outputs={"commitment": 0.25},
        adversarial_weight=0.2,
        weighting="adaptive",
        max_adaptive_weight=0.15,  # unbounded, it grows while D is at chance, and keeps D there
        adversarial=Adversarial(loss="nonsaturating"),
    )
    return _make_run("tokenizer", VQAutoencoder(), objective, Adam(lr=4e-4, betas=(0.5, 0.9)))


def super_resolution() -> Run:
    """Twice the pixels, of degraded images, as Real-ESRGAN trains: give --data PATH (docs/reconstruction.md)."""
    objective = Reconstruction(l1=1.0, adversarial_weight=0.02, adversarial=Adversarial(loss="nonsaturating"))
    return _make_run("super-resolution", SuperResolution(), objective, Adam(lr=4e-4, betas=(0.9, 0.99)))


def vocoder() -> Run:
    """Mel spectrograms to speech, as HiFi-GAN: give --data PATH with audio (docs/reconstruction.md)."""
    adversarial = Adversarial(loss="least_squares")
    objective = Reconstruction(l1=0.0, mel=45.0, feature_matching=2.0, adversarial=adversarial)
    optimizer = Adam(lr=4e-4, betas=(0.8, 0.99), weight_decay=0.01)
    decay: dict[str, Any] = {"schedule": "exponential", "lr_half_life_kimg": 100.0}
    return Run(
        recipe="vocoder",
        data=DataOptions(segment=2048, labels=False),
        nets=HiFiGAN(),
        objective=objective,
        g=PlayerOptim(optimizer, **decay),
        d=DiscriminatorOptim(optimizer, **decay),
        ema=EMAConfig(half_life_kimg=2.0),
        batch=16,
        kimg=150.0,
        evaluation=EvaluationOptions(metrics=("log_mel", "stft"), count=300),
        output=OutputOptions(tick_kimg=1.0, fakes_kimg=10.0, checkpoint_kimg=10.0),
    )


def _make_run(name: str, nets: VQAutoencoder | SuperResolution, objective: Reconstruction, optimizer: Adam) -> Run:
    """Return a run in which G trains alone for a fifth of the time."""
    return Run(
        recipe=name,
        nets=nets,
        objective=objective,
        g=PlayerOptim(optimizer),
        d=DiscriminatorOptim(optimizer, start_kimg=100.0),
        ema=EMAConfig(half_life_kimg=10.0),
        batch=128,
        kimg=500.0,
        evaluation=EvaluationOptions(metrics=("psnr", "kid"), count=5000),
        output=OutputOptions(tick_kimg=4.0, fakes_kimg=40.0, checkpoint_kimg=40.0),
    )
