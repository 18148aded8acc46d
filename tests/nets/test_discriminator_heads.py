"""Heads and attention compared with plain PyTorch."""

import pytest
import torch
from torch import nn

from paragan.core.errors import UsageError
from paragan.nets import SAGAN, Spec
from paragan.nets.attention import SelfAttention, check_attention, dot_product_attention
from paragan.nets.conditioning import LabelMap, SharedEmbedding
from paragan.nets.discriminator_heads import ClassifierHead, ContrastiveHead, ProjectionHead, make_head
from paragan.nets.layers import LayerFactory

LAYERS = LayerFactory(nn.init.xavier_uniform_)


def test_projection_adds_the_product_with_the_class_vector():
    torch.manual_seed(0)
    layer = make_head("projection", 5, 3, LAYERS)
    features = torch.randn(4, 5)
    y = torch.tensor([2, 0, 1, 2])
    assert isinstance(layer, ProjectionHead)
    expected = [
        layer.linear.weight[0] @ f + layer.linear.bias[0] + layer.embedding.weight[k] @ f for f, k in zip(features, y)
    ]
    torch.testing.assert_close(layer(features, y), torch.stack(expected))


def test_classifier_returns_logits_and_class_logits():
    torch.manual_seed(0)
    layer = make_head("classifier", 5, 3, LAYERS)
    features = torch.randn(4, 5)
    assert isinstance(layer, ClassifierHead)
    logits, classes, *others = layer(features, None)
    torch.testing.assert_close(logits, layer.linear(features)[:, 0])
    torch.testing.assert_close(classes, features @ layer.classes.weight.T)
    assert others == [None, None, (), ()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_contrastive_embeddings_have_length_one(dtype):
    torch.manual_seed(0)
    layer = make_head("contrastive", 5, 3, LAYERS, 7)
    y = torch.tensor([2, 0, 1, 2])
    features = torch.randn(4, 5, dtype=dtype)
    assert isinstance(layer, ContrastiveHead)
    logits, classes, embedding, proxies, *_ = layer.to(dtype)(features, y)
    assert classes is None
    wide = torch.promote_types(dtype, torch.float32)
    for points in (embedding, proxies):
        assert points.shape == (4, 7)
        assert points.dtype == logits.dtype == wide
        torch.testing.assert_close(points.norm(dim=1), torch.ones(4, dtype=wide))
    images = features @ layer.embedding.weight.T
    cosines = nn.functional.cosine_similarity(images.to(wide), embedding)
    torch.testing.assert_close(
        cosines, torch.ones(4, dtype=wide), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    assert torch.equal(proxies[0], proxies[3])


def test_attention_equals_the_sum_of_the_paper():
    torch.manual_seed(0)
    layer = SelfAttention(16, LAYERS)
    x = torch.randn(2, 16, 4, 6)
    assert torch.equal(layer(x), x)  # as it begins
    nn.init.constant_(layer.gamma, 0.5)
    theta, phi, g, o = (getattr(layer, name).weight[:, :, 0, 0] for name in ("theta", "phi", "g", "o"))
    expected = x.clone()
    for n in range(2):
        quarter = [nn.functional.max_pool2d((w @ x[n].flatten(1)).view(-1, 4, 6), 2).flatten(1) for w in (phi, g)]
        for i in range(24):
            query = theta @ x[n].flatten(1)[:, i]
            shares = (query @ quarter[0]).exp()
            expected[n].view(16, 24)[:, i] += 0.5 * o @ (quarter[1] @ shares / shares.sum())
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("width", [2, 3])  # of values: torch takes its fused kernel on CPU where it is that of queries
def test_attention_has_a_second_derivative(width):
    torch.manual_seed(0)
    sizes = ((4, 2), (3, 2), (3, width))
    inputs = [torch.randn(2, 1, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(dot_product_attention, inputs)
    assert torch.autograd.gradgradcheck(dot_product_attention, inputs)


def test_attention_needs_eight_channels():
    check_attention(SAGAN(attention=16), Spec(32, 3), (4, 4, 8, 4), (8, 4, 4))
    check_attention(SAGAN(attention=0), Spec(32, 3), (1, 1, 1, 1), (1, 1, 1))
    with pytest.raises(UsageError, match=r"nets.attention=8: .*8 channels, and nets.d_width=1 leaves 4. Use"):
        check_attention(SAGAN(attention=8, d_width=1), Spec(32, 3), (8, 8, 8, 8), (8, 4, 4))


def test_blocks_get_their_chunk_of_z_and_the_class():
    shared = nn.Embedding(3, 2)
    y = torch.tensor([1, 2])
    z = torch.arange(24.0).view(2, 12)
    label = shared(y)
    first, chunks = SharedEmbedding("batch_norm", 12, 4, shared)(z, y)
    assert torch.equal(first, z[:, :3])
    parts = [z[:, 3:6], z[:, 6:9], z[:, 9:]]
    assert all(torch.equal(a, torch.cat([b, label], 1)) for a, b in zip(chunks, parts, strict=True))
    first, chunks = SharedEmbedding("concat", 12, 4, shared)(z, y)
    assert torch.equal(first, torch.cat([z[:, :3], label], 1))
    assert all(torch.equal(a, b) for a, b in zip(chunks, parts, strict=True))
    single_block = SharedEmbedding("batch_norm", 12, 1, shared)
    first, chunks = single_block(z, y)
    assert torch.equal(first, torch.cat([z, label], 1))
    assert torch.equal(next(iter(chunks)), first)
    assert (single_block.out_features, single_block.norm_features) == (14, 14)


def test_label_map_is_one_more_channel():
    layer = LabelMap(3)
    x = torch.randn(2, 3, 16, 16)
    y = torch.tensor([2, 0])
    out = layer(x, y)
    assert torch.equal(out[:, :3], x)
    assert torch.equal(out[:, 3, ::2, ::2], layer.embedding(y).view(2, 8, 8))
    assert torch.equal(out[:, 3, 1::2, 1::2], out[:, 3, ::2, ::2])
