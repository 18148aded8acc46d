"""GAT's networks: a generator and a discriminator of transformer blocks, with images at several depths of G.

Hyun, Lee and Heo, "Scalable GANs with Transformers", 2025 (arXiv 2509.24935).

    w = mapping(z, y)                 [N, width]
    tokens = positions of patches     each block of G: attention and MLP, scaled by w
    image k = image k - 1 + patches of the tokens after the k-th part of the blocks

In training, G returns the images of all levels. D sees them at once, each with its own part of noise (objective
`noise_levels`), so that all parts of G get a gradient of their own.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

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
from paragan.nets.mapping_network import MappingNetwork
from paragan.nets.spec import Spec
from paragan.nets.transformer import (
    Attention,
    GatedMLP,
    RMSNorm,
    ToPatches,
    from_patches,
    linear,
    rms_norm,
    rotation_angles,
    sine_positions,
)

SMALL_GAIN = 0.1  # of the layers that scale blocks, at the start


@config_class
class GAT:
    """Transformer generator and discriminator for images whose sides are multiples of a patch.

    The defaults are GAT-S. B, L and XL have `width` 768, 1024 and 1152, `depth` 12, 24 and 28, and `heads` 12, 16 and
    16; XL has 602 million parameters in G at 1,000 classes. The paper trains on latents of an autoencoder, at 32 x 32
    with 4 channels. Made for a relativistic loss with finite-difference R1 and R2. Departures: D is conditioned by
    projection on an embedding without a mapping of its own, the mapping network has leaky ReLUs, and D's features are
    not aligned with a pretrained network (REPA).
    """

    spectral: ClassVar[bool] = False
    """Spectral norm in the discriminator."""
    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    name: Literal["gat"] = "gat"
    """Name of the family of networks."""
    width: Annotated[int, Field(ge=4)] = 384
    """Length of a token in both networks."""
    depth: Annotated[int, Field(ge=1)] = 12
    """Transformer blocks of each network."""
    heads: Annotated[int, Field(ge=1)] = 6
    """Heads of attention; each has width / heads numbers, a multiple of 4."""
    patch: Annotated[int, Field(ge=1)] = 2
    """Side of a patch, pixels."""
    stages: Annotated[int, Field(ge=1)] = 4
    """Equal parts of G's depth, each of which makes an image; D sees as many (`objective.noise_levels`)."""
    latent: Annotated[int, Field(ge=1)] = 64
    """Length of the latent vector z."""
    mapping_layers: Annotated[int, Field(ge=1)] = 2
    """Layers of the mapping network."""
    mapping_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Multiplier on the learning rate of the mapping network."""
    style_decay: Annotated[float, Field(ge=0, lt=1)] = 0.995
    """Decay per step of the mean of w, towards which styles are truncated."""
    g_conditioning: Literal["auto", "none", "concat"] = "auto"
    """How G is conditioned on the class; auto: an embedding concatenated with z."""
    d_conditioning: DConditioning = "auto"
    """How D is conditioned on the class; auto: projection."""

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return GATGenerator(spec, self)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return GATDiscriminator(spec, self)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if patches do not fill the image, or widths and depths do not divide."""
        check_conditioning(self, spec)
        sides = spec.size.width, spec.size.height
        if any(side % self.patch for side in sides):
            fitting = max(p for p in range(1, self.patch + 1) if not any(side % p for side in sides))
            raise UsageError(
                f"nets.patch={self.patch}: does not divide the sides of images of {spec.size.resolution} px. "
                f"Use nets.patch={fitting}"
            )
        if self.width % (4 * self.heads):
            fitting = max(1, round(self.width / (4 * self.heads))) * 4 * self.heads
            raise UsageError(
                f"nets.width={self.width}: does not divide into {self.heads} heads of a multiple of 4 numbers. "
                f"Use nets.width={fitting}"
            )
        if self.depth % self.stages:
            fitting = -(-self.depth // self.stages) * self.stages
            raise UsageError(
                f"nets.depth={self.depth}: does not divide into {self.stages} stages. Use nets.depth={fitting}"
            )

    def grid(self, spec: Spec) -> tuple[int, int]:
        """Return how many patches an image has, (height, width)."""
        return spec.size.height // self.patch, spec.size.width // self.patch


# Generator ------------------------------------------------------------------------------------------------------------


class LeveledImages(NamedTuple):
    """The output of G in training.

    images : [N, C, H, W], those of the last level
    levels : [N, K, C, H, W], those of all levels
    """

    images: Tensor
    levels: Tensor


class GATGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, H, W] around [-1, 1], dtype of z; in training `LeveledImages`.

    The output is not bounded: images are clipped where they are shown or scored. Without classes y is ignored.

    num_styles : styles that `synthesis` takes, one for each block
    """

    positions: Tensor

    def __init__(self, spec: Spec, config: GAT):
        super().__init__()
        self.latent, self.num_styles, self.patch = config.latent, config.depth, config.patch
        self.blocks_per_stage = config.depth // config.stages
        self.grid = config.grid(spec)
        kind = resolve_conditioning(config.g_conditioning, "concat", spec)
        self.mapping = MappingNetwork(
            config.latent,
            config.width,
            layers=config.mapping_layers,
            lr_multiplier=config.mapping_lr,
            decay=config.style_decay,
            classes=0 if kind == "none" else spec.classes,
            embedding=config.latent,
        )
        self.register_buffer("positions", sine_positions(self.grid, config.width), persistent=False)
        angles = rotation_angles(self.grid, config.width // config.heads)
        self.blocks = nn.ModuleList(StyledBlock(config.width, config.heads, angles) for _ in range(config.depth))
        outputs = spec.channels * config.patch**2
        self.images = nn.ModuleList(StyledOutput(config.width, outputs) for _ in range(config.stages))

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor | LeveledImages:
        ws = self.styles(z, y)
        if not self.training:
            return self.synthesis(ws)
        levels = self.all_levels(ws)
        return LeveledImages(levels[:, -1], levels)

    def styles(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the styles of all blocks [N, num_styles, width]."""
        return self.mapping(z, y)[:, None].expand(-1, self.num_styles, -1)

    def from_styles(self, ws: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the images of styles [N, num_styles, width]; z is not used."""
        return self.synthesis(ws)

    def synthesis(self, ws: Tensor) -> Tensor:
        """Return the images [N, C, H, W] of styles [N, num_styles, width]."""
        return self.all_levels(ws)[:, -1]

    def all_levels(self, ws: Tensor) -> Tensor:
        """Return the images of all levels [N, K, C, H, W]: each adds to the one before."""
        x = self.positions.to(ws.dtype).expand(len(ws), -1, -1)
        images: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, ws[:, number])
            if (number + 1) % self.blocks_per_stage == 0:
                patches = self.images[len(images)](x, ws[:, number]).to(ws.dtype)
                image = from_patches(patches, self.patch, self.grid)
                images.append(images[-1] + image if images else image)
        return torch.stack(images, 1)


class StyledBlock(nn.Module):
    """Tokens x [N, T, width], style w [N, width] -> tokens: attention and MLP, input and output of each scaled by w."""

    def __init__(self, width: int, heads: int, angles: Tensor):
        super().__init__()
        self.scales = linear(width, 4 * width, gain=SMALL_GAIN)
        self.attention = Attention(width, heads, angles)
        self.mlp = GatedMLP(width)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.scales(w)[:, None].chunk(4, dim=2)
        x = x + after_attention * self.attention(rms_norm(x) * (1 + before_attention))
        return x + after_mlp * self.mlp(rms_norm(x) * (1 + before_mlp))


class StyledOutput(nn.Module):
    """Tokens x [N, T, width], style w [N, width] -> patches [N, T, outputs]."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.scale = linear(width, width, gain=SMALL_GAIN)
        self.linear = linear(width, outputs)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.linear(rms_norm(x) * (1 + self.scale(w)[:, None]))


# Discriminator --------------------------------------------------------------------------------------------------------


class GATDiscriminator(nn.Module):
    """Images, y int64 [N] -> output of the head: logits [N] or more. Without classes y is ignored.

    Images are [N, K C, H, W], those of K levels side by side; or [N, C, H, W], which count as those of all levels.
    """

    positions: Tensor

    def __init__(self, spec: Spec, config: GAT):
        super().__init__()
        self.channels, self.stages = spec.channels, config.stages
        kind = resolve_d_conditioning(config, spec)
        self.label_map = d_input(kind, spec.classes)
        channels = config.stages * spec.channels + self.label_map.extra_channels
        self.patches = ToPatches(channels, config.patch, config.width)
        self.summary = nn.Parameter(0.02 * torch.randn(1, config.width))  # a token that the head reads
        grid = config.grid(spec)
        self.register_buffer("positions", sine_positions(grid, config.width), persistent=False)
        angles = rotation_angles(grid, config.width // config.heads)
        angles = torch.cat([torch.zeros_like(angles[:1]), angles])  # the summary has no position
        self.blocks = nn.Sequential(*(ScaledBlock(config.width, config.heads, angles) for _ in range(config.depth)))
        self.norm = RMSNorm(config.width)
        self.head = make_head(kind, config.width, spec.classes, _init_head)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | DiscriminatorOutput:
        if x.shape[1] == self.channels:
            x = x.repeat(1, self.stages, 1, 1)
        patches = self.patches(self.label_map(x, y))
        tokens = patches + self.positions.to(patches.dtype)
        summary = self.summary.to(tokens.dtype).expand(len(x), 1, -1)
        return self.head(self.norm(self.blocks(torch.cat([summary, tokens], 1))[:, 0]), y)


class ScaledBlock(nn.Module):
    """Tokens [N, T, width] -> tokens: attention and MLP, the outputs scaled by learned vectors (LayerScale)."""

    def __init__(self, width: int, heads: int, angles: Tensor):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, angles)
        self.mlp = GatedMLP(width)
        self.scales = nn.Parameter(torch.full((2, width), SMALL_GAIN))

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales.to(x.dtype)
        x = x + scales[0] * self.attention(self.norms[0](x))
        return x + scales[1] * self.mlp(self.norms[1](x))


def _init_head(layer: nn.Linear | nn.Embedding) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    else:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return layer
