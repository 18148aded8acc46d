"""Self-attention between the pixels of an image.

Zhang, Goodfellow, Metaxas and Odena, "Self-Attention Generative Adversarial Networks", 2019, with the
pooling of the authors' code: queries at every pixel, keys and values at a quarter of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.nets.layers import LayerFactory
from paragan.nets.spec import Spec


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
    stages: Iterable[tuple[nn.Module, int, int]], target_resolution: int, layers: LayerFactory
) -> Iterator[nn.Module]:
    """Yield the blocks, with attention after the first one whose output has `target_resolution` pixels.

    Args:
        stages: (block, resolution of its output in pixels, channels of its output) in order.
        target_resolution: Pixels; 0 for no attention.
        layers: Makes the layers of the attention.
    """
    inserted = target_resolution == 0
    for block, resolution, channels in stages:
        if inserted or resolution != target_resolution:
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
    """Return the resolution of self-attention in pixels, 0 for none.

    The default (`requested` None) is half the image's resolution, at most 64, as in StudioGAN.
    """
    return min(spec.resolution // 2, 64) if requested is None else requested


def check_attention(resolution: int, spec: Spec, g_channels: Sequence[int], d_channels: Sequence[int]) -> None:
    """Check that attention at `resolution` fits into both networks.

    Args:
        resolution: Pixels; 0 for no attention.
        spec: The images.
        g_channels: Channels of the generator at 4, 8, ... pixels.
        d_channels: Channels of the discriminator at R/2, R/4, ... pixels.

    Raises:
        UsageError: `resolution` is no power of two from 8 to R/2, or a network has fewer than 8 channels there.
    """
    largest = spec.resolution // 2
    if not resolution:
        return
    if resolution & (resolution - 1) or not 8 <= resolution <= largest:
        raise UsageError(
            f"nets.attention={resolution}: must be a power of two from 8 to {largest} (pixels) for images of "
            f"{spec.resolution} px, or 0 for none. Use {attention_resolution(None, spec)}"
        )
    widths = {
        "width": g_channels[(resolution // 4).bit_length() - 1],
        "d_width": d_channels[(largest // resolution).bit_length() - 1],
    }
    for field, channels in widths.items():
        if channels < 8:
            raise UsageError(
                f"nets.{field}: leaves {channels} channels for attention at {resolution} px, which needs at least 8. "
                f"Use a value {-(-8 // channels)} times as large, or nets.attention=0"
            )
