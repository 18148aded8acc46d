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
    """[N, C, H, W] to the same: x + gamma o(softmax(theta^T phi) g), `gamma` [1] from 0, so that it begins as x.

    1x1 convolutions without biases: queries theta and keys phi of C / 8 channels, values g of C / 2.
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
        keys, values = (_to_rows(F.max_pool2d(layer(x), 2)) for layer in (self.phi, self.g))  # [N, 1, HW / 4, ...]
        seen = dot_product_attention(queries, keys, values)[:, 0].mT.unflatten(2, x.shape[2:])
        return x + self.gamma.to(x.dtype) * self.o(seen).to(x.dtype)


class BlockWithAttention(nn.Module):
    """A block, then attention over what it gives."""

    def __init__(self, block: nn.Module, attention: SelfAttention):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.attention(self.block(*inputs))


def insert_attention(
    stages: Iterable[tuple[nn.Module, int, int]], target_resolution: int, layers: LayerFactory
) -> Iterator[nn.Module]:
    """The blocks of (block, resolution, channels of what it gives), with attention after the first at `size` pixels."""
    wanted = target_resolution
    for block, resolution, channels in stages:
        here = wanted > 0 and resolution == wanted
        yield BlockWithAttention(block, SelfAttention(channels, layers)) if here else block
        wanted = 0 if here else wanted


def dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(queries keys^T) values, unscaled: [N, 1, P, a], [N, 1, Q, a], [N, 1, Q, b] -> [N, 1, P, b].

    By torch's fused kernel. Its gradient may be differentiated again, as a gradient penalty does, but not where it is
    compiled, which a network under such a penalty is not.
    """
    if torch.compiler.is_compiling():  # what is below would divide the network into many graphs
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    return _DotProductAttention.apply(queries, keys, values)  # pyright: ignore[reportReturnType]


class _DotProductAttention(torch.autograd.Function):
    """Torch's fused kernels have no second derivative: where it is asked for, the gradient is written out."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        return (_explicit_gradients if torch.is_grad_enabled() else _fused_gradients)(*inputs, grads[0])


def _explicit_gradients(queries: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    shares = (queries @ keys.mT).softmax(-1)  # [N, 1, P, Q]
    wanted = grad @ values.mT
    scores = shares * (wanted - (shares * wanted).sum(-1, keepdim=True))
    return scores @ keys, scores.mT @ queries, shares.mT @ grad


def _fused_gradients(queries: Tensor, keys: Tensor, values: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """A second forward pass of the kernel, so that no [P, Q] is ever held."""
    q, k, v = (x.detach().requires_grad_() for x in (queries, keys, values))
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return torch.autograd.grad(out, (q, k, v), grad)


def _to_rows(x: Tensor) -> Tensor:
    return x.flatten(2).mT.contiguous()[:, None]  # [N, C, H, W] -> [N, 1, HW, C]; of channels_last a view


def attention_resolution(requested: int | None, spec: Spec) -> int:
    """The resolution attended to, pixels; 0: none. Not given: half the image's, at most 64 (StudioGAN's places)."""
    return min(spec.resolution // 2, 64) if requested is None else requested


def check_attention(resolution: int, spec: Spec, g_channels: Sequence[int], d_channels: Sequence[int]) -> None:
    """Raise `Unusable` unless both networks pass through `size` pixels (0: no attention) with 8 channels or more.

    widths, d_widths: channels at 4, 8, ... px of the generator, at R/2, R/4, ... px of the discriminator.
    """
    most = spec.resolution // 2
    if resolution and not (resolution & (resolution - 1) == 0 and 8 <= resolution <= most):
        raise UsageError(
            f"nets.attention={resolution}: at {spec.resolution} px it needs a power of two from 8 to {most} pixels, "
            f"or 0 for none; {attention_resolution(None, spec)} would work"
        )
    if not resolution:
        return
    here = g_channels[(resolution // 4).bit_length() - 1], d_channels[(most // resolution).bit_length() - 1]
    for field, channels in zip(("width", "d_width"), here):
        if channels < 8:
            raise UsageError(
                f"nets.{field}: gives {channels} channels to attention at {resolution} px, which needs at least 8; "
                f"{-(-8 // channels)} times as wide would work, or nets.attention=0"
            )
