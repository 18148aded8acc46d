"""The family of vocoders: HiFi-GAN's generator, multi-period and multi-resolution discriminators."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.core.spectrograms import MelConfig, log_mel
from paragan.core.types import Batch
from paragan.nets.hifigan import HiFiGANGenerator
from paragan.nets.spec import Spec
from paragan.nets.wave_discriminators import wave_discriminator

PositiveInt = Annotated[int, Field(ge=1)]


@config_class
class HiFiGAN:
    """Mel spectrograms to waves [1, T], T a multiple of the hop. Labels are not used.

    The defaults are for speech at 8 kHz on few cores: the paper's V3 blocks, and discriminators of a quarter of its
    width. The hop of the spectrogram is the product of `upsample_rates`.
    """

    name: Literal["hifigan"] = "hifigan"
    """Name of the family of networks."""
    sample_rate: PositiveInt = 8000
    """Samples per second of the waves, Hz."""
    n_fft: PositiveInt = 256
    """Samples of a window of the mel spectrogram."""
    mels: PositiveInt = 64
    """Channels of the mel spectrogram."""
    upsample_rates: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (8, 8)
    """Factors by which G raises the rate from frames to samples."""
    width: PositiveInt = 128
    """Channels of G at the rate of frames; they halve with each factor."""
    block: Literal[1, 2] = 2
    """The paper's residual block: 1 (V1 and V2) or 2 (V3)."""
    periods: tuple[Annotated[int, Field(ge=2)], ...] = (2, 3, 5, 7, 11)
    """Periods of the discriminators of every p-th sample."""
    resolutions: tuple[tuple[PositiveInt, PositiveInt], ...] = ((512, 128), (256, 64), (128, 32))
    """Window and hop, samples, of the discriminators of spectrograms."""
    d_width: PositiveInt = 8
    """Channels of the discriminators of periods after their first layer; up to 32 times as many."""
    resolution_width: Annotated[int, Field(ge=2)] = 16
    """Channels of the discriminators of spectrograms; with 1, torch's convolutions on CPUs return wrong numbers."""

    latent: ClassVar[int] = 0
    spectral: ClassVar[bool] = False
    d_conditioning: ClassVar[Literal["none"]] = "none"
    default_d_conditioning: ClassVar[Literal["none"]] = "none"
    takes_arrays: ClassVar[bool] = True
    """Whether the data are arrays of numbers."""

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return math.prod(self.upsample_rates)

    @property
    def mel(self) -> MelConfig:
        """The spectrogram that G is given."""
        return MelConfig(self.sample_rate, self.n_fft, self.hop, self.mels)

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return HiFiGANGenerator(self.mels, self.upsample_rates, self.width, self.block)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return wave_discriminator(self.periods, self.resolutions, self.d_width, self.resolution_width)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the data are no waves of whole frames and this rate, or sizes do not fit each other."""
        shape = spec.shape
        if not spec.array_shape or len(shape) != 2 or shape[0] != 1:
            raise UsageError(
                f"--nets=hifigan: makes waves [1, T], and the data are {list(shape)}. Use audio, or records [1, T]"
            )
        if spec.sample_rate not in (0, self.sample_rate):
            raise UsageError(
                f"nets.sample_rate={self.sample_rate}: the audio has {spec.sample_rate} Hz. "
                f"Use nets.sample_rate={spec.sample_rate}"
            )
        samples = shape[1]
        if samples % self.hop:
            raise UsageError(
                f"data.segment: the waves have {samples} samples (data.segment, or what data.transform returns), no "
                f"multiple of the {self.hop} of a frame (the product of nets.upsample_rates). "
                f"Use {max(1, round(samples / self.hop)) * self.hop} samples"
            )
        if self.width % (1 << len(self.upsample_rates)):
            divisor = 1 << len(self.upsample_rates)
            raise UsageError(
                f"nets.width={self.width}: cannot be halved {len(self.upsample_rates)} times. "
                f"Use nets.width={max(1, round(self.width / divisor)) * divisor}"
            )
        self.mel.check("nets")
        for n_fft, hop in self.resolutions:
            if hop > n_fft:
                raise UsageError(
                    f"nets.resolutions: windows of {n_fft} samples leave gaps between frames of {hop} samples. Use "
                    f"[{2 * hop}, {hop}] in place of [{n_fft}, {hop}]"
                )
        if not self.periods and not self.resolutions:
            raise UsageError(
                "nets.periods=[]: leaves no discriminator beside nets.resolutions=[]. Use nets.periods=[2,3]"
            )
        if max(self.periods, default=0) > samples:
            raise UsageError(
                f"nets.periods={list(self.periods)}: the waves have {samples} samples. Use periods of at most {samples}"
            )
        longest = max([self.n_fft, *(n_fft for n_fft, _ in self.resolutions)])
        if samples < longest:
            raise UsageError(
                f"data.segment: the waves have {samples} samples (data.segment, or what data.transform returns), fewer "
                f"than the {longest} of a window. Use {-(-longest // self.hop) * self.hop} samples"
            )

    def conditioning_input(self, real: Batch) -> Tensor:
        """Return the input of G: the logarithmic mel spectrogram [N, mels, T / hop] of the waves."""
        return log_mel(real.images, self.mel)
