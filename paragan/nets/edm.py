"""A denoiser with the preconditioning of EDM and a U-net of our own size.

Karras, Aittala, Aila and Laine, "Elucidating the Design Space of Diffusion-Based Generative Models", 2022 (EDM),
table 1, column "Ours".
"""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.nets.denoiser import Coefficients, Denoiser, DenoiserConfig
from paragan.nets.spec import Spec
from paragan.nets.unet import UNet


@config_class
class EDM(DenoiserConfig):
    """Denoiser for images whose sides can be halved as often as there are widths, less one."""

    name: Literal["edm"] = "edm"
    """Name of the family of networks."""
    widths: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (64, 128, 128)
    """Channels of the U-net at image resolution, half of it, and so on."""
    blocks: Annotated[int, Field(ge=1)] = 2
    """Residual blocks at every resolution on the way down; one more on the way up."""
    attention: Annotated[int, Field(ge=0)] = 1
    """At how many of the lowest resolutions there is self-attention."""

    def denoiser(self, spec: Spec) -> Denoiser:
        """Build the denoiser."""
        unet = UNet(spec.channels, spec.channels, self.widths, self.blocks, self.attention, spec.classes)
        return Denoiser(spec, self, unet, EDMPreconditioning(self.sigma_data))

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the sides cannot be halved so often."""
        factor = 1 << len(self.widths) - 1
        if any(side % factor for side in (spec.size.width, spec.size.height)):
            halvings = next(n for n in reversed(range(len(self.widths))) if not spec.size.short_side % (1 << n))
            raise UsageError(
                f"nets.widths={list(self.widths)}: halve images {len(self.widths) - 1} times, and "
                f"{spec.size.resolution} px cannot be. Use nets.widths={list(self.widths[: halvings + 1])}"
            )
        super().check(spec)


class EDMPreconditioning(nn.Module):
    """sigma [N] -> coefficients with which input and output of the network have variance 1.

    sigma_data : standard deviation of the images
    """

    def __init__(self, sigma_data: float):
        super().__init__()
        self.sigma_data = sigma_data

    def forward(self, sigma: Tensor) -> Coefficients:
        scale = (sigma.square() + self.sigma_data**2).rsqrt()
        skip = self.sigma_data**2 * scale.square()
        return Coefficients(skip, sigma * self.sigma_data * scale, scale, sigma.log() / 4)
