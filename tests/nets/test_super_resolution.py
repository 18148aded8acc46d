"""Super-resolution: the degradation of every lane, its parts against plain filters, and the generator."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter

from advice import advises
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.nets import Nets, Spec, SuperResolution
from paragan.nets.degradation import blur_matrix, degrade
from paragan.nets.memory_format import set_memory_format
from paragan.nets.spectral_norm import train_mode

SMALL = SuperResolution(width=6, blocks=2, d_width=4)


def images(n, height=16, width=16):
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_lanes_together_equal_each_alone_and_positions_differ():
    x = images(12)
    rng = LaneRng(3, 800, (0, 2, 5), 4)
    together = degrade(x, rng, 2, 0.6, 0.1)
    alone = [degrade(part, LaneRng(3, 800, (lane,), 4), 2, 0.6, 0.1) for lane, part in zip((0, 2, 5), x.split(4))]
    torch.testing.assert_close(together, torch.cat(alone))
    assert torch.equal(together, degrade(x, rng, 2, 0.6, 0.1))
    assert not torch.equal(together, degrade(x, LaneRng(3, 812, (0, 2, 5), 4), 2, 0.6, 0.1))
    assert together.shape == (12, 3, 8, 8)
    assert together.abs().max() <= 1


def test_without_blur_and_noise_images_are_averaged_or_interpolated():
    x = images(32, 12, 24) / 2
    small = degrade(x, LaneRng(0, 0, (0,), 32), 4, 0.0, 0.0)
    kinds = {"average": F.avg_pool2d(x, 4), "bicubic": F.interpolate(x, (3, 6), mode="bicubic", antialias=True)}
    counts = dict.fromkeys(kinds, 0)
    for i, image in enumerate(small):
        errors = {kind: (expected[i] - image).abs().max() for kind, expected in kinds.items()}
        kind = min(errors, key=errors.__getitem__)
        assert errors[kind] < 1e-5
        counts[kind] += 1
    assert min(counts.values()) > 5


def test_blur_is_a_gaussian_of_its_deviation_and_keeps_brightness():
    sigma = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    matrices = blur_matrix(41, sigma)
    torch.testing.assert_close(matrices.sum(2), torch.ones(3, 41, dtype=torch.float64))
    assert torch.equal(matrices[0], torch.eye(41, dtype=torch.float64))
    offset = torch.arange(41, dtype=torch.float64) - 20
    torch.testing.assert_close((matrices[:, 20] * offset.square()).sum(1).sqrt(), sigma, rtol=1e-3, atol=1e-6)


def test_noise_and_blur_differ_between_images():
    x = images(1).expand(64, -1, -1, -1).contiguous()
    gray = torch.zeros_like(x)
    noise = degrade(gray, LaneRng(0, 0, (0,), 64), 2, 1.0, 0.2).std((1, 2, 3))
    assert noise.min() < 0.02
    assert 0.17 < noise.max() < 0.23
    contrast = degrade(x, LaneRng(0, 0, (0,), 64), 2, 1.0, 0.0).std((1, 2, 3))
    assert contrast.min() < 0.7 * contrast.max()


@pytest.mark.parametrize("scale", [2, 4])
def test_g_begins_at_bicubic_interpolation_and_learns_all_parameters(scale):
    torch.manual_seed(0)
    G = SuperResolution(scale=scale, width=6, blocks=2, d_layers=1).generator(Spec(16, 3))
    x = images(3, 16 // scale, 16 // scale).double()
    G.double()
    torch.testing.assert_close(G(x, None), F.interpolate(x, scale_factor=scale, mode="bicubic"))
    torch.nn.init.normal_(G.last_layer)
    torch.testing.assert_close(G(x), torch.cat([G(row[None]) for row in x]))  # rows are independent
    G(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in G.parameters())


def test_bf16_and_channels_last():
    torch.manual_seed(0)
    G, D = train_mode(SMALL.generator(Spec(16, 1))), train_mode(SMALL.discriminator(Spec(16, 1)))
    torch.nn.init.normal_(G.last_layer, 0, 0.1)
    x = images(2, 8, 8)[:, :1]
    expected = G(x)
    for net in (G, D):
        set_memory_format(net, torch.channels_last)
    torch.testing.assert_close(G(x), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert G(x).dtype == D(G(x)).logits.dtype == torch.float32


def test_input_of_g_is_the_degraded_batch():
    real = Batch(images(4), None, LaneRng(1, 0, (0,), 4))
    low = SMALL.conditioning_input(real)
    assert torch.equal(low, degrade(real.images, real.rng, 2, SMALL.max_blur, SMALL.max_noise))
    assert SMALL.generator(Spec(16, 3))(low).shape == real.images.shape


def test_images_divide_as_advised():
    with advises("nets.scale=3: does not divide 32 x 32. Use data.resolution=33"):
        SuperResolution(scale=3).check(Spec(32, 3))
    SuperResolution(scale=3).check(Spec(33, 3))


def test_config_by_name():
    assert TypeAdapter(Nets).validate_python({"name": "super-resolution", "scale": 4}) == SuperResolution(scale=4)
