"""GAT's networks against the paper's formulas in plain PyTorch: blocks, levels, patches, sizes; and noise by level."""

import math

import pytest
import torch
import torch.nn.functional as F

from advice import advises
from paragan.core.rng import LaneRng
from paragan.losses.noise_levels import add_noise_by_level, signal_fractions
from paragan.nets import GAT, Spec
from paragan.nets.gat import LeveledImages
from paragan.nets.transformer import Attention, from_patches, rotation_angles, sine_positions

SMALL = GAT(width=16, depth=4, heads=2, patch=2, stages=2, latent=8, mapping_lr=0.1)
SPEC = Spec(8, 3, classes=5)


def build(config=SMALL, spec=SPEC, dtype=torch.float64):
    torch.manual_seed(0)
    G, D = config.generator(spec).to(dtype), config.discriminator(spec).to(dtype)
    for name, p in (*G.named_parameters(), *D.named_parameters()):
        if name.endswith("bias") or "norm" in name or "scales" in name:
            torch.nn.init.normal_(p, std=0.3)
    return G, D


def test_published_number_of_parameters():
    """GAT-XL/2 on latents of 32 x 32 with 4 channels: 602 million in G (table 2 of the paper)."""
    with torch.device("meta"):
        g = GAT(width=1152, depth=28, heads=16).generator(Spec(32, 4, classes=1000))
    assert round(sum(p.numel() for p in g.parameters()) / 1e6) == 602


def attended(layer, x, grid, extra=0):
    """Attention, head by head and token by token; a token's numbers are rotated as complex ones."""
    n, tokens, width = x.shape
    size = width // layer.heads
    qkv = layer.inputs(x).view(n, tokens, 3, layer.heads, size)
    rates = 10_000 ** -(torch.arange(size // 4, dtype=torch.float64) / (size // 4))
    turns = torch.ones(tokens, size // 2, dtype=torch.complex128)
    for t in range(tokens - extra):
        row, column = divmod(t, grid[1])
        turns[t + extra] = torch.exp(1j * torch.cat([row * rates, column * rates]))
    heads = []
    for h in range(layer.heads):
        q, k = (
            F.rms_norm(qkv[:, :, i, h], (size,), norm.weight, 1e-6)
            for i, norm in enumerate((layer.query_norm, layer.key_norm))
        )
        q, k = (
            torch.view_as_real(torch.view_as_complex(v.reshape(n, tokens, -1, 2)) * turns).flatten(2) for v in (q, k)
        )
        heads.append((q @ k.mT / math.sqrt(size)).softmax(2) @ qkv[:, :, 2, h])
    return layer.output(torch.cat(heads, 2))


def mlp(layer, x):
    gate, value = layer.inputs(x).chunk(2, 2)
    return layer.output(gate * gate.sigmoid() * value)


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_generator_is_the_formulas():
    G, _ = build()
    z, y = torch.randn(3, 8, dtype=torch.float64), torch.tensor([0, 3, 4])
    out = G(z, y)
    assert isinstance(out, LeveledImages)
    assert out.levels.shape == (3, 2, 3, 8, 8)
    w = G.mapping(z, y)
    x = sine_positions((4, 4), 16).double().expand(3, -1, -1)
    image, levels = torch.zeros(3, 3, 8, 8, dtype=torch.float64), []
    for i, block in enumerate(G.blocks):
        a, b, c, d = block.scales(w)[:, None].chunk(4, 2)
        x = x + b * attended(block.attention, norm(x) * (1 + a), (4, 4))
        x = x + d * mlp(block.mlp, norm(x) * (1 + c))
        if i % 2:
            last = G.images[i // 2]
            patches = last.linear(norm(x) * (1 + last.scale(w)[:, None]))  # [N, T, C p p]
            patches = patches.view(3, 4, 4, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 8, 8)
            image = image + patches
            levels.append(image)
    torch.testing.assert_close(out.levels, torch.stack(levels, 1))
    torch.testing.assert_close(out.images, image)
    G.eval()
    torch.testing.assert_close(G(z, y), image)
    torch.testing.assert_close(G.from_styles(G.styles(z, y)), image)


def test_discriminator_is_the_formulas():
    _, D = build()
    x, y = torch.randn(3, 6, 8, 8, dtype=torch.float64), torch.tensor([1, 1, 2])
    patches = x.view(3, 6, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(3, 16, 24)
    h = D.patches.linear(patches) + sine_positions((4, 4), 16).double()
    h = torch.cat([D.summary.expand(3, 1, -1), h], 1)
    for block in D.blocks:
        h = h + block.scales[0] * attended(block.attention, norm(h) * block.norms[0].weight, (4, 4), extra=1)
        h = h + block.scales[1] * mlp(block.mlp, norm(h) * block.norms[1].weight)
    features = norm(h[:, 0]) * D.norm.weight
    logits = D.head.linear(features)[:, 0] + (D.head.embedding(y) * features).sum(1)
    torch.testing.assert_close(D(x, y), logits)
    torch.testing.assert_close(D(x[:, :3], y), D(torch.cat([x[:, :3], x[:, :3]], 1), y))


def test_attention_sees_only_differences_of_positions():
    layer = Attention(8, 1, rotation_angles((3, 5), 8)).double()
    cos, sin = layer.cos, layer.sin
    x = torch.randn(1, 15, 8, dtype=torch.float64)
    moved = rotation_angles((3, 5), 8) + torch.tensor([0.7, 0.2, 1.1, 0.4])
    before = layer(x)
    layer.cos, layer.sin = moved.cos().double(), moved.sin().double()
    assert not torch.equal(layer.cos, cos)
    assert not torch.equal(layer.sin, sin)
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-6)


def test_sizes_that_are_no_squares():
    G, D = build(spec=Spec("16x8", 1))
    images = G(torch.randn(2, 8, dtype=torch.float64)).images
    assert images.shape == (2, 1, 8, 16)
    assert D(images).shape == (2,)
    assert from_patches(torch.arange(8.0)[None, None].expand(1, 2, 8), 2, (1, 2)).shape == (1, 2, 2, 4)


def test_noise_by_level():
    assert signal_fractions(4, 0.125).tolist() == pytest.approx([0.125, 0.25, 0.5, 1.0])
    rng = LaneRng(0, 3, (0, 1), 2, torch.device("cpu"))
    x = torch.randn(4, 3, 2, 8, 8, dtype=torch.float64)
    noisy = add_noise_by_level(x, 0.25, rng, "levels")
    e = rng.normal("levels", 3, 2, 8, 8).double()
    expected = [a * x[:, k] + math.sqrt(1 - a * a) * e[:, k] for k, a in enumerate((0.25, 0.5, 1.0))]
    torch.testing.assert_close(noisy, torch.cat(expected, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(noisy[:, -2:], x[:, -1], rtol=1e-6, atol=1e-6)


def test_sizes_that_do_not_divide_are_refused():
    spec = Spec(32, 3)
    with advises("Use nets.patch=2"):
        GAT(patch=3).check(spec)
    with advises("nets.width=100: does not divide into 6 heads of a multiple of 4 numbers. Use nets.width=96"):
        GAT(width=100).check(spec)
    with advises("Use nets.depth=8"):
        GAT(depth=6).check(spec)
    GAT(patch=2, width=96, depth=8).check(spec)
