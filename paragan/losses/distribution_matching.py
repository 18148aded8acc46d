"""Distill a diffusion model into a generator of one step, with a network that learns the score of its images.

Yin, Gharbi, Park, Zhang, Shechtman, Durand and Freeman, "Improved Distribution Matching Distillation for Fast Image
Synthesis", 2024 (DMD2).

    D's turns:  E w(sigma) |S(G(z) + sigma n; sigma) - G(z)|^2        S: a denoiser of G's images, with logits
                + weight of a GAN loss on the logits of noisy reals and fakes
    G's turn:   G(z) moves by (T(x; sigma) - S(x; sigma)) / mean |G(z) - T(x; sigma)|,  x = G(z) + sigma n
                + weight of the GAN loss                              T: the teacher, frozen

With `matching=0` the GAN loss alone remains, on the features of a D that starts as the teacher and goes on to learn the
score (as in Sauer et al. 2024, LADD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.noise_map import with_noise_map
from paragan.core.rng import LaneRng
from paragan.core.schema import config_class
from paragan.core.types import Batch, DiscriminatorFn, DiscriminatorOutput, Loss, run_discriminator

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
RHO = 7.0  # of the distribution of noise in G's turn, as in EDM's sampler
LEAST_PART, LARGEST_PART = 0.02, 0.98  # of that distribution, as in DMD


@config_class
class DistributionMatching:
    """Configure `TaughtMatching`, the losses of a one-step generator G and of a D that is a denoiser with logits.

    matching      : weight of the step towards the teacher
    adversarial   : weight of the GAN loss (non-saturating) in G's turn
    d_adversarial : the same in D's turns, beside the denoising of fakes
    p_mean, p_std : mean and standard deviation of ln sigma in D's turns
    """

    matching: Weight = 1.0
    adversarial: Weight = 0.003
    d_adversarial: Weight = 0.01
    p_mean: Annotated[float, Field(allow_inf_nan=False)] = -1.2
    p_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.2
    name: Literal["distribution_matching"] = "distribution_matching"

    second_order: ClassVar[bool] = False


@dataclass(frozen=True)
class TaughtMatching:
    """`DistributionMatching` with its teacher.

    teacher : frozen; has `denoise(x, sigma, y)`, `sigma_min`, `sigma_max` and `sigma_data`
    """

    config: DistributionMatching
    teacher: Any

    second_order: bool = False
    uses_fakes: bool = True
    latent_perturbation: float = 0.0
    replayed_fields: tuple[str, ...] = ()

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        """Compute D's loss: it denoises fakes, and tells noisy fakes from noisy reals."""
        config = self.config
        sigma = (config.p_mean + config.p_std * fake.rng.normal("D/sigma", 1)[:, 0]).exp()
        on_fake = _run_on_noisy(d, fake, sigma, "D/fake")
        weight = (sigma.square() + self.teacher.sigma_data**2) / (sigma * self.teacher.sigma_data).square()
        error = (on_fake.features[0].float() - fake.images.float()).square().flatten(1).mean(1)
        denoising = (weight * error).mean()
        parts = {"D/denoising": denoising.detach()}
        total = denoising
        if config.d_adversarial:
            on_real = _run_on_noisy(d, real, sigma, "D/real")
            value = F.softplus(on_fake.logits).mean() + F.softplus(-on_real.logits).mean()
            total = total + config.d_adversarial * value
            parts |= {"D/adversarial": value.detach(), "scores/real": on_real.logits.detach().mean()}
        return Loss(total, parts | {"scores/fake": on_fake.logits.detach().mean()})

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        """Compute G's loss on its fakes."""
        config = self.config
        sigma = self._sampling_noise(fake.rng)
        noisy = _noisy(fake, sigma, "G/fake")
        on_fake = run_discriminator(d, with_noise_map(noisy, sigma), fake.labels)
        parts: dict[str, Tensor] = {}
        total = torch.zeros((), device=noisy.device)
        if config.matching:
            value = matching_loss(
                fake.images, self._teacher_images(noisy, sigma, fake.labels), on_fake.features[0].detach()
            )
            total = total + config.matching * value
            parts["G/matching"] = value.detach()
        if config.adversarial:
            value = F.softplus(-on_fake.logits).mean()
            total = total + config.adversarial * value
            parts["G/adversarial"] = value.detach()
        return Loss(total, parts)

    @torch.no_grad()
    def _teacher_images(self, noisy: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        return self.teacher.denoise(noisy.detach(), sigma, labels)

    def _sampling_noise(self, rng: LaneRng) -> Tensor:
        """Draw a sigma for every row [N], as far apart as those of the teacher's sampler."""
        part = LEAST_PART + (LARGEST_PART - LEAST_PART) * rng.uniform("G/sigma", 1)[:, 0]
        largest, least = (sigma ** (1 / RHO) for sigma in (self.teacher.sigma_max, self.teacher.sigma_min))
        return (largest + part * (least - largest)) ** RHO

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """Return no term: weights are not penalised."""
        return None


def matching_loss(images: Tensor, by_teacher: Tensor, by_critic: Tensor) -> Tensor:
    """Return a loss whose gradient at each image is (S - T) / mean |image - T|, over the number of its pixels. Scalar.

    Args:
        images: G(z) [N, C, H, W].
        by_teacher: T, what the teacher expects of noisy ones.
        by_critic: S, the same of the critic.
    """
    x = images.float()
    target = by_teacher.float()
    scale = (x.detach() - target).abs().flatten(1).mean(1).clamp(min=1e-5)[:, None, None, None]
    direction = (by_critic.float() - target) / scale
    return (x * direction.detach()).flatten(1).mean(1).mean()


def _run_on_noisy(d: DiscriminatorFn, batch: Batch, sigma: Tensor, stream: str) -> DiscriminatorOutput:
    """Run D on images with noise."""
    return run_discriminator(d, with_noise_map(_noisy(batch, sigma, stream), sigma), batch.labels)


def _noisy(batch: Batch, sigma: Tensor, stream: str) -> Tensor:
    noise = batch.rng.normal(f"noise/{stream}", *batch.images.shape[1:]).to(batch.images.dtype)
    return batch.images + sigma[:, None, None, None].to(batch.images.dtype) * noise
