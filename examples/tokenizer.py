"""A tokenizer with an adversarial loss: G is an encoder, a quantizer and a decoder. `python -m examples.tokenizer`

Shows user-defined networks and objective on real images. 8 x 8 digits become 4 tokens with 625 values each, with
reconstruction, feature matching and hinge loss as in VQGAN (Esser et al. 2021), and finite scalar quantization (Mentzer
et al. 2023) for the codebook. G gets images instead of latents. RUN_DIR/fakes*.png shows reconstructions and originals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, relu

import paragan as pg
from paragan.cli.main import main as paragan_main
from paragan.core.schema import config_class
from paragan.nets import Spec

RECIPE = str(Path(__file__).with_suffix(".yaml"))
LEVELS, DIMS = 5, 4  # a token is one of 5^4


class Tokenizer(nn.Module):
    """Images [N, C, R, R], y unused -> their reconstructions; `tokens` [N, R/4, R/4] in between."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * width, DIMS, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(DIMS, 2 * width, 3, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Tanh(),
        )

    def codes(self, x: Tensor) -> Tensor:
        """Return integers from -2 to 2, [N, DIMS, R/4, R/4], with the gradient of the values before rounding."""
        bounded = self.encoder(x).tanh() * (LEVELS // 2)
        return bounded + (bounded.round() - bounded).detach()

    def tokens(self, x: Tensor) -> Tensor:
        """Return the tokens, int64 [N, R/4, R/4] in 0..624."""
        digits = self.codes(x).round().long() + LEVELS // 2
        return (digits * LEVELS ** torch.arange(DIMS, device=x.device)[:, None, None]).sum(1)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.decoder(self.codes(x))


class PatchOutput(NamedTuple):
    """Output of D: logits of patches [N, 1, h, w], and its intermediate features."""

    logits: Tensor
    features: tuple[Tensor, ...]


class PatchDiscriminator(nn.Module):
    """Images, y unused -> `PatchOutput`."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor | None) -> PatchOutput:
        a = nn.functional.leaky_relu(self.first(x), 0.2)
        b = nn.functional.leaky_relu(self.second(a), 0.2)
        return PatchOutput(self.last(b), (a, b))


@config_class
class Nets:
    """A tokenizer as G, and a patch discriminator that returns its features."""

    name: str = "tokenizer"
    width: int = 48

    def generator(self, spec: Spec) -> nn.Module:
        return Tokenizer(spec.shape[0], self.width)

    def discriminator(self, spec: Spec) -> nn.Module:
        return PatchDiscriminator(spec.shape[0], self.width)

    def conditioning_input(self, real: pg.Batch) -> Tensor:
        """Return the input of G: the images."""
        return real.images


@config_class
class Objective:
    """D: hinge. G: |x - G(x)| + matching * |features of D| + adversarial * hinge, each a mean."""

    name: str = "tokenizer"
    matching: float = 1.0
    adversarial: float = 0.1
    second_order: ClassVar[bool] = False

    def discriminator(self, d, real: pg.Batch, fake: pg.Batch, step: int) -> pg.Loss:
        real_logits = d(real.images, None).logits
        fake_logits = d(fake.images, None).logits
        total = relu(1 - real_logits).mean() + relu(1 + fake_logits).mean()
        return pg.Loss(total, {"scores/real": real_logits.detach().mean(), "scores/fake": fake_logits.detach().mean()})

    def generator(self, d, fake: pg.Batch, real: pg.Batch, step: int) -> pg.Loss:
        on_fake = d(fake.images, None)
        on_real = d(real.images, None)
        distance = l1_loss(fake.images, real.images)
        matching = sum(l1_loss(a, b.detach()) for a, b in zip(on_fake.features, on_real.features))
        total = distance + self.matching * matching - self.adversarial * on_fake.logits.mean()
        return pg.Loss(total, {"G/distance": distance.detach(), "G/matching": matching.detach()})


def main(arguments: Sequence[str]) -> int:
    folder = Path("runs") / "tokenizer"
    if status := paragan_main(["train", RECIPE, f"--run-dir={folder}", *arguments]):
        return status
    data = pg.load_data("digits", resolution=8)
    model = pg.load(folder, nets="examples.tokenizer:Nets", dataset=data)
    fakes = model.sampler.images(range(len(data.images)), None).permute(0, 2, 3, 1).numpy()  # [N, 8, 8, 1]
    mse = np.square((fakes.astype(np.float64) - data.images) / 255).mean()
    x = torch.from_numpy(data.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    tokens = model.sampler.g.tokens(x).unique()
    print(f"mean squared error {mse:.5f}, PSNR {-10 * np.log10(mse):.1f} dB, on {len(fakes):,} digits of 4 tokens each")
    print(f"{len(tokens)} of {LEVELS**DIMS} tokens in use; 37 bits per image instead of 512")
    print(f"digits and their reconstructions: {folder}/fakes*.png, {folder}/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
