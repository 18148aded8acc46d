"""A diffusion model as a generator: a denoiser, from which images are sampled; and a critic that is a denoiser too.

Karras, Aittala, Aila and Laine, "Elucidating the Design Space of Diffusion-Based Generative Models", 2022 (EDM).

    D(x; sigma) = c_skip x + c_out F(c_in x; c_noise)        equation 7; F: a U-net
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.noise_map import split_noise_map, with_noise_map
from paragan.core.schema import config_class
from paragan.core.types import DiscriminatorOutput
from paragan.nets.conditioning import DConditioningKind, require_labels
from paragan.nets.diffusion_sampler import noise_schedule, sample_heun
from paragan.nets.discriminator_heads import ProjectionHead
from paragan.nets.layers import group_norm
from paragan.nets.no_discriminator import NoDiscriminator
from paragan.nets.spec import Spec

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Coefficients(NamedTuple):
    """c_skip, c_out, c_in and c_noise of noise levels, each [N]."""

    skip: Tensor
    out: Tensor
    scale: Tensor
    level: Tensor


class Preconditioning(Protocol):
    """The coefficients that make a denoiser of a network, by what the network was trained to return."""

    def __call__(self, sigma: Tensor) -> Coefficients:
        """Return the coefficients for noise of standard deviation sigma [N]."""
        ...


class DenoisingNetwork(Protocol):
    """F: x [N, C, H, W], level [N], y int64 [N] or None -> [N, C, H, W].

    feature_channels : of the maps that `with_features` returns
    """

    feature_channels: int

    def __call__(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> Tensor: ...

    def with_features(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, and the maps [N, feature_channels, h, w] at the lowest resolution."""
        ...


@config_class
class DenoiserConfig:
    """Fields of all denoisers.

    The latent of an image is noise of its own shape; `steps` Heun steps make it an image, with 2 `steps` - 1
    evaluations. With `steps=1` G is a generator of one evaluation.
    """

    spectral: ClassVar[bool] = False
    """Spectral norm in the discriminator."""
    d_conditioning: ClassVar[DConditioningKind] = "none"
    default_d_conditioning: ClassVar[DConditioningKind] = "none"

    name: str = ""
    """Name of the family of networks."""
    steps: Annotated[int, Field(ge=1)] = 18
    """Steps of the sampler."""
    sigma_min: PositiveFloat = 0.002
    """The least noise of a step."""
    sigma_max: PositiveFloat = 80.0
    """The noise that sampling starts from."""
    sigma_data: PositiveFloat = 0.5
    """Standard deviation of the images, for the preconditioning and the weight of a denoising loss."""
    critic: Literal["none", "score"] = "none"
    """D: none, or a second denoiser with logits from its features, which distillation needs."""
    latent: Annotated[int, Field(ge=0)] = 0
    """Length of the latent vector z: that of an image. 0: taken from the data."""

    @property
    def needs_float32(self) -> bool:
        """Return whether images lose by the rounding of bf16."""
        return False

    def for_spec(self, spec: Spec) -> Self:
        """Return the config with the length of the latent vector."""
        return dataclasses.replace(self, latent=math.prod(spec.shape))

    def generator(self, spec: Spec) -> nn.Module:
        """Build a denoiser for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return self.denoiser(spec)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build the critic of a distillation, or a discriminator that does nothing: a diffusion model has none."""
        if self.critic == "none":
            return NoDiscriminator()
        return ScoreCritic(spec, self.denoiser(spec))

    def denoiser(self, spec: Spec) -> Denoiser:
        """Build the denoiser."""
        raise NotImplementedError

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if no denoiser can be built for `spec`."""
        if self.sigma_min >= self.sigma_max:
            raise UsageError(
                f"nets.sigma_min={self.sigma_min:g}: must be below sigma_max={self.sigma_max:g}. "
                f"Use nets.sigma_min={self.sigma_max / 40_000:g}"
            )


class Denoiser(nn.Module):
    """z [N, C H W], y int64 [N] -> images [N, C, H, W] around [-1, 1], by the sampler. Without classes y is ignored."""

    def __init__(self, spec: Spec, config: DenoiserConfig, unet: DenoisingNetwork, preconditioning: Preconditioning):
        super().__init__()
        self.shape = spec.shape
        self.has_classes = spec.classes > 0
        self.sigma_data, self.sigma_min, self.sigma_max = config.sigma_data, config.sigma_min, config.sigma_max
        self.sigmas = noise_schedule(config.steps, config.sigma_min, config.sigma_max)
        self.preconditioning = preconditioning
        self.unet = unet

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        noise = z.view(-1, *self.shape)
        return sample_heun(lambda x, sigma: self.denoise(x, sigma, y), noise, self.sigmas)

    def denoise(self, x: Tensor, sigma: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the expected images of noisy ones.

        Args:
            x: images [N, C, H, W] plus noise.
            sigma: [N] standard deviation of the noise.
            y: labels int64 [N].
        """
        c = self.preconditioning(sigma)
        return _combine(c, x, self.unet(_broadcast(c.scale) * x, c.level, self._labels(y)))

    def denoise_with_features(self, x: Tensor, sigma: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the expected images, and the maps [N, F, h, w] of the U-net at its lowest resolution."""
        c = self.preconditioning(sigma)
        output, features = self.unet.with_features(_broadcast(c.scale) * x, c.level, self._labels(y))
        return _combine(c, x, output), features

    def _labels(self, y: Tensor | None) -> Tensor | None:
        return require_labels(y) if self.has_classes else None


def _combine(c: Coefficients, x: Tensor, output: Tensor) -> Tensor:
    return (_broadcast(c.skip) * x + _broadcast(c.out) * output).to(x.dtype)


def _broadcast(coefficient: Tensor) -> Tensor:
    """[N] -> [N, 1, 1, 1]."""
    return coefficient[:, None, None, None]


class ScoreCritic(nn.Module):
    """Noisy images with a map of their noise [N, C + 1, H, W], y int64 [N] -> logits [N], and expected images.

    The expected images [N, C, H, W] are `features[0]` of the output, and the logits are made from the U-net's maps (Yin
    et al. 2024, DMD2, section 4.3). Images [N, C, H, W] count as those with the least noise.
    """

    def __init__(self, spec: Spec, denoiser: Denoiser):
        super().__init__()
        self.channels, self.sigma_min = spec.channels, denoiser.sigma_min
        self.denoiser = denoiser
        feature_channels = denoiser.unet.feature_channels
        self.norm = group_norm(feature_channels)
        self.head = ProjectionHead(feature_channels, spec.classes, lambda layer: layer)

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        if x.shape[1] == self.channels:
            x = with_noise_map(x, torch.full_like(x[:, 0, 0, 0], self.sigma_min))
        noisy, sigma = split_noise_map(x)
        images, features = self.denoiser.denoise_with_features(noisy, sigma, y)
        summary = F.silu(self.norm(features)).mean((2, 3))
        return DiscriminatorOutput(self.head(summary, y), features=(images,))
