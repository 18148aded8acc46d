"""Self-attention between the pixels of an image.

Zhang, Goodfellow, Metaxas and Odena, "Self-Attention Generative Adversarial Networks", 2019, with the
pooling of the authors' code: queries at every pixel, keys and values at a quarter of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.nets.layers import LayerFactory
from paragan.nets.spec import Spec, num_halvings

MIN_CHANNELS = 8  # of maps with attention


class SelfAttention(nn.Module):
    """[N, C, H, W] -> the same shape: x + gamma o(softmax(theta^T phi) g).

    `gamma` [1] starts at 0, so that the layer starts as the identity. All four maps are 1x1 convolutions without bias:
    queries theta and keys phi have C / 8 channels, values g have C / 2.
    """

    def __init__(self, channels: int, layers: LayerFactory):
        super().__init__()
        self.theta = layers(nn.Conv2d(channels, channels // 8, 1, bias=False))
        self.phi = layers(nn.Conv2d(channels, channels // 8, 1, bias=False))
        self.g = layers(nn.Conv2d(channels, channels // 2, 1, bias=False))
        self.o = layers(nn.Conv2d(channels // 2, channels, 1, bias=False))
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        queries = _to_rows(self.theta(x))  # [N, 1, HW, C / 8]
        keys = _to_rows(F.max_pool2d(self.phi(x), 2))  # [N, 1, HW / 4, C / 8]
        values = _to_rows(F.max_pool2d(self.g(x), 2))  # [N, 1, HW / 4, C / 2]
        attended = dot_product_attention(queries, keys, values)[:, 0].mT.unflatten(2, x.shape[2:])
        return x + self.gamma.to(x.dtype) * self.o(attended).to(x.dtype)


class BlockWithAttention(nn.Module):
    """A block, followed by self-attention on its output."""

    def __init__(self, block: nn.Module, attention: SelfAttention):
        super().__init__()
        self.block = block
        self.attention = attention

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.attention(self.block(*inputs))


def insert_attention(
    stages: Iterable[tuple[nn.Module, int, int]], target_side: int, layers: LayerFactory
) -> Iterator[nn.Module]:
    """Yield the blocks, with attention after the first one whose output has `target_side` pixels on its short side.

    Args:
        stages: (block, short side of its output in pixels, channels of its output) in order.
        target_side: Pixels; 0 for no attention.
        layers: Makes the layers of the attention.
    """
    inserted = target_side == 0
    for block, short_side, channels in stages:
        if inserted or short_side != target_side:
            yield block
        else:
            yield BlockWithAttention(block, SelfAttention(channels, layers))
            inserted = True


def dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute softmax(queries keys^T) values, unscaled: [N, 1, P, a], [N, 1, Q, a], [N, 1, Q, b] -> [N, 1, P, b].

    Uses torch's fused kernel. The gradient can be differentiated again, as gradient penalties need it, except in a
    compiled network; networks under a gradient penalty are not compiled.
    """
    if torch.compiler.is_compiling():  # a custom autograd function would split the network into many graphs
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    return _DotProductAttention.apply(queries, keys, values)  # pyright: ignore[reportReturnType]


class _DotProductAttention(torch.autograd.Function):
    """Attention with a second derivative, which torch's fused kernels lack: the gradient is written out if needed."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward with create_graph=True
            return _explicit_gradients(*inputs, grads[0])
        return _fused_gradients(*inputs, grads[0])


def _explicit_gradients(queries: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    weights = (queries @ keys.mT).softmax(-1)  # [N, 1, P, Q]
    weight_grad = grad @ values.mT
    score_grad = weights * (weight_grad - (weights * weight_grad).sum(-1, keepdim=True))
    return score_grad @ keys, score_grad.mT @ queries, weights.mT @ grad


def _fused_gradients(queries: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Run the kernel's forward pass again, so that no [P, Q] matrix is stored."""
    q, k, v = (x.detach().requires_grad_() for x in (queries, keys, values))
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return torch.autograd.grad(out, (q, k, v), grad)


def _to_rows(x: Tensor) -> Tensor:
    return x.flatten(2).mT.contiguous()[:, None]  # [N, C, H, W] -> [N, 1, HW, C]; a view if x is channels_last


def attention_resolution(requested: int | None, spec: Spec) -> int:
    """Return the short side of the maps with self-attention in pixels, 0 for none.

    The default (`requested` None) is half that of the image, halved again until it is at most 64: as in StudioGAN for
    powers of two.
    """
    if requested is not None:
        return requested
    return max((side for side in _sides_of_maps(spec) if side <= 64), default=0)


def _sides_of_maps(spec: Spec) -> list[int]:
    """Return the short sides that attention may have: those between the start grid and the image, largest first."""
    return [spec.size.short_side >> i for i in range(1, num_halvings(spec.size))]


class AttentionNets(Protocol):
    """Config of a pair of networks, as far as attention is concerned."""

    @property
    def attention(self) -> int | None: ...
    @property
    def width(self) -> int: ...
    @property
    def d_width(self) -> int | None: ...


def check_attention(nets: AttentionNets, spec: Spec, g_channels: Sequence[int], d_channels: Sequence[int]) -> None:
    """Check that attention fits into both networks.

    Args:
        nets: Their configuration; `d_width` None is `width`.
        spec: The images.
        g_channels: Channels of the generator at the start grid, twice that, ...
        d_channels: Channels of the discriminator at a half, a quarter, ... of the image.

    Raises:
        UsageError: No map between the start grid and the image has this short side, or a network has fewer than
            MIN_CHANNELS there.
    """
    short_side = attention_resolution(nets.attention, spec)
    if not short_side:
        return
    sides = _sides_of_maps(spec)
    if short_side not in sides:
        raise UsageError(
            f"nets.attention={short_side}: must be {' or '.join(map(str, sides))} (short side of the maps, pixels) for "
            f"images of {spec.size.resolution} px, or 0 for none. Use {attention_resolution(None, spec)}"
        )
    index = sides.index(short_side)
    widths = (
        ("width", nets.width, g_channels[len(sides) - index]),
        ("d_width", nets.d_width or nets.width, d_channels[index]),
    )
    narrow = [(field, width, channels) for field, width, channels in widths if channels < MIN_CHANNELS]
    if narrow:
        found = " and ".join(f"nets.{field}={width} leaves {channels}" for field, width, channels in narrow)
        wider = " and ".join(f"nets.{field}={width * -(-MIN_CHANNELS // count)}" for field, width, count in narrow)
        raise UsageError(
            f"nets.attention={short_side}: needs maps of at least {MIN_CHANNELS} channels, and {found}. "
            f"Use {wider}, or nets.attention=0"
        )
