"""Memory formats and padded channels do not change what networks compute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paragan.nets import DCGAN, R3GAN, SNGAN, Spec, StyleGAN2
from paragan.nets.memory_format import (
    FlattenCL,
    MemoryFormat,
    UnflattenGrid,
    pad_channels,
    set_memory_format,
    to_memory_format,
)

FORMATS = (torch.contiguous_format, torch.channels_last)
FAMILIES = {
    "dcgan": DCGAN(width=8, latent=16),
    "sngan": SNGAN(width=8, latent=16),
    "r3gan": R3GAN(width=16, group=8),
    "stylegan2": StyleGAN2(channel_base=256, latent=16, style=16),
}


def strides(x):
    _, c, h, w = x.shape
    return (c * h * w, 1, w * c, c)


@pytest.mark.parametrize("channels", [1, 3])
def test_one_channel_gets_channels_last_strides(channels):
    x = torch.rand(2, channels, 4, 4)
    last = to_memory_format(x, torch.channels_last)
    assert last.stride() == strides(x)
    assert torch.equal(last, x)
    assert to_memory_format(x, torch.contiguous_format).stride() == x.stride()


def test_gradient_of_flattened_maps_has_the_memory_format():
    flat = FlattenCL()
    gradient_strides = []
    flat.memory_format = torch.channels_last
    x = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    h = x * 1
    h.register_hook(lambda slope: gradient_strides.append(slope.stride()))
    weights = torch.rand(2, 48)
    (flat(h) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights.view(2, 3, 4, 4))
    assert h.grad_fn is not None
    assert gradient_strides


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("nets", FAMILIES.values(), ids=FAMILIES)
def test_networks_are_equal_in_both_formats_and_with_padded_channels(nets, channels):
    spec = Spec(32, channels, 10)
    torch.manual_seed(0)
    networks = nets.generator(spec).double(), nets.discriminator(spec).double()
    z, x, y = torch.randn(4, nets.latent).double(), torch.randn(4, channels, 32, 32).double(), torch.arange(4)
    for net, value in zip(networks, (z, x)):
        results = []
        for memory_format, tile in ((FORMATS[0], 0), (FORMATS[1], 0), (FORMATS[1], 16)):
            mine = copy.deepcopy(net)
            set_memory_format(mine, memory_format)
            pad_channels(mine, tile)
            assert list(mine.state_dict()) == list(net.state_dict())
            at = value.clone().requires_grad_()
            out = mine(at, y)
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape).double()).sum().backward()
            results.append([out, at.grad, *(p.grad for p in mine.parameters() if p.grad is not None)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)


def test_maps_of_a_grey_dcgan_are_channels_last_throughout():
    """Also with one channel, whose strides are ambiguous: inputs and outputs of every convolution are channels_last."""
    net = DCGAN(width=8).discriminator(Spec(8, 1, 10))
    set_memory_format(net, torch.channels_last)
    layer_strides = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda m, args, out: layer_strides.append((out.stride(), strides(out))))
    net(torch.rand(4, 1, 8, 8), torch.arange(4))
    assert layer_strides
    assert all(actual == expected for actual, expected in layer_strides)


def test_unflatten_to_4x4():
    h = torch.arange(64.0).view(2, 32)
    square = UnflattenGrid((4, 4))
    assert square(h).shape == (2, 2, 4, 4)
    square.memory_format = torch.channels_last
    assert torch.equal(square(h).flatten(1), h)
    assert isinstance(square, MemoryFormat)
