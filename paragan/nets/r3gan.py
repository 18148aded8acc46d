"""R3GAN's networks at any resolution: residual, without normalisation.

Huang, Gokaslan, Kuleshov and Tompkin, "The GAN is dead; long live the GAN! A Modern GAN Baseline", 2024, config E. G
and D are alike: stages from 4x4 to the image, each of a few inverted bottlenecks whose middle is a grouped 3x3
convolution, with resampling by a [1, 2, 1] kernel between stages. Nothing normalises; instead the last layer of every
block begins at 0, and the others smaller the more blocks there are (Zhang et al. 2019, "Fixup").
"""

import itertools
import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.core.types import Verdict
from paragan.nets.conditioning import DConditioning, Judging, chosen, judging, need_classes, shown, told
from paragan.nets.discriminator_heads import head
from paragan.nets.grouped_conv import GroupedConv, grouped_conv
from paragan.nets.memory_format import Laid
from paragan.nets.spec import Spec, need_power_of_two

SLOPE = 0.2  # of the leaky ReLU below 0
GAIN = math.sqrt(2 / (1 + SLOPE**2))  # that keeps variances through it (He et al. 2015)


@record
class R3GAN:
    """Residual generator and discriminator without normalisation, for any power of two from 8 to 1024 px.

    `width` channels up to 32 px, half as many with every doubling above: with the defaults the widths, blocks and
    groups of the authors' presets for CIFAR-10 and FFHQ at 64 and 256 px, 21 million parameters each at 32 px (those
    for ImageNet are wider: `width=1536, group=32`, without halving). Made for a relativistic loss with R1 and R2. Two
    departures: D is told the label by projection, where the authors multiply its last features by an embedding; and
    the label's embedding in G is as long as z.
    """

    spectral: ClassVar[bool] = False
    """Whether the discriminator has spectral norm."""
    own_judging: ClassVar[Judging] = "projection"

    name: Literal["r3gan"] = "r3gan"
    """Which networks these are."""
    width: Annotated[int, Field(ge=1)] = 768
    """Channels of both networks between blocks, up to 32 px."""
    latent: Annotated[int, Field(ge=1)] = 64
    """Length of the latent vector z."""
    blocks: Annotated[int, Field(ge=1)] = 2
    """Residual blocks of every resolution."""
    expansion: Annotated[int, Field(ge=1)] = 2
    """How many times as many channels a block has inside."""
    group: Annotated[int, Field(ge=1)] = 16
    """Channels of a group in the 3x3 convolutions; their cardinality is width * expansion / group."""
    g_conditioning: Literal["auto", "none", "concat"] = "auto"
    """How G is told the class; auto: an embedding beside z. It has no norms to tell."""
    d_conditioning: DConditioning = "auto"
    """How D is told the class; auto: projection."""

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        return Generator(spec, self)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        return Discriminator(spec, self)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution that is not a power of two from 8 to 1024, or channels that do not divide
        into groups."""
        need_power_of_two(spec, least=8, most=1024)
        need_classes(self, spec)
        halved = max(1, spec.resolution // 32)
        if self.width % halved or self.width // halved * self.expansion % self.group:
            fits = halved * math.lcm(self.group, self.expansion) // self.expansion
            nearest = max(1, round(self.width / fits)) * fits
            raise Unusable(
                f"nets.width={self.width}: at {spec.resolution} px its blocks have {self.width / halved:g} x "
                f"{self.expansion} channels, which do not divide into groups of {self.group}; use {nearest}"
            )

    def widths(self, resolution: int) -> list[int]:
        """Channels at 4x4, 8x8, ..., `resolution`."""
        return [self.width // max(1, (4 << i) // 32) for i in range((resolution // 4).bit_length())]

    def stage(self, channels: int, blocks: int) -> list[nn.Module]:
        """The blocks of one resolution, out of `blocks` in the whole network."""
        return [Block(channels, self.expansion, self.group, blocks) for _ in range(self.blocks)]


class Generator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, R, R] around [-1, 1], dtype of z. No classes: y unused.

    As in the paper nothing bounds its images; whoever shows or scores them clips them.
    """

    def __init__(self, spec: Spec, of: R3GAN):
        super().__init__()
        self.latent = of.latent
        widths = of.widths(spec.resolution)
        self.conditions = told(chosen(of.g_conditioning, "concat", spec), of.latent, spec.classes)
        self.start = _scaled(nn.Linear(self.conditions.inputs, widths[0], bias=False), self.conditions.inputs)
        self.basis = nn.Parameter(torch.randn(widths[0], 4, 4))
        layers = of.stage(widths[0], len(widths) * of.blocks)
        for a, b in itertools.pairwise(widths):
            layers += [_changed(a, b), Up(), *of.stage(b, len(widths) * of.blocks)]
        self.body = nn.Sequential(*layers)
        self.image = _scaled(nn.Conv2d(widths[-1], spec.channels, 1, bias=False), widths[-1])

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        inputs, _ = self.conditions(z, y)
        h = self.start(inputs)[:, :, None, None] * self.basis
        return self.image(self.body(h)).to(z.dtype)


class Discriminator(nn.Module):
    """Images [N, C, R, R], y int64 [N] -> logits [N], float32 or wider, or a `Verdict`. No classes: y unused."""

    def __init__(self, spec: Spec, of: R3GAN):
        super().__init__()
        widths = of.widths(spec.resolution)[::-1]
        kind = judging(of, spec)
        self.shown, self.entry = shown(kind, spec.classes), Laid()
        channels = spec.channels + self.shown.maps
        self.image = _scaled(nn.Conv2d(channels, widths[0], 1, bias=False), channels)
        layers = of.stage(widths[0], len(widths) * of.blocks)
        for a, b in itertools.pairwise(widths):
            layers += [Down(), _changed(a, b), *of.stage(b, len(widths) * of.blocks)]
        self.body = nn.Sequential(*layers)
        self.basis = _scaled(GroupedConv(widths[-1], widths[-1], 4, groups=widths[-1], bias=False), 16)
        self.head = head(kind, widths[-1], spec.classes, lambda layer: _scaled(layer, widths[-1]))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | Verdict:
        return self.head(self.basis(self.body(self.image(self.entry(self.shown(x, y))))).flatten(1), y)


class Block(nn.Module):
    """[N, C, R, R] to the same: 1x1 to more channels, leaky ReLU, grouped 3x3, leaky ReLU, 1x1 back; plus its input.

    blocks : in the whole network; the two layers that do not begin at 0 are smaller by its fourth root (Fixup's rule
             for branches of three layers)
    """

    def __init__(self, channels: int, expansion: int, group: int, blocks: int):
        super().__init__()
        inside, gain = channels * expansion, GAIN * blocks**-0.25
        self.widen = _scaled(nn.Conv2d(channels, inside, 1), channels, gain)
        self.middle = _scaled(GroupedConv(inside, inside, 3, padding=1, groups=inside // group), group * 9, gain)
        self.narrow = _scaled(nn.Conv2d(inside, channels, 1, bias=False), inside, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.widen(x), SLOPE, inplace=True)
        h = F.leaky_relu(self.middle(h), SLOPE, inplace=True)
        return x + self.narrow(h)


class Up(nn.Module):
    """[N, C, R, R] -> [N, C, 2 R, 2 R]: pixels, and the means of neighbours between them; 0 is beyond the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", 4 * _kernel(), persistent=False)

    kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return _each_channel(x, self.kernel, up=True)


class Down(nn.Module):
    """[N, C, R, R] -> [N, C, R / 2, R / 2]: every second pixel of the image smoothed by [1, 2, 1] / 4, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", _kernel(), persistent=False)

    kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return _each_channel(x, self.kernel, up=False)


def _each_channel(x: Tensor, kernel: Tensor, up: bool) -> Tensor:
    """[N, C, ...] by one kernel for all channels. On CPUs in float32: with a stride of 2, oneDNN's take 75 times as
    long towards the larger map in bf16."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" else x
    kernel = kernel.expand(x.shape[1], 1, 3, 3).to(wide.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if up:
            return F.conv_transpose2d(wide, kernel, None, 2, 1, 1, groups=len(kernel)).to(x.dtype)
        return grouped_conv(wide, kernel, None, 2, 1, groups=len(kernel)).to(x.dtype)


def _kernel() -> Tensor:
    """[1, 1, 3, 3], of sum 1."""
    row = torch.tensor([1.0, 2.0, 1.0]) / 4
    return (row[:, None] * row)[None, None]


def _changed(a: int, b: int) -> nn.Module:
    """[N, a, ...] -> [N, b, ...]."""
    return nn.Identity() if a == b else _scaled(nn.Conv2d(a, b, 1, bias=False), a)


def _fill(weight: Tensor, inputs: int, gain: float = 1.0) -> Tensor:
    """Normal, so that sums over so many inputs have `gain` times their deviation."""
    return nn.init.normal_(weight, 0, gain / math.sqrt(inputs)) if gain else nn.init.zeros_(weight)


def _scaled(layer: nn.Module, inputs: int, gain: float = 1.0) -> nn.Module:
    """Its weight filled so, its bias 0."""
    assert isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding)
    _fill(layer.weight, inputs, gain)
    if not isinstance(layer, nn.Embedding) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
