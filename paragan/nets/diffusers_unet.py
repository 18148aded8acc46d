"""A denoiser whose network is a `UNet2DModel` of the package `diffusers`, as a pipeline's folder describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize, Resolution
from paragan.core.schema import config_class
from paragan.nets.denoiser import Denoiser, DenoiserConfig
from paragan.nets.spec import Spec
from paragan.nets.variance_preserving import NoiseSchedule, VariancePreserving, schedule_sigmas


@config_class
class DiffusersUNet(DenoiserConfig):
    """Denoiser of a `diffusers` pipeline of images, without its weights: enough to build it without the folder."""

    name: Literal["diffusers-unet"] = "diffusers-unet"
    """Name of the family of networks."""
    unet: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)
    """Arguments of UNet2DModel, from the pipeline's unet/config.json."""
    scheduler: NoiseSchedule = NoiseSchedule()
    """The noise it was trained with, from the pipeline's scheduler/scheduler_config.json."""

    @property
    def needs_float32(self) -> bool:
        """Return whether images lose by the rounding of bf16. The error of an epsilon is multiplied by sigma."""
        return self.scheduler.prediction_type == "epsilon"

    def denoiser(self, spec: Spec) -> Denoiser:
        """Build the denoiser."""
        preconditioning = VariancePreserving(schedule_sigmas(self.alphas_cumprod()), self.scheduler.prediction_type)
        return Denoiser(spec, self, DiffusersNetwork(self.unet), preconditioning)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the network is of another kind or of other images, or `diffusers` is missing."""
        if not self.unet:
            raise UsageError(
                "nets.unet={}: has the sizes of a pipeline's network. Use paragan train distill --teacher FOLDER"
            )
        for field, default, supported in (
            ("time_embedding_type", "positional", "positional"),  # others are of noise that is no timestep
            ("mid_block_type", "UNetMidBlock2D", "UNetMidBlock2D"),  # whose maps the critic uses
            ("class_embed_type", None, None),
            ("num_class_embeds", None, spec.classes or None),
            ("in_channels", 3, spec.channels),
            ("out_channels", 3, spec.channels),  # more, if it predicts variances too
        ):
            value = self.unet.get(field, default)
            if value != supported:
                raise UsageError(
                    f"nets.unet.{field}={value}: distillation on these data needs {supported}. Use a teacher with "
                    f"{field}={supported}"
                )
        halvings = len(self.unet.get("block_out_channels", (0, 0, 0, 0))) - 1
        factor = 1 << halvings
        if any(side % factor for side in spec.size):
            width, height = (max(1, round(side / factor)) * factor for side in spec.size)
            raise UsageError(
                f"data.resolution={spec.resolution}: the network halves images {halvings} times. Use "
                f"--data.resolution={ImageSize(width, height).resolution}"
            )
        super().check(spec)
        import_diffusers()

    def resolution(self) -> Resolution | None:
        """Return the size of the images that it was trained on, if that is recorded."""
        size = self.unet.get("sample_size")
        if size is None:
            return None
        height, width = (size, size) if isinstance(size, int) else size
        return ImageSize(width, height).resolution

    def alphas_cumprod(self) -> Tensor:
        """Return a^2 of every timestep, [T]."""
        return import_diffusers().DDPMScheduler(**dataclasses.asdict(self.scheduler)).alphas_cumprod


class DiffusersNetwork(nn.Module):
    """x [N, C, H, W], timestep [N], y int64 [N] or None -> [N, C, H, W], by a UNet2DModel.

    config : its arguments
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        try:
            self.model = import_diffusers().UNet2DModel(**config)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            message = " ".join(str(error).split())[:200]
            raise UsageError(f"nets.unet: diffusers cannot build this UNet2DModel: {message}") from error
        self.feature_channels = int(self.model.config.block_out_channels[-1])

    def forward(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> Tensor:
        return self.model(x, level, y, return_dict=False)[0]

    def with_features(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, and the maps [N, feature_channels, h, w] of the middle block."""
        maps: list[Tensor] = []
        hook = self.model.mid_block.register_forward_hook(lambda module, inputs, output: maps.append(output))
        try:
            output = self(x, level, y)
        finally:
            hook.remove()
        return output, maps[0]


def import_diffusers() -> Any:
    """Import the package `diffusers`, which takes two seconds.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise UsageError("nets=diffusers-unet: needs the package diffusers: pip install diffusers") from error
    return diffusers
