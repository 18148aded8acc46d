"""Differences between fakes and the reals that G made them from: tokenizers, super-resolution, vocoders.

Nothing here uses a feature space. Each function returns a number for every pair; a score is their mean over all fakes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.host_copies import HostCopy
from paragan.core.spectrograms import MelConfig, log_mel, stft_distance
from paragan.eval.accumulators import FeatureBatch, FeaturePass
from paragan.eval.features import FeatureSpace
from paragan.eval.sharding import FeatureShard, MetricFailed, ReduceGroup, gather_all

PEAK = 255
MAX_PSNR = 100.0  # dB, of equal images
MEL_WINDOW_S = 0.032  # of `log_mel_distances`: the nearest power of two in samples
MELS = 64
STFT_WINDOWS = (512, 256, 128)  # samples, of `stft_distances`; a hop is a quarter of a window


def psnrs(fakes: Tensor, reals: Tensor, sample_rate: int) -> Tensor:
    """Return the PSNR [N] of images uint8 [N, C, H, W], dB, at most MAX_PSNR; the error is over all channels."""
    squares = (fakes.int() - reals.int()).square().flatten(1)
    mean = squares.sum(1, dtype=torch.int64).double() / squares.shape[1]
    return (10 * (PEAK**2 / mean).log10()).clamp(max=MAX_PSNR)


def log_mel_distances(fakes: Tensor, reals: Tensor, sample_rate: int) -> Tensor:
    """Return the mean absolute difference [N] of the log-mel spectrograms of waves [N, 1, T]."""
    config = mel_config(sample_rate, fakes.shape[-1])
    return (log_mel(fakes, config) - log_mel(reals, config)).abs().flatten(1).mean(1)


def stft_distances(fakes: Tensor, reals: Tensor, sample_rate: int) -> Tensor:
    """Return the multi-resolution STFT distance [N] of waves [N, 1, T]."""
    return stft_distance(fakes, reals, [(window, window // 4) for window in STFT_WINDOWS])


def mel_config(sample_rate: int, samples: int) -> MelConfig:
    """Return the spectrogram of `log_mel_distances`: windows of about 32 ms that fit into waves of so many samples."""
    window = min(2 ** round(math.log2(MEL_WINDOW_S * sample_rate)), 2 ** int(math.log2(samples)))
    return MelConfig(sample_rate, window, window // 4, MELS)


@dataclass(frozen=True)
class PairAcc:
    """Collects a number for each pair, float64 [count, 1] in the order of the fakes, on every rank.

    compare : (fakes, reals, sample rate) -> numbers [N]
    metrics : for messages
    """

    compare: Callable[[Tensor, Tensor, int], Tensor]
    metrics: str
    name: str = ""
    needs_labels: bool = False
    is_paired: bool = True

    def init(self, feature_pass: FeaturePass) -> list[HostCopy]:
        return []

    def update(self, state: list[HostCopy], feature_pass: FeaturePass, batch: FeatureBatch) -> None:
        assert batch.reals is not None
        assert feature_pass.pairs is not None
        state.append(HostCopy(self.compare(batch.images, batch.reals, feature_pass.pairs.sample_rate)))

    def compute(self, state: list[HostCopy], feature_pass: FeaturePass, group: ReduceGroup) -> Tensor:
        local = torch.cat([torch.zeros(0, dtype=torch.float64), *(copy.wait().double() for copy in state)])
        return gather_all(FeatureShard(local[:, None], feature_pass.count, feature_pass.block_size), group)


def mean_of_pairs(numbers: Tensor) -> float:
    """Return the mean of what a `PairAcc` collected.

    Raises:
        MetricFailed: a number is not finite.
    """
    num_bad = int(numbers.isfinite().logical_not().sum())
    if num_bad:
        raise MetricFailed(f"{num_bad:,} of {len(numbers):,} fakes are not finite")
    return float(numbers.mean())


def check_is_image(name: str, space: FeatureSpace) -> None:
    """Raise `UsageError` if the data are no images."""
    if space.array_shape:
        raise UsageError(f"metrics={name}: is of images, and the data are numbers. Use stft for waves [1, T], or fd")


def check_is_wave(name: str, space: FeatureSpace) -> None:
    """Raise `UsageError` if the data are no waves that a window fits into."""
    shape: Sequence[int] = space.array_shape
    if not shape:
        raise UsageError(f"metrics={name}: is of waves, and the data are images. Use psnr")
    if len(shape) != 2 or shape[0] != 1:
        raise UsageError(f"metrics={name}: is of waves [1, T], and the data are {list(shape)}. Use fd or kid")
    longest = max(STFT_WINDOWS)
    if shape[1] < longest:
        raise UsageError(
            f"metrics={name}: needs waves of {longest} samples, and the data have {shape[1]}. "
            f"Use --data.segment={longest}"
        )
