"""The objective of a diffusion model: remove noise of random strength from images (Karras et al. 2022, EDM).

    E w(sigma) |D(x + sigma n; sigma) - x|^2        ln sigma normal, w = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2

One player: G is the denoiser, and D never plays.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from paragan.core.rng import LaneRng
from paragan.core.schema import config_class
from paragan.core.types import Batch, DiscriminatorFn, Loss


@config_class
class Denoising:
    """The loss of a denoiser.

    p_mean : mean of ln sigma, the logarithm of the noise
    p_std  : its standard deviation
    """

    p_mean: Annotated[float, Field(allow_inf_nan=False)] = -1.2
    p_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.2
    name: Literal["denoising"] = "denoising"

    second_order: ClassVar[bool] = False
    uses_fakes: ClassVar[bool] = False  # the loss calls G
    trains_d: ClassVar[bool] = False

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        """Return the loss of a D that has nothing to learn."""
        return Loss(0 * d(real.images, real.labels).sum())  # pyright: ignore

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        """Compute the loss of the denoiser `fake.generator` on real images."""
        g: Any = fake.generator
        loss = denoising_loss(g, real, self.noise_levels(real.rng), "denoising")
        return Loss(loss, {"G/denoising": loss.detach()})

    def noise_levels(self, rng: LaneRng) -> Tensor:
        """Draw a sigma for every row [N]."""
        return (self.p_mean + self.p_std * rng.normal("sigma", 1)[:, 0]).exp()

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """Return no term: weights are not penalised."""
        return None


def denoising_loss(denoiser: Any, batch: Batch, sigma: Tensor, stream: str) -> Tensor:
    """Return the mean over images and pixels of w(sigma) |D(x + sigma n; sigma) - x|^2.

    Args:
        denoiser: has `denoise(x, sigma, y)` and `sigma_data`.
        batch: images x, labels and random numbers.
        sigma: [N].
        stream: name of the random stream of n.
    """
    x = batch.images
    noise = batch.rng.normal(stream, *x.shape[1:]).to(x.dtype)
    s = sigma.to(x.dtype)
    denoised = denoiser.denoise(x + s[:, None, None, None] * noise, s, batch.labels)
    weight = (s.square() + denoiser.sigma_data**2) / (s * denoiser.sigma_data).square()
    return (weight[:, None, None, None] * (denoised - x).float().square()).mean()
