"""Bottlenecks without a codebook: finite scalar quantization, and a diagonal Gaussian with its KL divergence.

Those with one are in `nets/codebook.py`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paragan.nets.codebook import QuantizerOutput, straight_through

EPS = 1e-3
MIN_LOG_VARIANCE = -30.0
MAX_LOG_VARIANCE = 20.0


class FiniteScalarQuantizer(nn.Module):
    """z [N, D, ...] -> `QuantizerOutput`: channel i is rounded to one of `levels[i]` values between -1 and 1.

    Mentzer et al., "Finite Scalar Quantization: VQ-VAE Made Simple", 2023 (arXiv:2309.15505), as in the authors' code:
    a shift makes 0 a value also where the number of levels is even. A code is the mixed-radix number of its channels,
    the first channel being the lowest digit. There is nothing to commit to: `commitment` is 0.

    Args:
        levels: numbers of values of the D channels, at least 2 each.
    """

    half_range: Tensor
    offset: Tensor
    shift: Tensor
    sizes: Tensor
    basis: Tensor

    def __init__(self, levels: Sequence[int]):
        super().__init__()
        self.codes = math.prod(levels)  # number of different codes
        sizes = torch.tensor(levels)
        half_range = (sizes - 1) * (1 - EPS) / 2
        offset = torch.where(sizes % 2 == 0, 0.5, 0.0)
        buffers = {
            "half_range": half_range,
            "offset": offset,
            "shift": (offset / half_range).tan(),
            "sizes": sizes,
            "basis": sizes.cumprod(0) // sizes,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, z: Tensor) -> QuantizerOutput:
        with torch.autocast(z.device.type, enabled=False):
            z = z.to(torch.promote_types(z.dtype, torch.float32)).movedim(1, -1)
            bounded = (z + self.shift).tanh() * self.half_range - self.offset
            rounded = straight_through(bounded.round(), bounded)
            digits = rounded.detach().long() + self.sizes // 2
            codes = (digits * self.basis).sum(-1)
            quantized = (rounded / (self.sizes // 2)).movedim(-1, 1)
            return QuantizerOutput(quantized, codes, quantized.new_zeros(()))

    def codes_to_values(self, codes: Tensor) -> Tensor:
        """Return the values [N, D, ...] of codes int64 [N, ...]."""
        digits = codes[..., None] // self.basis % self.sizes
        half = self.sizes // 2
        return ((digits - half) / half).to(self.shift.dtype).movedim(-1, 1)


class GaussianSample(NamedTuple):
    """Output of a `DiagonalGaussian`.

    sample : [N, D, ...]
    mean   : [N, D, ...]
    kl     : scalar, the divergence from N(0, 1): the sum over the elements of a sample, mean over samples
    """

    sample: Tensor
    mean: Tensor
    kl: Tensor


class DiagonalGaussian(nn.Module):
    """Moments [N, 2 D, ...] (means, then logarithms of variances) -> `GaussianSample`.

    Kingma and Welling, "Auto-Encoding Variational Bayes", 2014; clamped and reduced as in latent diffusion (Rombach et
    al. 2022, arXiv:2112.10752). In training mode the noise is drawn from torch's generator; in evaluation mode the
    sample is the mean.
    """

    def forward(self, moments: Tensor) -> GaussianSample:
        with torch.autocast(moments.device.type, enabled=False):
            moments = moments.to(torch.promote_types(moments.dtype, torch.float32))
            mean, log_variance = moments.chunk(2, 1)
            log_variance = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
            kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / (2 * len(mean))
            if not self.training:
                return GaussianSample(mean, mean, kl)
            sample = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            return GaussianSample(sample, mean, kl)
