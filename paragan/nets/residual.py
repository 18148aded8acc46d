"""The residual networks that SNGAN, SAGAN, BigGAN and ContraGAN have in common; a family says how wide."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.attention import attended
from paragan.nets.conditioning import Judging, Telling, shown, told
from paragan.nets.discriminator_heads import head
from paragan.nets.lane_batch_norm import LaneBatchNorm2d, batch_norm
from paragan.nets.layers import Layers, passed
from paragan.nets.memory_format import Laid, Squared
from paragan.nets.spec import Spec


class Generator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, R, R] in [-1, 1], dtype of z. No classes: y unused.

    conditions: (z, y) -> what `start` sees, and what the norms of each block see (`nets/conditioning.py`)
    start     : to [N, channels of the first block * 4 * 4]
    widths    : channels after the last block, and of the image
    again     : activations inside blocks are computed again in backward, not kept
    """

    def __init__(
        self,
        latent: int,
        conditions: nn.Module,
        start: nn.Module,
        blocks: Iterable[nn.Module],
        widths: tuple[int, int],
        layers: Layers,
        again: bool,
    ):
        super().__init__()
        self.latent, self.again = latent, again
        self.conditions, self.start, self.square = conditions, start, Squared()
        self.blocks = nn.ModuleList(blocks)
        self.norm = LaneBatchNorm2d(widths[0])  # without classes, as in all the authors' codes
        self.image = layers.conv(*widths, 3)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        first, each = self.conditions(z, y)
        h = self.square(self.start(first))
        for block, seen in zip(self.blocks, each):
            h = passed(block, self.again, h, seen)
        return passed(self._to_image, self.again, h).to(z.dtype)

    def _to_image(self, h: Tensor) -> Tensor:
        return torch.tanh(self.image(F.relu(self.norm(h), inplace=True)))


class Discriminator(nn.Module):
    """Images [N, C, R, R], y int64 [N] -> logits [N], float32 or wider, or what the head says. No classes: y unused.

    shown: (images, y) -> what the first block sees
    head : (features [N, F], y) -> the verdict; features are sums over pixels
    again: activations inside blocks are computed again in backward, not kept
    """

    def __init__(self, shown: nn.Module, blocks: Iterable[nn.Module], head: nn.Module, again: bool):
        super().__init__()
        self.again, self.shown, self.entry = again, shown, Laid()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.entry(self.shown(x, y))
        for block in self.blocks:
            h = passed(block, self.again, h)
        return self.head(F.relu(h, inplace=True).sum((2, 3)), y)


class RisingBlock(nn.Module):
    """[N, a, R, R] -> [N, b, 2 R, 2 R]: norm, ReLU, up, conv, norm, ReLU, conv, plus a 1x1 shortcut.

    norm: channels -> a batch norm, called with what the norms of this block see.
    """

    def __init__(self, a: int, b: int, norm: Callable[[int], nn.Module], layers: Layers):
        super().__init__()
        self.norm1, self.norm2 = norm(a), norm(b)
        self.conv1 = layers.up(a, b, 3, layers.residual)
        self.conv2 = layers.conv(b, b, 3, layers.residual)
        self.shortcut = layers.up(a, b, 1)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x, seen), inplace=True))
        h = self.conv2(F.relu(self.norm2(h, seen), inplace=True))
        return h + self.shortcut(x)


class FallingBlock(nn.Module):
    """[N, a, R, R] -> [N, b, R / 2, R / 2], or R without `down`: ReLU, conv, ReLU, conv, pool; a shortcut.

    `before` is the first ReLU, but nothing where the input is an image (the authors' "optimized block").
    `hidden` are the channels between the two convolutions. `activated`: the shortcut sees the ReLU too.
    """

    def __init__(
        self, before: nn.Module, a: int, hidden: int, b: int, down: bool, layers: Layers, activated: bool = False
    ):
        super().__init__()
        self.before, self.activated = before, activated
        last = layers.down if down else layers.conv
        self.conv1 = layers.conv(a, hidden, 3, layers.residual)
        self.conv2 = last(hidden, b, 3, layers.residual)
        self.shortcut = last(a, b, 1) if down or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        h = self.conv2(F.relu(self.conv1(seen), inplace=True))
        return h + self.shortcut(seen if self.activated else x)


def rising_blocks(
    widths: Sequence[int], norm: Callable[[int], nn.Module], attention: int, layers: Layers
) -> Iterable[nn.Module]:
    """A generator's blocks from 4x4 up, of `widths` at 4x4, 8x8, ...; attention at so many pixels (0: none)."""
    pairs = enumerate(itertools.pairwise(widths))
    return attended(((RisingBlock(a, b, norm, layers), 8 << i, b) for i, (a, b) in pairs), attention, layers)


def generator(
    spec: Spec, widths: Sequence[int], latent: int, kind: Telling, attention: int, layers: Layers, again: bool
) -> Generator:
    """Of SNGAN and SAGAN: every norm has a gain and a bias per class of its own; widths at 4x4, 8x8, ..."""
    conditions = told(kind, latent, spec.classes)
    start = layers(nn.Linear(conditions.inputs, widths[0] * 4 * 4))
    norm = partial(batch_norm, classes=spec.classes if kind == "batch_norm" else 0)
    blocks = rising_blocks(widths, norm, attention, layers)
    return Generator(latent, conditions, start, blocks, (widths[-1], spec.channels), layers, again)


def discriminator(
    spec: Spec,
    stages: Sequence[tuple[int, bool]],
    hidden: Literal["in", "out"],
    kind: Judging,
    attention: int,
    layers: Layers,
    again: bool,
    shortcut: Literal["input", "activated"],
    length: int | None = None,
) -> Discriminator:
    """Of all four. stages: (channels, halves?) of each block; length: of a contrastive embedding."""
    first = shown(kind, spec.classes)
    falling = _falling(spec.resolution, spec.channels + first.maps, stages, hidden, layers, shortcut == "activated")
    blocks = list(attended(falling, attention, layers))
    return Discriminator(first, blocks, head(kind, stages[-1][0], spec.classes, layers, length), again)


def _falling(
    size: int, a: int, stages: Sequence[tuple[int, bool]], hidden: Literal["in", "out"], layers: Layers, activated: bool
) -> Iterable[tuple[nn.Module, int, int]]:
    for i, (b, down) in enumerate(stages):
        size = size // 2 if down else size
        before, between = (nn.ReLU(), a if hidden == "in" else b) if i else (nn.Identity(), b)
        yield FallingBlock(before, a, between, b, down, layers, activated), size, b
        a = b
