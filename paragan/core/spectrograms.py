"""Spectrograms of waves: magnitudes, logarithmic mel spectrograms, and the multi-resolution STFT distance.

Written with torch alone, differentiable, in float32 or wider whatever autocast says. Mel frequencies and filters are
those of Slaney's Auditory Toolbox (1998), which librosa uses by default and HiFi-GAN with it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ParamSpec

import torch
from pydantic import Field
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.schema import config_class

LINEAR_HZ = 1000.0  # up to here mel frequencies are proportional to Hz, above to the logarithm
HZ_PER_MEL = 200 / 3
MELS_PER_E = 27 / math.log(6.4)
LEAST_MEL = 1e-5  # before the logarithm
LEAST_POWER = 1e-9  # before the square root, whose slope at 0 is infinite
PositiveInt = Annotated[int, Field(ge=1)]
P = ParamSpec("P")


@config_class
class MelConfig:
    """A logarithmic mel spectrogram, as in HiFi-GAN (Kong et al. 2020); one frame for every `hop` samples.

    sample_rate  : of the waves, Hz
    n_fft        : samples of a window (Hann) and of the transform
    hop          : samples between windows
    mels         : number of filters
    f_min, f_max : least and largest frequency of the filters, Hz; f_max 0: half the sample rate
    """

    sample_rate: PositiveInt = 8000
    n_fft: PositiveInt = 256
    hop: PositiveInt = 64
    mels: PositiveInt = 64
    f_min: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    f_max: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def top_frequency(self) -> float:
        """The largest frequency of the filters, Hz."""
        return self.f_max or self.sample_rate / 2

    def check(self, section: str) -> None:
        """Raise `UsageError` if the sizes do not fit each other; `section` has these fields."""
        if self.hop > self.n_fft:
            raise UsageError(
                f"{section}.n_fft={self.n_fft}: windows leave gaps between frames of {self.hop} samples. "
                f"Use {section}.n_fft={2 * self.hop}"
            )
        bins = self.n_fft // 2 + 1
        if self.mels > bins:
            raise UsageError(
                f"{section}.mels={self.mels}: a window of {self.n_fft} samples has {bins} frequencies. Use "
                f"{section}.mels={bins // 2} or a longer window"
            )
        if self.top_frequency > self.sample_rate / 2:
            raise UsageError(
                f"{section}.f_max={self.f_max:g}: is above half the sample rate, {self.sample_rate / 2:g}. Use "
                f"{section}.f_max=0"
            )
        if self.f_min >= self.top_frequency:
            raise UsageError(
                f"{section}.f_min={self.f_min:g}: is not below the largest frequency, {self.top_frequency:g}. Use "
                f"{section}.f_min=0"
            )


def hz_to_mel(hz: Tensor) -> Tensor:
    """Return frequencies on Slaney's mel scale."""
    above = LINEAR_HZ / HZ_PER_MEL + (hz.clamp(min=LINEAR_HZ) / LINEAR_HZ).log() * MELS_PER_E
    return torch.where(hz < LINEAR_HZ, hz / HZ_PER_MEL, above)


def mel_to_hz(mel: Tensor) -> Tensor:
    """Return frequencies in Hz of values on Slaney's mel scale."""
    corner = LINEAR_HZ / HZ_PER_MEL
    above = LINEAR_HZ * ((mel.clamp(min=corner) - corner) / MELS_PER_E).exp()
    return torch.where(mel < corner, mel * HZ_PER_MEL, above)


def mel_filters(config: MelConfig) -> Tensor:
    """Return triangular filters of area 1, float64 [mels, n_fft / 2 + 1], over the frequencies of the transform."""
    frequencies = torch.linspace(0, config.sample_rate / 2, config.n_fft // 2 + 1, dtype=torch.float64)
    low, high = hz_to_mel(torch.tensor([config.f_min, config.top_frequency], dtype=torch.float64))
    corners = mel_to_hz(torch.linspace(low, high, config.mels + 2, dtype=torch.float64))
    left, center, right = (corners[i : i + config.mels, None] for i in range(3))
    rising = (frequencies - left) / (center - left)
    falling = (right - frequencies) / (right - center)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (right - left)


def stft_magnitude(wave: Tensor, n_fft: int, hop: int) -> Tensor:
    """Return the magnitudes [N, n_fft / 2 + 1, T / hop] of waves [N, 1, T] or [N, T].

    Waves are mirrored at their ends by (n_fft - hop) / 2 samples, so that frame i is centered on its hop samples.
    """
    with torch.autocast(wave.device.type, enabled=False):
        wave = wave.flatten(1).to(torch.promote_types(wave.dtype, torch.float32))
        before = (n_fft - hop) // 2
        padded = mirror_ends(wave, before, n_fft - hop - before)
        window = _hann_window(n_fft, wave.dtype, wave.device)
        spectrum = torch.view_as_real(torch.stft(padded, n_fft, hop, window=window, center=False, return_complex=True))
        return (spectrum.square().sum(-1) + LEAST_POWER).sqrt()


def mirror_ends(x: Tensor, before: int, after: int) -> Tensor:
    """Return x [..., T] extended by its mirror image, [..., before + T + after]; both are less than T.

    The values of torch's reflection padding, whose gradient on CUDA depends on the order of threads.
    """
    length = x.shape[-1]
    start = x[..., 1 : before + 1].flip(-1)
    end = x[..., length - 1 - after : length - 1].flip(-1)
    return torch.cat([start, x, end], -1)


def log_mel(wave: Tensor, config: MelConfig) -> Tensor:
    """Return the logarithmic mel spectrogram [N, mels, T / hop] of waves [N, 1, T] or [N, T] in [-1, 1]."""
    with torch.autocast(wave.device.type, enabled=False):
        magnitude = stft_magnitude(wave, config.n_fft, config.hop)
        filters = _mel_filters_on(config, magnitude.dtype, magnitude.device)
        return (filters @ magnitude).clamp(min=LEAST_MEL).log()


def stft_distance(wave: Tensor, target: Tensor, resolutions: Sequence[tuple[int, int]]) -> Tensor:
    """Return the distance [N] of waves from targets, both [N, 1, T]: the mean over resolutions (n_fft, hop).

    At each resolution spectral convergence, |M - M'| / |M'| in the Frobenius norm, plus the mean of |log M - log M'|
    (Yamamoto, Song and Kim, "Parallel WaveGAN", 2020, arXiv:1910.11480; there the norms are over a batch, here over
    each wave).
    """
    distances: list[Tensor] = []
    for n_fft, hop in resolutions:
        magnitude = stft_magnitude(wave, n_fft, hop).flatten(1)
        expected = stft_magnitude(target, n_fft, hop).flatten(1)
        convergence = (magnitude - expected).norm(dim=1) / expected.norm(dim=1)
        distances.append(convergence + (magnitude.log() - expected.log()).abs().mean(1))
    return torch.stack(distances).mean(0)


def _cache_unless_fake(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keep what a function returns, but not the tensors without storage of a cost estimate (plan/memory.py)."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        has_storage = type(torch.empty(0)) is Tensor
        return cached(*args, **kwargs) if has_storage else make(*args, **kwargs)

    return get


@_cache_unless_fake
def _hann_window(n_fft: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.hann_window(n_fft, dtype=dtype, device=device)


@_cache_unless_fake
def _mel_filters_on(config: MelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    return mel_filters(config).to(device, dtype)
