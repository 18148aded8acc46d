"""StyleGAN2's networks: a mapping network, a generator of modulated convolutions, and a residual discriminator.

Karras, Laine, Aittala, Hellsten, Lehtinen and Aila, "Analyzing and Improving the Image Quality of StyleGAN", 2020,
config F, written from the paper; sizes and the class as in Karras et al. 2020, "Training Generative Adversarial
Networks with Limited Data".

    w = mapping(z, y)                          [N, style]
    ws                                         [N, layers, style]: w for every layer, or of two latents (style mixing)
    images = synthesis(ws)                     maps from the start grid to the image, each adds to the image so far

The noise added to maps, and the latents of style mixing, are drawn from the bits of z (nets/keyed_noise.py).
"""

import itertools
from typing import Annotated, ClassVar, Literal

import torch
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
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.discriminator_heads import make_head
from paragan.nets.equalized import EqualizedConv, EqualizedLinear, equalized, leaky_relu
from paragan.nets.fir_resample import FIRFilter
from paragan.nets.keyed_noise import keyed_normal, keyed_uniform, row_keys
from paragan.nets.mapping_network import MappingNetwork
from paragan.nets.memory_format import MemoryFormat
from paragan.nets.minibatch_stddev import MinibatchStddev
from paragan.nets.modulated_conv import ModulatedConv, ModulationForm
from paragan.nets.spec import MIN_GRID_SIDE, Spec, check_size, num_halvings, start_grid

MIXING_STREAM, CROSSOVER_STREAM, NOISE_STREAM = 0, 1, 2  # of random numbers; noise: one more for every layer
RESIDUAL_GAIN = 0.5**0.5  # of both branches of a residual block


@config_class
class StyleGAN2:
    """Style-based generator and residual discriminator, for sizes of 1 to 8 halvings (8 to 1024 px).

    A map at r pixels has min(channel_max, channel_base / r) channels. The defaults are config F, which has 30,370,060
    and 29,012,513 parameters at 1024 px.
    """

    spectral: ClassVar[bool] = False
    """Spectral norm in the discriminator."""
    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    name: Literal["stylegan2"] = "stylegan2"
    """Name of the family of networks."""
    channel_base: Annotated[int, Field(ge=1)] = 32768
    """Channels of a map times its side in pixels, up to `channel_max`; 16384 halves maps above 64 px."""
    channel_max: Annotated[int, Field(ge=1)] = 512
    """The most channels of a map."""
    latent: Annotated[int, Field(ge=1)] = 512
    """Length of the latent vector z."""
    style: Annotated[int, Field(ge=1)] = 512
    """Length of the style vector w."""
    mapping_layers: Annotated[int, Field(ge=1)] = 8
    """Layers of the mapping network; 2 for small data (Karras et al. 2020)."""
    mapping_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Multiplier on the learning rate of the mapping network."""
    noise: bool = True
    """Add noise to maps, with a learned strength for each layer."""
    style_mixing: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Part of G's training images that take the styles of a second latent from a random layer on."""
    style_decay: Annotated[float, Field(ge=0, lt=1)] = 0.998
    """Decay per step of the mean of w, towards which styles are truncated."""
    stddev_group: Annotated[int, Field(ge=1)] = 4
    """Images of a lane over which D computes standard deviations: the largest divisor of a lane up to this. 1: none."""
    modulation: ModulationForm = "scale"
    """Form of the modulated convolutions: scale maps, or make a weight for each image and group them. Equal."""
    g_conditioning: Literal["auto", "none", "concat"] = "auto"
    """How G is conditioned on the class; auto: an embedding concatenated with z."""
    d_conditioning: DConditioning = "auto"
    """How D is conditioned on the class; auto: projection."""

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return StyleGenerator(spec, self)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return StyleDiscriminator(spec, self)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution does not fit, or no channel is left at image resolution."""
        check_size(spec, max_halvings=8)
        check_conditioning(self, spec)
        side = MIN_GRID_SIDE << num_halvings(spec.size)
        if self.channel_base < side:
            raise UsageError(
                f"nets.channel_base={self.channel_base}: leaves no channel at {spec.size.resolution} px. "
                f"Use {32 * side}"
            )

    def channels(self, spec: Spec) -> list[int]:
        """Return the channels at the start grid, twice that, ..., the image."""
        sides = [MIN_GRID_SIDE << i for i in range(num_halvings(spec.size) + 1)]
        return [min(self.channel_max, self.channel_base // side) for side in sides]


# Generator ------------------------------------------------------------------------------------------------------------


class StyleGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, H, W] around [-1, 1], dtype of z. Without classes y is ignored.

    As in the paper the output is not bounded: images are clipped where they are shown or scored.

    num_styles : styles that `synthesis` takes, one for each layer
    """

    def __init__(self, spec: Spec, config: StyleGAN2):
        super().__init__()
        self.latent = config.latent
        self.style_mixing = config.style_mixing
        kind = resolve_conditioning(config.g_conditioning, "concat", spec)
        self.mapping = MappingNetwork(
            config.latent,
            config.style,
            layers=config.mapping_layers,
            lr_multiplier=config.mapping_lr,
            decay=config.style_decay,
            classes=0 if kind == "none" else spec.classes,
            embedding=config.style,
        )
        self.synthesis = SynthesisNetwork(spec, config)
        self.num_styles = self.synthesis.num_styles

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        return self.from_styles(self.styles(z, y), z)

    def from_styles(self, ws: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the images of styles [N, num_styles, style], with the noise of z, or without z the same for all."""
        return self.synthesis(ws, None if z is None else row_keys(z)).to(ws.dtype)

    def styles(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the styles of all layers [N, num_styles, style]; in training mode with style mixing."""
        ws = self.mapping(z, y)[:, None].expand(-1, self.num_styles, -1)
        if not (self.training and self.style_mixing):
            return ws
        keys = row_keys(z)
        others = self.mapping(keyed_normal(keys, MIXING_STREAM, self.latent).to(z.dtype), y)
        chance, place = keyed_uniform(keys, CROSSOVER_STREAM, 2).unbind(1)
        first = 1 + (place * (self.num_styles - 1)).long()  # the first layer of the other latent
        first = torch.where(chance < self.style_mixing, first, self.num_styles)
        is_own = torch.arange(self.num_styles, device=z.device) < first[:, None]
        return torch.where(is_own[:, :, None], ws, others[:, None])


class SynthesisNetwork(nn.Module):
    """Styles [N, num_styles, style] and keys of noise int64 [N] -> images [N, C, H, W].

    Without keys, every image gets the same noise.
    """

    def __init__(self, spec: Spec, config: StyleGAN2):
        super().__init__()
        widths = config.channels(spec)
        self.num_styles = 2 * len(widths)
        height, width = start_grid(spec.size)
        self.start = nn.Parameter(torch.randn(widths[0], height, width))
        self.input_format = MemoryFormat()
        self.layers = nn.ModuleList([StyleLayer(widths[0], widths[0], config, 0, (height, width))])
        for number, (a, b) in enumerate(itertools.pairwise(widths), 1):
            size = (height << number, width << number)
            self.layers.append(StyleLayer(a, b, config, 2 * number - 1, size, up=True))
            self.layers.append(StyleLayer(b, b, config, 2 * number, size))
        self.images = nn.ModuleList(ToImage(width, spec.channels, config) for width in widths)
        self.fir = FIRFilter()

    def forward(self, ws: Tensor, keys: Tensor | None = None) -> Tensor:
        x = self.input_format(self.start.to(ws.dtype).expand(ws.shape[0], -1, -1, -1))
        x = self.layers[0](x, ws[:, 0], keys)
        image = self.images[0](x, ws[:, 1])
        for number, to_image in enumerate(self.images[1:]):
            x = self.layers[2 * number + 1](x, ws[:, 2 * number + 1], keys)
            x = self.layers[2 * number + 2](x, ws[:, 2 * number + 2], keys)
            image = self.fir.upsample(image) + to_image(x, ws[:, 2 * number + 3])
        return image


class StyleLayer(nn.Module):
    """x [N, a, H, W], style [N, style], keys int64 [N] -> [N, b, ...]: modulated convolution, noise, bias, leaky ReLU.

    Without keys, the noise of every row is `fixed_noise`.

    Args:
        inputs, outputs: a and b.
        config: the sizes of the networks.
        number: of the layer, for its noise.
        size: (height, width) of its output.
        up: whether the map is doubled.
    """

    fixed_noise: Tensor

    def __init__(
        self, inputs: int, outputs: int, config: StyleGAN2, number: int, size: tuple[int, int], up: bool = False
    ):
        super().__init__()
        self.conv = ModulatedConv(inputs, outputs, 3, config.style, up, form=config.modulation)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(())) if config.noise else None
        self.stream = NOISE_STREAM + number
        if config.noise:
            noise = keyed_normal(torch.zeros(1, dtype=torch.int64), self.stream, 1, *size)
            self.register_buffer("fixed_noise", noise, persistent=False)

    def forward(self, x: Tensor, w: Tensor, keys: Tensor | None) -> Tensor:
        y = self.conv(x, w)
        if self.noise_strength is not None:
            noise = self.fixed_noise if keys is None else keyed_normal(keys, self.stream, 1, *y.shape[2:])
            y = y + (noise * self.noise_strength).to(y.dtype)
        return leaky_relu(y + self.bias[:, None, None].to(y.dtype))


class ToImage(nn.Module):
    """x [N, a, H, W], style [N, style] -> [N, C, H, W]: a modulated 1x1 convolution, not demodulated, and a bias."""

    def __init__(self, inputs: int, channels: int, config: StyleGAN2):
        super().__init__()
        self.conv = ModulatedConv(inputs, channels, 1, config.style, demodulate=False, form=config.modulation)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.conv(x, w) + self.bias[:, None, None]).to(w.dtype)


# Discriminator --------------------------------------------------------------------------------------------------------


class StyleDiscriminator(nn.Module):
    """Images [N, C, H, W], y int64 [N] -> output of the head: logits [N] or more. Without classes y is ignored."""

    def __init__(self, spec: Spec, config: StyleGAN2):
        super().__init__()
        widths = config.channels(spec)[::-1]
        kind = resolve_d_conditioning(config, spec)
        self.label_map = d_input(kind, spec.classes)
        self.input_format = MemoryFormat()
        self.image = EqualizedConv(spec.channels + self.label_map.extra_channels, widths[0], 1)
        self.blocks = nn.Sequential(*(StyleDownBlock(a, b) for a, b in itertools.pairwise(widths)))
        self.stddev = MinibatchStddev(config.stddev_group) if config.stddev_group > 1 else nn.Identity()
        features = widths[-1]
        self.conv = EqualizedConv(features + (config.stddev_group > 1), features, 3, padding=1)
        height, width = start_grid(spec.size)
        self.linear = EqualizedLinear(features * height * width, features)
        self.head = make_head(kind, features, spec.classes, equalized)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | DiscriminatorOutput:
        h = leaky_relu(self.image(self.input_format(self.label_map(x, y))))
        h = leaky_relu(self.conv(self.stddev(self.blocks(h))))
        return self.head(leaky_relu(self.linear(h.flatten(1))), y)


class StyleDownBlock(nn.Module):
    """[N, a, H, W] -> [N, b, H / 2, W / 2]: two 3x3 convolutions beside a 1x1 shortcut, scaled to keep the variance."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first = EqualizedConv(inputs, inputs, 3, padding=1)
        self.second = EqualizedConv(inputs, outputs, 3, stride=2)
        self.shortcut = EqualizedConv(inputs, outputs, 1, bias=False)
        self.fir = FIRFilter()

    def forward(self, x: Tensor) -> Tensor:
        h = leaky_relu(self.first(x))
        h = leaky_relu(self.second(self.fir.smooth(h, padding=2)))
        return RESIDUAL_GAIN * (h + self.shortcut(self.fir.downsample(x)))
