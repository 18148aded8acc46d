"""A diffusion model as a generator: a denoiser with EDM's preconditioning, from which images are sampled.

Karras, Aittala, Aila and Laine, "Elucidating the Design Space of Diffusion-Based Generative Models", 2022 (EDM).

    D(x; sigma) = c_skip x + c_out F(c_in x; c_noise)        F: a U-net; table 1, column "Ours"
"""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

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
from paragan.nets.unet import UNet

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@config_class
class EDM:
    """Denoiser for images whose sides can be halved as often as there are widths, less one.

    The latent of an image is noise of its own shape; `steps` Heun steps make it an image, with 2 `steps` - 1
    evaluations. With `steps=1` G is a generator of one evaluation.
    """

    spectral: ClassVar[bool] = False
    """Whether the discriminator has spectral norm."""
    d_conditioning: ClassVar[DConditioningKind] = "none"
    default_d_conditioning: ClassVar[DConditioningKind] = "none"

    name: Literal["edm"] = "edm"
    """Name of the family of networks."""
    widths: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (64, 128, 128)
    """Channels of the U-net at image resolution, half of it, and so on."""
    blocks: Annotated[int, Field(ge=1)] = 2
    """Residual blocks at every resolution on the way down; one more on the way up."""
    attention: Annotated[int, Field(ge=0)] = 1
    """At how many of the lowest resolutions there is self-attention."""
    steps: Annotated[int, Field(ge=1)] = 18
    """Steps of the sampler."""
    sigma_min: PositiveFloat = 0.002
    """The least noise of a step."""
    sigma_max: PositiveFloat = 80.0
    """The noise that sampling starts from."""
    sigma_data: PositiveFloat = 0.5
    """Standard deviation of the images, for the preconditioning."""
    critic: Literal["none", "score"] = "none"
    """D: none, or a second denoiser with logits from its features, which distillation needs."""
    latent: Annotated[int, Field(ge=0)] = 0
    """Length of the latent vector z: that of an image. 0: taken from the data."""

    def for_spec(self, spec: Spec) -> "EDM":
        """Return the config with the length of the latent vector."""
        return dataclasses.replace(self, latent=math.prod(spec.shape))

    def generator(self, spec: Spec) -> nn.Module:
        """Build a denoiser for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return Denoiser(spec, self)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build the critic of a distillation, or a discriminator that does nothing: a diffusion model has none."""
        return ScoreCritic(spec, self) if self.critic == "score" else NoDiscriminator()

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the sides cannot be halved so often."""
        factor = 1 << len(self.widths) - 1
        if any(side % factor for side in (spec.size.width, spec.size.height)):
            halvings = next(n for n in reversed(range(len(self.widths))) if not spec.size.short_side % (1 << n))
            raise UsageError(
                f"nets.widths={list(self.widths)}: halve images {len(self.widths) - 1} times, and "
                f"{spec.size.resolution} px cannot be. Use nets.widths={list(self.widths[: halvings + 1])}"
            )
        if self.sigma_min >= self.sigma_max:
            raise UsageError(
                f"nets.sigma_min={self.sigma_min:g}: must be below sigma_max={self.sigma_max:g}. "
                f"Use nets.sigma_min={self.sigma_max / 40_000:g}"
            )


class Denoiser(nn.Module):
    """z [N, C H W], y int64 [N] -> images [N, C, H, W] around [-1, 1], by the sampler. Without classes y is ignored."""

    def __init__(self, spec: Spec, config: EDM):
        super().__init__()
        self.shape = spec.shape
        self.has_classes = spec.classes > 0
        self.sigma_data, self.sigma_min, self.sigma_max = config.sigma_data, config.sigma_min, config.sigma_max
        self.sigmas = noise_schedule(config.steps, config.sigma_min, config.sigma_max)
        self.unet = UNet(spec.channels, spec.channels, config.widths, config.blocks, config.attention, spec.classes)

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
        return self.denoise_with_features(x, sigma, y)[0]

    def denoise_with_features(self, x: Tensor, sigma: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the expected images, and the maps [N, F, h, w] of the U-net at its lowest resolution."""
        y = require_labels(y) if self.has_classes else None
        scale = (sigma.square() + self.sigma_data**2).rsqrt()[:, None, None, None]
        s = sigma[:, None, None, None]
        c_skip = self.sigma_data**2 * scale.square()
        c_out = s * self.sigma_data * scale
        output, features = self.unet.with_features(scale * x, sigma.log() / 4, y)
        return (c_skip * x + c_out * output).to(x.dtype), features


class ScoreCritic(nn.Module):
    """Noisy images with a map of their noise [N, C + 1, H, W], y int64 [N] -> logits [N], and expected images.

    The expected images [N, C, H, W] are `features[0]` of the output, and the logits are made from the U-net's maps (Yin
    et al. 2024, DMD2, section 4.3). Images [N, C, H, W] count as those with the least noise.
    """

    def __init__(self, spec: Spec, config: EDM):
        super().__init__()
        self.channels, self.sigma_min = spec.channels, config.sigma_min
        self.denoiser = Denoiser(spec, config)
        self.norm = group_norm(config.widths[-1])
        self.head = ProjectionHead(config.widths[-1], spec.classes, lambda layer: layer)

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        if x.shape[1] == self.channels:
            x = with_noise_map(x, torch.full_like(x[:, 0, 0, 0], self.sigma_min))
        noisy, sigma = split_noise_map(x)
        images, features = self.denoiser.denoise_with_features(noisy, sigma, y)
        summary = F.silu(self.norm(features)).mean((2, 3))
        return DiscriminatorOutput(self.head(summary, y), features=(images,))
