"""A small convolutional autoencoder with a discrete or Gaussian bottleneck, trained against a PatchGAN.

As the first stage of VQGAN (Esser et al. 2021, arXiv:2012.09841), LlamaGen (Sun et al. 2024, arXiv:2406.06525) and
latent diffusion (Rombach et al. 2022): residual blocks with group norm, resampling between them, no bound on the
output. Departures, for speed: no blocks at image resolution, no attention, and convolutions fused with the resampling
next to them (nets/resample.py).
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.core.schema import config_class
from paragan.core.types import Batch
from paragan.nets.codebook import QuantizerOutput, VectorQuantizer
from paragan.nets.layers import group_norm
from paragan.nets.memory_format import MemoryFormat
from paragan.nets.patchgan import PatchDiscriminator, PatchGANConfig, check_patches, multi_scale_discriminator
from paragan.nets.quantizers import DiagonalGaussian, FiniteScalarQuantizer, GaussianSample
from paragan.nets.resample import DownConv, UpConv
from paragan.nets.spec import Spec

MAX_MULTIPLE = 8  # of `width`, in the widest layer
MAX_CODES = 2**63 - 1
Level = Annotated[int, Field(ge=2)]


@config_class
class VQAutoencoder(PatchGANConfig):
    """Autoencoder and PatchGAN, for images whose sides can be halved `downsample` times. Labels are not used."""

    name: Literal["vq-autoencoder"] = "vq-autoencoder"
    """Name of the family of networks."""
    width: Annotated[int, Field(ge=1)] = 24
    """Channels of G at image resolution; they double with each halving of it, up to 8 times as many."""
    blocks: Annotated[int, Field(ge=1)] = 1
    """Residual blocks of encoder and of decoder at each resolution below that of the image."""
    downsample: Annotated[int, Field(ge=1)] = 2
    """Halvings between image and code: with 2, 32 x 32 pixels become 8 x 8 codes."""
    quantizer: Literal["vq", "fsq", "kl"] = "vq"
    """Bottleneck: vector quantization with an EMA codebook, finite scalar quantization, or a Gaussian."""
    codes: Annotated[int, Field(ge=2)] = 512
    """Size of the codebook (vq)."""
    code_dim: Annotated[int, Field(ge=1)] = 16
    """Channels of a code (vq, kl)."""
    levels: Annotated[tuple[Level, ...], Field(min_length=1)] = (8, 8, 8)
    """Values of each channel of a code (fsq)."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the codebook's moving averages, per step (vq)."""
    normalize: bool = False
    """Find the nearest code by cosine (vq)."""
    restart_below: Annotated[float, Field(ge=0, lt=0.5)] = 0.03
    """Restart codes that are used less than this multiple of the mean; 0: never (vq)."""
    d_scales: Annotated[int, Field(ge=1)] = 1
    """Number of discriminators, for images of full size, half of it, ..."""

    @property
    def uses_torch_rng(self) -> bool:
        """Whether a network draws from torch's generator."""
        return self.quantizer == "kl"

    def generator(self, spec: Spec) -> nn.Module:
        """Build an autoencoder for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        quantizer, in_dim, out_dim = self._make_quantizer()
        return QuantizingAutoencoder(
            spec.channels, self.width, self.blocks, self.downsample, quantizer, in_dim, out_dim
        )

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        if self.d_scales == 1:
            return PatchDiscriminator(spec.channels, self.d_width, self.d_layers, self.d_norm)
        return multi_scale_discriminator(spec.channels, self.d_scales, self.d_width, self.d_layers, self.d_norm)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution does not fit."""
        _check_halvings(spec, self.downsample)
        if self.quantizer == "fsq" and math.prod(self.levels) > MAX_CODES:
            raise UsageError(
                f"nets.levels={list(self.levels)}: are {math.prod(self.levels):.1e} codes, and a code is an int64. Use "
                "fewer or smaller levels, such as nets.levels=[8,8,8]"
            )
        check_patches(spec, self.d_layers, self.d_scales)

    def conditioning_input(self, real: Batch) -> Tensor:
        """Return the input of G: the images."""
        return real.images

    def _make_quantizer(self) -> tuple[nn.Module, int, int]:
        """Return the bottleneck and its channels before and after."""
        if self.quantizer == "fsq":
            return FiniteScalarQuantizer(self.levels), len(self.levels), len(self.levels)
        if self.quantizer == "kl":
            return DiagonalGaussian(), 2 * self.code_dim, self.code_dim
        quantizer = VectorQuantizer(self.codes, self.code_dim, self.decay, self.normalize, self.restart_below)
        return quantizer, self.code_dim, self.code_dim


def _check_halvings(spec: Spec, downsample: int) -> None:
    width, height = spec.size
    halvings = ((width | height) & -(width | height)).bit_length() - 1
    if downsample <= halvings:
        return
    step = 1 << downsample
    nearest = ImageSize(*(max(1, round(side / step)) * step for side in spec.size))
    fewer = f"nets.downsample={halvings} or " if halvings else ""
    raise UsageError(
        f"nets.downsample={downsample}: {spec.size} can be halved {halvings} times. Use {fewer}"
        f"data.resolution={nearest.resolution}"
    )


class QuantizedReconstruction(NamedTuple):
    """What an autoencoder with a quantizer returns: images [N, C, H, W], codes and commitment of `QuantizerOutput`."""

    images: Tensor
    codes: Tensor
    commitment: Tensor


class GaussianReconstruction(NamedTuple):
    """What an autoencoder with a Gaussian returns: images [N, C, H, W], mean and KL of `GaussianSample`."""

    images: Tensor
    mean: Tensor
    kl: Tensor


class QuantizingAutoencoder(nn.Module):
    """Images [N, C, H, W] in [-1, 1], y unused -> `QuantizedReconstruction` or `GaussianReconstruction`, same dtype.

    Outputs are not bounded, as in VQGAN: images are clipped where they are shown or scored.

    Args:
        channels: of the images.
        width: channels at image resolution.
        blocks: residual blocks at every lower resolution.
        downsample: halvings between image and code.
        quantizer: z [N, in_dim, h, w] -> `QuantizerOutput` or `GaussianSample` of [N, out_dim, h, w].
    """

    def __init__(
        self, channels: int, width: int, blocks: int, downsample: int, quantizer: nn.Module, in_dim: int, out_dim: int
    ):
        super().__init__()
        widths = [width * min(1 << i, MAX_MULTIPLE) for i in range(downsample + 1)]
        self.encoder = Encoder(channels, widths[1:], blocks, in_dim)
        self.quantizer = quantizer
        self.decoder = Decoder(channels, widths[::-1], blocks, out_dim)

    def forward(self, x: Tensor, y: Tensor | None = None) -> QuantizedReconstruction | GaussianReconstruction:
        output = self.encode(x)
        images = self.decoder(output[0]).to(x.dtype)
        if isinstance(output, QuantizerOutput):
            return QuantizedReconstruction(images, output.codes, output.commitment)
        return GaussianReconstruction(images, output.mean, output.kl)

    def encode(self, x: Tensor) -> QuantizerOutput | GaussianSample:
        """Return the output of the bottleneck for images [N, C, H, W]."""
        return self.quantizer(self.encoder(x))

    def decode(self, codes: Tensor) -> Tensor:
        """Return the images [N, C, H, W] of codes int64 [N, h, w]."""
        return self.decoder(self.quantizer.codes_to_values(codes))  # pyright: ignore

    def to_latents(self, images: Tensor) -> Tensor:
        """Return the latents [N, c, h, w] of images: what the encoder makes before quantization, or the mean.

        As in latent diffusion, quantization belongs to the decoder: what is trained on latents need not make codes.
        """
        moments = self.encoder(images)
        return moments.chunk(2, 1)[0] if isinstance(self.quantizer, DiagonalGaussian) else moments

    def from_latents(self, latents: Tensor) -> Tensor:
        """Return the images [N, C, H, W] of latents [N, c, h, w]."""
        is_continuous = isinstance(self.quantizer, DiagonalGaussian)
        return self.decoder(latents if is_continuous else self.quantizer(latents)[0])

    @property
    def last_layer(self) -> Tensor:
        """Weight of the convolution that makes the images, for weights that follow its gradient."""
        return self.decoder.image.weight


class Encoder(nn.Module):
    """Images [N, C, H, W] -> [N, dim, h, w]; `widths` are the channels at half the size, a quarter, ..."""

    def __init__(self, channels: int, widths: Sequence[int], blocks: int, dim: int):
        super().__init__()
        self.input_format = MemoryFormat()
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 4, 2, padding=1)]
        for i, width in enumerate(widths):
            layers += [DownConv(widths[i - 1], width, 3, padding=1)] if i else []
            layers += [GroupNormBlock(width) for _ in range(blocks)]
        self.body = nn.Sequential(*layers, group_norm(widths[-1]), nn.SiLU(inplace=True), nn.Conv2d(widths[-1], dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.input_format(x))


class Decoder(nn.Module):
    """[N, dim, h, w] -> images [N, C, H, W]; `widths` are the channels from the lowest resolution to that of images."""

    def __init__(self, channels: int, widths: Sequence[int], blocks: int, dim: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(dim, widths[0], 3, padding=1)]
        for i, width in enumerate(widths[:-1]):
            layers += [GroupNormBlock(width) for _ in range(blocks)]
            layers.append(UpConv(width, widths[i + 1], 3, padding=1))
        self.input_format = MemoryFormat()
        self.body = nn.Sequential(*layers, group_norm(widths[-1]), nn.SiLU(inplace=True))
        self.image = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        return self.image(self.body(self.input_format(values)))


class GroupNormBlock(nn.Module):
    """[N, C, H, W] -> the same shape: x + conv(silu(norm(conv(silu(norm(x))))))."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm1 = group_norm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = group_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x), inplace=True))
        return x + self.conv2(F.silu(self.norm2(h), inplace=True))
