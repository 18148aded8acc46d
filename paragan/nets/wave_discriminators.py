"""Discriminators of waves: of every p-th sample, and of spectrograms at several resolutions.

Multi-period: Kong et al. 2020, "HiFi-GAN" (arXiv:2010.05646). Multi-resolution: Jang et al. 2021, "UnivNet"
(arXiv:2106.07889), which BigVGAN uses in place of HiFi-GAN's multi-scale discriminator (Lee et al. 2023).
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.spectrograms import mirror_ends, stft_magnitude
from paragan.core.types import DiscriminatorOutput
from paragan.nets.ensemble import DiscriminatorEnsemble
from paragan.nets.hifigan import LEAKY_RELU_SLOPE, weight_norm
from paragan.nets.memory_format import FlattenCL, MemoryFormat


class FeatureStack(nn.Module):
    """[N, 1, H, W] -> `DiscriminatorOutput`: convolutions with leaky ReLUs, whose maps are the features, and one more.

    Args:
        convs: the convolutions.
        last: the one that makes the logits.
        slope: of the leaky ReLUs.
    """

    def __init__(self, convs: Sequence[nn.Module], last: nn.Module, slope: float):
        super().__init__()
        self.slope = slope
        self.input_format = MemoryFormat()
        self.convs = nn.ModuleList(weight_norm(conv) for conv in convs)
        self.last = weight_norm(last)
        self.flatten = FlattenCL()

    def forward(self, x: Tensor) -> DiscriminatorOutput:
        h = self.input_format(x)
        features: list[Tensor] = []
        for conv in self.convs:
            h = F.leaky_relu(_run_conv(conv, h), self.slope, inplace=True)
            features.append(h)
        logits = self.flatten(self.last(h))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return DiscriminatorOutput(logits, features=tuple(features))


def _run_conv(conv: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution to x [N, C, H, W].

    Where the output has one column, torch's gradients of a strided convolution are wrong on CPUs (of bf16, and of
    channels_last with one channel; torch 2.13). There x gets columns of zeros, and the output loses what they add.
    """
    assert isinstance(conv, nn.Conv2d)
    stride = conv.stride[1]
    if stride == 1 or x.shape[3] + 2 * int(conv.padding[1]) - conv.kernel_size[1] >= stride:
        return conv(x)
    return conv(F.pad(x, (0, stride)))[..., :1]


class PeriodDiscriminator(nn.Module):
    """Waves [N, 1, T], y unused -> `DiscriminatorOutput`: convolutions over every `period`-th sample.

    Time runs along rows, and not along columns as in the paper's code: kernels along rows are faster on a CPU.

    Args:
        period: p; the wave becomes an image of p rows of T / p, mirrored at its end where p does not divide T.
        width: channels after the first layer; 32 in the paper.
    """

    def __init__(self, period: int, width: int = 32):
        super().__init__()
        self.period = period
        widths = [1, width, 4 * width, 16 * width, 32 * width]
        convs = [nn.Conv2d(a, b, (1, 5), (1, 3), (0, 2)) for a, b in itertools.pairwise(widths)]
        convs.append(nn.Conv2d(32 * width, 32 * width, (1, 5), 1, (0, 2)))
        self.stack = FeatureStack(convs, nn.Conv2d(32 * width, 1, (1, 3), 1, (0, 1)), LEAKY_RELU_SLOPE)

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        padded = mirror_ends(x, 0, -x.shape[2] % self.period)
        return self.stack(padded.unflatten(2, (-1, self.period)).transpose(2, 3))


class ResolutionDiscriminator(nn.Module):
    """Waves [N, 1, T], y unused -> `DiscriminatorOutput`: convolutions over the magnitudes of a spectrogram.

    Args:
        n_fft: samples of a window.
        hop: samples between windows.
        width: channels; 32 in the paper.
    """

    def __init__(self, n_fft: int, hop: int, width: int = 32):
        super().__init__()
        self.n_fft = n_fft
        self.hop = hop
        convs = [nn.Conv2d(1, width, (3, 9), 1, (1, 4))]
        convs += [nn.Conv2d(width, width, (3, 9), (1, 2), (1, 4)) for _ in range(3)]
        convs.append(nn.Conv2d(width, width, 3, 1, 1))
        self.stack = FeatureStack(convs, nn.Conv2d(width, 1, 3, 1, 1), 0.2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        return self.stack(stft_magnitude(x, self.n_fft, self.hop)[:, None])


def wave_discriminator(
    periods: Sequence[int] = (2, 3, 5, 7, 11),
    resolutions: Sequence[tuple[int, int]] = ((512, 128), (256, 64), (128, 32)),
    width: int = 32,
    resolution_width: int = 32,
) -> nn.Module:
    """Return one discriminator for each period and for each resolution, as one.

    Args:
        periods: of `PeriodDiscriminator`s.
        resolutions: (n_fft, hop) of `ResolutionDiscriminator`s, samples.
        width: of `PeriodDiscriminator`s.
        resolution_width: of `ResolutionDiscriminator`s.
    """
    by_period = [PeriodDiscriminator(period, width) for period in periods]
    by_resolution = [ResolutionDiscriminator(n_fft, hop, resolution_width) for n_fft, hop in resolutions]
    return DiscriminatorEnsemble([*by_period, *by_resolution])
