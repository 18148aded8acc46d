"""StyleGAN2's networks against the paper's formulas: mapping, modulation, synthesis, D, sizes, style mixing."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter

from advice import advises
from paragan.core.errors import UsageError
from paragan.nets import Nets, Spec, StyleGAN2
from paragan.nets.fir_resample import FIRFilter
from paragan.nets.keyed_noise import keyed_normal, row_keys
from paragan.nets.minibatch_stddev import MinibatchStddev
from paragan.nets.modulated_conv import ModulatedConv
from paragan.nets.stylegan2 import NOISE_STREAM, StyleDownBlock

SMALL = StyleGAN2(channel_base=256, channel_max=16, latent=8, style=12, mapping_layers=3, mapping_lr=0.1)
KERNEL = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64)


def build(spec, config=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    G, D = config.generator(spec).to(dtype), config.discriminator(spec).to(dtype)
    for name, p in (*G.named_parameters(), *D.named_parameters()):
        if "bias" in name or "noise_strength" in name:
            torch.nn.init.normal_(p, std=0.3)
    return G, D


def filtered(x, up=1, down=1, padding=(0, 0)):
    """Insert zeros, pad, smooth by [1, 3, 3, 1], keep every `down`-th pixel: written without convolutions of groups."""
    n, c, h, w = x.shape
    spread = x.new_zeros(n, c, h * up, w * up)
    spread[:, :, ::up, ::up] = x
    kernel = (KERNEL[:, None] * KERNEL / 64).to(x.dtype) * up**2
    padded = F.pad(spread, (*padding, *padding)).flatten(0, 1)[:, None]
    return F.conv2d(padded, kernel[None, None]).unflatten(0, (n, c))[:, :, 0, ::down, ::down]


def test_published_numbers_of_parameters():
    """Config F at 1024 px. The tables of layers that the authors' training prints are quoted in public issues, such as
    NVlabs/stylegan2-ada-pytorch#181 and #182: 29,012,513 in D, and 28,794,124 in G with a mapping of two layers, to
    which eight layers add six of 262,656."""

    def sizes(config):
        with torch.device("meta"):
            nets = config.generator(Spec(1024, 3)), config.discriminator(Spec(1024, 3))
        return tuple(sum(p.numel() for p in net.parameters()) for net in nets)

    assert sizes(StyleGAN2(mapping_layers=2)) == (28_794_124, 29_012_513)
    assert sizes(StyleGAN2()) == (28_794_124 + 6 * 262_656, 29_012_513)
    with torch.device("meta"):
        g = StyleGAN2().generator(Spec(1024, 3))
    layer = {name: sum(p.numel() for p in module.parameters()) for name, module in g.named_modules()}
    assert layer["synthesis.layers.0"] == 2_622_465
    assert layer["synthesis.images.0"] == 264_195
    assert [layer[f"synthesis.layers.{i}"] for i in (9, 10, 15, 16)] == [1_442_561, 721_409, 51_297, 25_665]


@pytest.mark.parametrize("form", ["scale", "group"])
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("demodulate", [True, False])
def test_modulated_convolution_equals_the_paper(form, up, demodulate):
    """Eqs. 1 and 3, row by row; doubled maps: a transposed convolution and the filter, with gain 4."""
    torch.manual_seed(0)
    conv = ModulatedConv(5, 7, 3, 6, up=up, demodulate=demodulate, form=form).double()
    x, w = torch.randn(3, 5, 4, 6).double(), torch.randn(3, 6).double()
    rows = []
    for row, style in zip(x, w @ conv.affine.weight.T / math.sqrt(6) + conv.affine.bias):
        weight = conv.weight * style[:, None, None]
        scale = (weight.square().sum((1, 2, 3)) + 1e-8).rsqrt() if demodulate else weight.new_full((7,), 1 / 45**0.5)
        weight = weight * scale[:, None, None, None]
        if up:
            maps = F.conv_transpose2d(row[None], weight.transpose(0, 1), stride=2)
            rows.append(4 * filtered(maps, padding=(1, 1)))
        else:
            rows.append(F.conv2d(row[None], weight, padding=1))
    torch.testing.assert_close(conv(x, w), torch.cat(rows))


def test_output_does_not_depend_on_the_scale_of_a_style():
    conv = ModulatedConv(5, 7, 3, 6).double()
    x, w = torch.randn(2, 5, 4, 4).double(), torch.randn(2, 6).double()
    before = conv(x, w)
    with torch.no_grad():
        conv.affine.weight *= 5
        conv.affine.bias *= 5
    torch.testing.assert_close(conv(x, w), before)


def test_mapping_and_synthesis_equal_the_paper():
    G, _ = build(Spec(16, 3, classes=4))
    G.eval()
    z, y = torch.randn(3, 8).double(), torch.tensor([0, 3, 1])
    w = torch.cat([x / (x.square().mean(1, keepdim=True) + 1e-8).sqrt() for x in (z, G.mapping.embedding(y))], 1)
    for layer in G.mapping.layers:
        w = F.linear(w, layer.weight * 0.1 / w.shape[1] ** 0.5, layer.bias * 0.1)
        w = F.leaky_relu(w, 0.2) * 2**0.5
    torch.testing.assert_close(G.mapping(z, y), w)
    x, image = G.synthesis.start.expand(3, -1, -1, -1), torch.zeros(3, 3, 2, 2).double()
    for i, layer in enumerate(G.synthesis.layers):
        x = layer.conv(x, w)
        noise = keyed_normal(row_keys(z), NOISE_STREAM + i, 1, *x.shape[2:])
        x = F.leaky_relu(x + layer.noise_strength * noise + layer.bias[:, None, None], 0.2) * 2**0.5
        if i % 2 == 0:  # the last layer of a resolution
            to_image = G.synthesis.images[i // 2]
            image = filtered(image, up=2, padding=(2, 1)) + to_image.conv(x, w) + to_image.bias[:, None, None]
    torch.testing.assert_close(G(z, y), image)


def test_discriminator_block_equals_the_paper():
    torch.manual_seed(0)
    block = StyleDownBlock(6, 10).double()
    x = torch.randn(2, 6, 8, 8).double()
    h = F.leaky_relu(F.conv2d(x, block.first.weight / 54**0.5, padding=1), 0.2) * 2**0.5
    h = F.conv2d(filtered(h, padding=(2, 2)), block.second.weight / 54**0.5, stride=2)
    skip = F.conv2d(filtered(x, down=2, padding=(1, 1)), block.shortcut.weight / 6**0.5)
    torch.testing.assert_close(block(x), (F.leaky_relu(h, 0.2) * 2**0.5 + skip) / 2**0.5)


def test_resampling_equals_the_filter():
    x = torch.randn(2, 3, 6, 4).double()
    fir = FIRFilter().double()
    torch.testing.assert_close(fir.upsample(x), filtered(x, up=2, padding=(2, 1)))
    torch.testing.assert_close(fir.downsample(x), filtered(x, down=2, padding=(1, 1)))
    torch.testing.assert_close(fir.smooth(x, padding=2), filtered(x, padding=(2, 2)))


def test_standard_deviation_is_taken_within_lanes():
    layer = MinibatchStddev(4)
    x = torch.randn(12, 3, 2, 2).double()
    layer.lane_batch = 6  # groups of 3
    out = layer(x)
    torch.testing.assert_close(out[:, :3], x)
    expected = [(group.var(0, correction=0) + 1e-8).sqrt().mean() for group in x.split(3)]
    torch.testing.assert_close(out[:, 3, 0, 0], torch.stack(expected).repeat_interleave(3))
    torch.testing.assert_close(layer(x[6:]), out[6:])  # a lane alone


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("form", ["scale", "group"])
@pytest.mark.parametrize("resolution", [8, 32, "32x16"])
def test_shapes_and_gradients(resolution, form, classes):
    spec = Spec(resolution, 3, classes)
    G, D = build(spec, dataclasses.replace(SMALL, modulation=form), torch.float32)
    z, y = torch.randn(6, 8), torch.arange(6) % classes if classes else None
    fake = G(z, y)
    assert fake.shape == (6, *spec.shape)
    logits = D(fake, y)
    assert logits.shape == (6,)
    (logits * torch.randn(6)).sum().backward()
    for net in (G, D):
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name  # noqa: PT018
            assert parameter.grad.any() or name == "head.linear.bias", name


def test_forms_are_equal_with_noise_and_mixing():
    first, _ = build(Spec(16, 3))
    second, _ = build(Spec(16, 3), dataclasses.replace(SMALL, modulation="group"))
    z = torch.randn(5, 8).double()
    torch.testing.assert_close(first(z), second(z))


def test_a_sample_depends_on_its_own_latent_only():
    G, _ = build(Spec(16, 3))
    z = torch.randn(6, 8).double()
    for training in (True, False):
        G.train(training)
        torch.testing.assert_close(G(z)[2:4], G(z[2:4]))
    assert not torch.equal(G(z), G.synthesis(G.styles(z)))  # the noise is that of z, and not that of every image


def test_styles_of_a_second_latent_take_over():
    G, _ = build(Spec(64, 3), dataclasses.replace(SMALL, style_mixing=0.5))
    G.train()
    z = torch.randn(2000, 8).double()
    ws, w = G.styles(z), G.mapping(z)
    is_own = (ws == w[:, None]).all(2)
    assert is_own[:, 0].all()
    assert (is_own[:, :-1] | ~is_own[:, 1:]).all()  # never back
    mixed = ~is_own[:, -1]
    assert 0.45 < mixed.double().mean() < 0.55
    first = is_own[mixed].sum(1)
    counts = torch.bincount(first, minlength=G.num_styles)[1:]
    assert counts.min() > 0.6 * counts.double().mean()  # every layer from the second on is as likely
    assert (ws[mixed, -1] != w[mixed]).all(1).all()
    assert torch.equal(G.eval().styles(z), w[:, None].expand_as(ws))


def test_the_mean_style_follows_training_images():
    G, _ = build(Spec(8, 1))
    z = torch.randn(64, 8).double()
    w = G.mapping(z)
    G.mapping.average.apply_synchronised()
    torch.testing.assert_close(G.mapping.average.mean, 0.002 * w.mean(0))
    G.eval()
    G.mapping(z)
    before = G.mapping.average.mean.clone()
    G.mapping.average.apply_synchronised()
    assert torch.equal(G.mapping.average.mean, before)
    torch.testing.assert_close(G.mapping.truncate(w, 0.5), 0.5 * w + 0.5 * before)


def test_labels_are_ignored_without_classes_and_required_otherwise():
    G, D = build(Spec(8, 1))
    z, y = torch.randn(4, 8).double(), torch.arange(4)
    assert torch.equal(G(z, y), G(z, None))
    G, D = build(Spec(8, 1, classes=4))
    assert not torch.equal(G(z, y), G(z, y.flip(0)))
    assert not torch.equal(D(G(z, y), y), D(G(z, y), y.flip(0)))
    with advises("y=None: a conditional network needs labels. Use an int64 tensor [N]"):
        G(z)


def test_bf16_and_channels_last():
    G, D = build(Spec(16, 3), dtype=torch.float32)
    z = torch.randn(4, 8)
    plain = D(G(z))
    for net in (G, D):
        net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(D(G(z)), plain, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        fake = G(z)
        logits = D(fake)
    assert fake.dtype == logits.dtype == torch.float32
    logits.sum().backward()


def test_sizes_that_do_not_fit_are_refused():
    with advises("nets.channel_base=32: leaves no channel at 64 px. Use 2048"):
        StyleGAN2(channel_base=32).check(Spec(64, 3))
    with pytest.raises(UsageError, match="halved"):
        StyleGAN2().check(Spec(2048, 3))
    assert StyleGAN2().channels(Spec(1024, 3)) == [512, 512, 512, 512, 512, 256, 128, 64, 32]
    assert TypeAdapter(Nets).validate_python({"name": "stylegan2", "style": 64}) == StyleGAN2(style=64)
