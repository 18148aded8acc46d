"""R3GAN's networks for images of any size whose halvings are whole: residual, without normalisation.

Huang, Gokaslan, Kuleshov and Tompkin, "The GAN is dead; long live the GAN! A Modern GAN Baseline", 2024, config E. G
and D have the same structure: stages from a small grid (4x4) to image resolution, each of a few inverted bottlenecks
with a grouped 3x3 convolution in the middle, and resampling by a [1, 2, 1] kernel between stages. There is no
normalisation. Instead the last layer of every block starts at 0, and the other layers start smaller the more blocks
there are (Zhang et al. 2019, "Fixup").
"""

import itertools
import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.core.types import DiscriminatorOutput
from paragan.nets.conditioning import (
    DConditioning,
    DConditioningKind,
    check_conditioning,
    d_input,
    g_input,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.discriminator_heads import make_head
from paragan.nets.grouped_conv import GroupedConv, grouped_conv
from paragan.nets.memory_format import MemoryFormat
from paragan.nets.spec import Spec, check_size, num_halvings, start_grid

LEAKY_RELU_SLOPE = 0.2
LEAKY_RELU_GAIN = math.sqrt(2 / (1 + LEAKY_RELU_SLOPE**2))  # keeps the variance (He et al. 2015)


@config_class
class R3GAN:
    """Residual generator and discriminator without normalisation, for sizes of 1 to 8 halvings (8 to 1024 px).

    `width` channels up to 3 halvings (32 px), half as many with every one above. With the defaults these are the
    widths, blocks and groups of the authors' presets for CIFAR-10 and FFHQ at 64 and 256 px; each network has 21
    million parameters at 32 px. (Their ImageNet networks are wider: `width=1536, group=32`, without halving.) Made for
    a relativistic loss with R1 and R2. Two departures: D is conditioned by projection, where the authors multiply its
    last features by an embedding; and the label embedding in G is as long as z.
    """

    spectral: ClassVar[bool] = False
    """Spectral norm in the discriminator."""
    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    name: Literal["r3gan"] = "r3gan"
    """Name of the family of networks."""
    width: Annotated[int, Field(ge=1)] = 768
    """Channels of both networks between blocks, up to 3 halvings (32 px)."""
    latent: Annotated[int, Field(ge=1)] = 64
    """Length of the latent vector z."""
    blocks: Annotated[int, Field(ge=1)] = 2
    """Residual blocks at every resolution."""
    expansion: Annotated[int, Field(ge=1)] = 2
    """Channels inside a block, as a multiple of those between blocks."""
    group: Annotated[int, Field(ge=1)] = 16
    """Channels per group in the 3x3 convolutions, which have width * expansion / group groups."""
    g_conditioning: Literal["auto", "none", "concat"] = "auto"
    """How G is conditioned on the class; auto: an embedding concatenated with z."""
    d_conditioning: DConditioning = "auto"
    """How D is conditioned on the class; auto: projection."""

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return R3GANGenerator(spec, self)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return R3GANDiscriminator(spec, self)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution does not fit, or the channels are no multiple of `group`."""
        check_size(spec, max_halvings=8)
        check_conditioning(self, spec)
        divisor = _width_divisor(num_halvings(spec.size))  # of the width at image resolution
        if self.width % divisor or self.width // divisor * self.expansion % self.group:
            multiple = divisor * math.lcm(self.group, self.expansion) // self.expansion
            nearest = max(1, round(self.width / multiple)) * multiple
            raise UsageError(
                f"nets.width={self.width}: at {spec.size.resolution} px its blocks have {self.width / divisor:g} x "
                f"{self.expansion} channels, which do not divide into groups of {self.group}. Use {nearest}"
            )

    def channels(self, spec: Spec) -> list[int]:
        """Return the channels at the start grid, twice that, ..., the image."""
        return [self.width // _width_divisor(i) for i in range(num_halvings(spec.size) + 1)]

    def make_stage(self, channels: int, blocks: int) -> list[nn.Module]:
        """Return the blocks of one resolution; `blocks` is the number in the whole network."""
        return [R3GANBlock(channels, self.expansion, self.group, blocks) for _ in range(self.blocks)]


def _width_divisor(doublings: int) -> int:
    """Return by how much there are fewer channels than `width` after so many doublings of the start grid."""
    return 1 << max(0, doublings - 3)


class R3GANGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, H, W] around [-1, 1], dtype of z. Without classes y is ignored.

    As in the paper the output is not bounded: images are clipped where they are shown or scored.
    """

    def __init__(self, spec: Spec, config: R3GAN):
        super().__init__()
        self.latent = config.latent
        widths = config.channels(spec)
        kind = resolve_conditioning(config.g_conditioning, "concat", spec)
        self.conditions = g_input(kind, config.latent, spec.classes)
        inputs = self.conditions.out_features
        self.start = _init_layer(nn.Linear(inputs, widths[0], bias=False), inputs)
        self.basis = nn.Parameter(torch.randn(widths[0], *start_grid(spec.size)))
        layers = config.make_stage(widths[0], len(widths) * config.blocks)
        for a, b in itertools.pairwise(widths):
            layers += [_project_channels(a, b), BinomialUpsample(), *config.make_stage(b, len(widths) * config.blocks)]
        self.body = nn.Sequential(*layers)
        self.image = _init_layer(nn.Conv2d(widths[-1], spec.channels, 1, bias=False), widths[-1])

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        inputs, _ = self.conditions(z, y)
        h = self.start(inputs)[:, :, None, None] * self.basis
        return self.image(self.body(h)).to(z.dtype)


class R3GANDiscriminator(nn.Module):
    """Images [N, C, H, W], y int64 [N] -> output of the head: logits [N] or more. Without classes y is ignored."""

    def __init__(self, spec: Spec, config: R3GAN):
        super().__init__()
        widths = config.channels(spec)[::-1]
        kind = resolve_d_conditioning(config, spec)
        self.label_map = d_input(kind, spec.classes)
        self.input_format = MemoryFormat()
        channels = spec.channels + self.label_map.extra_channels
        self.image = _init_layer(nn.Conv2d(channels, widths[0], 1, bias=False), channels)
        layers = config.make_stage(widths[0], len(widths) * config.blocks)
        for a, b in itertools.pairwise(widths):
            layers += [
                BinomialDownsample(),
                _project_channels(a, b),
                *config.make_stage(b, len(widths) * config.blocks),
            ]
        self.body = nn.Sequential(*layers)
        grid = start_grid(spec.size)
        basis = GroupedConv(widths[-1], widths[-1], grid, groups=widths[-1], bias=False)
        self.basis = _init_layer(basis, math.prod(grid))
        self.head = make_head(kind, widths[-1], spec.classes, lambda layer: _init_layer(layer, widths[-1]))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | DiscriminatorOutput:
        h = self.image(self.input_format(self.label_map(x, y)))
        return self.head(self.basis(self.body(h)).flatten(1), y)


class R3GANBlock(nn.Module):
    """[N, C, H, W] -> the same shape: x + conv1x1(leaky(grouped conv3x3(leaky(conv1x1(x))))), wider inside.

    `blocks` is the number of blocks in the whole network. The first two layers are initialised smaller by its fourth
    root (Fixup's rule for branches of three layers), the last one at 0.
    """

    def __init__(self, channels: int, expansion: int, group: int, blocks: int):
        super().__init__()
        inside = channels * expansion
        gain = LEAKY_RELU_GAIN * blocks**-0.25
        self.widen = _init_layer(nn.Conv2d(channels, inside, 1), channels, gain)
        self.middle = _init_layer(GroupedConv(inside, inside, 3, padding=1, groups=inside // group), group * 9, gain)
        self.narrow = _init_layer(nn.Conv2d(inside, channels, 1, bias=False), inside, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.widen(x), LEAKY_RELU_SLOPE, inplace=True)
        h = F.leaky_relu(self.middle(h), LEAKY_RELU_SLOPE, inplace=True)
        return x + self.narrow(h)


class BinomialUpsample(nn.Module):
    """[N, C, H, W] -> [N, C, 2 H, 2 W]: linear interpolation by a [1, 2, 1] kernel, with zeros beyond the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", 4 * _binomial_kernel(), persistent=False)

    kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return _resample_channels(x, self.kernel, up=True)


class BinomialDownsample(nn.Module):
    """[N, C, H, W] -> [N, C, H / 2, W / 2]: smoothing by [1, 2, 1] / 4 in both directions, then every second pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", _binomial_kernel(), persistent=False)

    kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return _resample_channels(x, self.kernel, up=False)


def _resample_channels(x: Tensor, kernel: Tensor, up: bool) -> Tensor:
    """Resample x [N, C, H, W] by a factor of 2 with one kernel for all channels.

    Runs in float32 on CPUs: with stride 2, oneDNN's bf16 kernels take 21 times as long towards the larger map
    (`operations.json`).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" else x
    kernel = kernel.expand(x.shape[1], 1, 3, 3).to(wide.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if up:
            return F.conv_transpose2d(wide, kernel, None, 2, 1, 1, groups=len(kernel)).to(x.dtype)
        return grouped_conv(wide, kernel, None, 2, 1, groups=len(kernel)).to(x.dtype)


def _binomial_kernel() -> Tensor:
    """Return the kernel [1, 1, 3, 3]; its sum is 1."""
    row = torch.tensor([1.0, 2.0, 1.0]) / 4
    return (row[:, None] * row)[None, None]


def _project_channels(a: int, b: int) -> nn.Module:
    """Return a 1x1 convolution [N, a, ...] -> [N, b, ...], or the identity if a = b."""
    return nn.Identity() if a == b else _init_layer(nn.Conv2d(a, b, 1, bias=False), a)


def _init_weight(weight: Tensor, inputs: int, gain: float = 1.0) -> Tensor:
    """Draw from N(0, gain^2 / inputs): a sum over `inputs` has `gain` times their standard deviation."""
    return nn.init.normal_(weight, 0, gain / math.sqrt(inputs)) if gain else nn.init.zeros_(weight)


def _init_layer(layer: nn.Module, inputs: int, gain: float = 1.0) -> nn.Module:
    """Initialise the weight by `_init_weight` and the bias at 0; return the layer."""
    assert isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding)
    _init_weight(layer.weight, inputs, gain)
    if not isinstance(layer, nn.Embedding) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
