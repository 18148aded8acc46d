"""HiFi-GAN: a generator of waves from mel spectrograms.

Kong, Kim and Bae, "HiFi-GAN: Generative Adversarial Networks for Efficient and High Fidelity Speech Synthesis", 2020
(arXiv:2010.05646). Transposed convolutions raise the rate from frames to samples; after each, the mean of residual
blocks of several kernel sizes. The discriminators are in `nets/wave_discriminators.py`.

Maps are images of one row, [N, C, 1, T], because torch's one-dimensional convolutions know no channels_last: on a CPU
their backward pass takes up to twice as long.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from paragan.nets.memory_format import MemoryFormat

LEAKY_RELU_SLOPE = 0.1
LAST_SLOPE = 0.01
INITIAL_STD = 0.01
DILATIONS = {1: ((1, 3, 5), (1, 3, 5), (1, 3, 5)), 2: ((1, 2), (2, 6), (3, 12))}
KERNELS = {1: (3, 7, 11), 2: (3, 5, 7)}


def weight_norm(layer: nn.Module) -> nn.Module:
    """Split the weight of `layer` into length and direction (Salimans and Kingma 2016, arXiv:1602.07868)."""
    return parametrizations.weight_norm(layer)


class HiFiGANGenerator(nn.Module):
    """Mel spectrogram [N, mels, F], y unused -> wave [N, 1, F * hop] in [-1, 1], hop the product of `upsample_rates`.

    Args:
        mels: channels of the input.
        upsample_rates: factors by which the rate rises, one for each stage.
        width: channels before the first stage; they halve with each.
        block: the paper's residual block 1 (V1, V2) or 2 (V3: fewer and shorter convolutions).
    """

    def __init__(self, mels: int, upsample_rates: Sequence[int] = (8, 8), width: int = 128, block: Literal[1, 2] = 2):
        super().__init__()
        widths = [width >> i for i in range(len(upsample_rates) + 1)]
        self.input_format = MemoryFormat()
        self.first = weight_norm(nn.Conv2d(mels, width, (1, 7), padding=(0, 3)))
        stages = [WaveUpsample(a, rate, block) for a, rate in zip(widths, upsample_rates)]
        self.stages = nn.Sequential(*stages)
        self.last = weight_norm(_initialise(nn.Conv2d(widths[-1], 1, (1, 7), padding=(0, 3))))

    def forward(self, mel: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.first(self.input_format(mel[:, :, None]))
        h = F.leaky_relu(self.stages(h), LAST_SLOPE)
        with torch.autocast(mel.device.type, enabled=False):  # 8 bits of bf16 would be audible
            return torch.tanh(self.last(h.to(mel.dtype))).squeeze(2)


class WaveUpsample(nn.Module):
    """[N, C, 1, T] -> [N, C / 2, 1, T * rate]: a transposed convolution, then the mean of residual blocks (MRF)."""

    def __init__(self, channels: int, rate: int, block: Literal[1, 2]):
        super().__init__()
        padding = (rate + 1) // 2
        up = nn.ConvTranspose2d(
            channels, channels // 2, (1, 2 * rate), (1, rate), (0, padding), output_padding=(0, 2 * padding - rate)
        )
        self.up = weight_norm(_initialise(up))
        kinds = zip(KERNELS[block], DILATIONS[block])
        self.blocks = nn.ModuleList(
            DilatedBlock(channels // 2, kernel, dilations, two=block == 1) for kernel, dilations in kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(F.leaky_relu(x, LEAKY_RELU_SLOPE))
        total = self.blocks[0](h)
        for block in self.blocks[1:]:
            total = total + block(h)
        return total / len(self.blocks)


class DilatedBlock(nn.Module):
    """[N, C, 1, T] -> the same shape: for each dilation x + conv(leaky(x)), or x + conv(leaky(conv(leaky(x))))."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int], two: bool):
        super().__init__()
        self.dilated = nn.ModuleList(_conv(channels, kernel, dilation) for dilation in dilations)
        self.plain = nn.ModuleList(_conv(channels, kernel, 1) for _ in dilations if two)

    def forward(self, x: Tensor) -> Tensor:
        for i, dilated in enumerate(self.dilated):
            h = dilated(F.leaky_relu(x, LEAKY_RELU_SLOPE))
            if self.plain:
                h = self.plain[i](F.leaky_relu(h, LEAKY_RELU_SLOPE, inplace=True))
            x = x + h
        return x


def _conv(channels: int, kernel: int, dilation: int) -> nn.Module:
    padding = dilation * (kernel // 2)
    layer = nn.Conv2d(channels, channels, (1, kernel), padding=(0, padding), dilation=(1, dilation))
    return weight_norm(_initialise(layer))


def _initialise(layer: nn.Conv2d | nn.ConvTranspose2d) -> nn.Module:
    nn.init.normal_(layer.weight, 0, INITIAL_STD)
    return layer
