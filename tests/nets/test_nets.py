"""Backbones: shapes at every resolution, gradients everywhere, published sizes, exact rewrites."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import nn

from paragan.errors import Unusable
from paragan.nets import DCGAN, SNGAN, Nets, Spec
from paragan.nets.norm import LaneBatchNorm
from paragan.nets.sngan import DownConv, UpConv
from paragan.nets.spectral import train_mode

CONFIGS = {
    "dcgan": DCGAN(width=4, latent=6),
    "dcgan-bn": DCGAN(width=4, latent=6, spectral=False, batch_norm=True),
    "sngan": SNGAN(width=4, latent=6),
    "sngan-plain": SNGAN(width=2, d_width=4, latent=6, spectral=False),
}


def build(config, spec, seed=0):
    torch.manual_seed(seed)
    return train_mode(config.generator(spec)), train_mode(config.discriminator(spec))


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def batch(spec, n=4):
    y = torch.arange(n) % spec.classes if spec.classes else None
    return torch.randn(n, 6), y


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("resolution", [8, 16, 32, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_and_gradients(name, resolution, classes):
    spec = Spec(resolution, 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(spec, 32)  # so many that no unit is idle for all
    fake = G(z, y)
    assert G.latent == 6
    assert fake.shape == (32, 3, resolution, resolution)
    assert fake.dtype == torch.float32
    assert fake.abs().max() <= 1
    logits = D(fake, y)
    assert logits.shape == (32,)
    (logits * torch.randn(32)).sum().backward()
    for net in (G, D):
        for key, parameter in net.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all()
    assert all(parameter.grad.any() for parameter in G.parameters())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("resolution", [128, 256])
def test_larger_resolutions_build(name, resolution):
    spec = Spec(resolution, 1)
    G, D = build(CONFIGS[name], spec)
    assert D(G(torch.randn(2, 6))).shape == (2,)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_classes_labels_are_ignored_and_with_them_they_are_needed(name):
    G, D = build(CONFIGS[name], Spec(8, 1))
    z, y = torch.randn(4, 6), torch.arange(4)
    assert torch.equal(G(z, y), G(z, None))
    assert torch.equal(D(G(z), y), D(G(z), None))
    G, D = build(CONFIGS[name], Spec(8, 1, classes=4))
    with torch.no_grad():
        for norm in (part for part in G.modules() if isinstance(part, nn.Embedding)):
            norm.weight.normal_()
    assert not torch.equal(G(z, y), G(z, y.flip(0)))
    assert not torch.equal(D(G(z, y), y), D(G(z, y), y.flip(0)))
    for wrong in (lambda: G(z, None), lambda: D(torch.randn(4, 1, 8, 8), None)):
        with pytest.raises(Unusable, match=r"y: .*int64"):
            wrong()


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_channels_last_goes_through(name, classes):
    spec = Spec(16, 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(spec)
    expected = G(z, y), D(G(z, y), y)
    seen = []
    for net in (G, D):
        net.to(memory_format=torch.channels_last)
        for part in net.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.register_forward_hook(lambda part, _, out: seen.append(out))
    fake = G(z, y)
    logits = D(fake, y)
    for out in (fake, *seen):
        assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close((fake, logits), expected)


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_autocast(name, classes):
    spec = Spec(8, 3, classes)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(spec)
    with torch.autocast("cpu", torch.bfloat16):
        fake = G(z, y)
        logits = D(fake, y)
        loss = F.softplus(logits).mean()
    assert fake.dtype == logits.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (*G.parameters(), *D.parameters()))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_penalty_matches_finite_differences(name):
    spec = Spec(8, 2, classes=3)
    _, D = build(CONFIGS[name], spec)
    D.double()
    x, y = torch.randn(4, 2, 8, 8, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2, 0])

    def penalty():
        (slope,) = torch.autograd.grad(D(x, y).sum(), x, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()

    parameters = list(D.parameters())
    grads = torch.autograd.grad(penalty(), parameters, allow_unused=True)
    way = [torch.randn_like(parameter) for parameter in parameters]
    exact = sum((g * w).sum() for g, w in zip(grads, way) if g is not None)

    def moved(by):
        with torch.no_grad():
            torch._foreach_add_(parameters, way, alpha=by)
        value = penalty().detach()
        with torch.no_grad():
            torch._foreach_add_(parameters, way, alpha=-by)
        return value

    torch.testing.assert_close((moved(1e-7) - moved(-1e-7)) / 2e-7, exact, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_lanes_merged_equal_lanes_apart(name):
    spec = Spec(8, 1, classes=3)
    G, D = build(CONFIGS[name], spec)
    z, y = batch(spec, 8)
    for net in (G, D):
        for part in net.modules():
            if isinstance(part, LaneBatchNorm):
                part.lane_batch = 4
    fake = torch.cat([G(a, b) for a, b in zip(z.split(4), y.split(4))])
    torch.testing.assert_close(G(z, y), fake)
    logits = torch.cat([D(a, b) for a, b in zip(fake.split(4), y.split(4))])
    torch.testing.assert_close(D(fake, y), logits)


def test_sngan_has_the_published_sizes_on_cifar10():
    """G and D: without classes 4.28 M and 1.05 M (mimicry); with ten 4.30 M and 1.06 M (StudioGAN)."""
    sizes = [[count(net) for net in build(SNGAN(width=256), Spec(32, 3, classes))] for classes in (0, 10)]
    assert sizes == [[4_276_739, 1_053_825], [4_304_387, 1_055_105]]


def test_dcgan_has_radfords_layers_at_64():
    """The usual one (latent 100, width 64) has 3,576,704 and 2,765,568; its 4x4 ends are linear here."""
    G, D = build(DCGAN(latent=100, spectral=False, batch_norm=True), Spec(64, 3))
    assert count(G) == 3_576_704 + 3  # a bias at the image
    assert count(D) == 2_765_568 + 64 + 1  # biases of the first and of the last layer


def test_initial_weights():
    G, _ = build(DCGAN(), Spec(16, 3))
    assert G.ups[1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert G.norms[0].weight.mean().item() == pytest.approx(1, abs=0.01)
    G, _ = build(SNGAN(width=32), Spec(16, 3))
    block, bound = G.blocks[0], (6 / (2 * 32 * 9)) ** 0.5
    assert block.conv2.weight.abs().max().item() == pytest.approx(bound * 2**0.5, rel=0.01)
    assert block.shortcut.weight.abs().max().item() == pytest.approx((6 / 64) ** 0.5, rel=0.01)
    assert not block.conv1.bias.any()


def test_one_strided_convolution_is_the_two_operations():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    up, down = UpConv(3, 4, 3, padding=1).double(), DownConv(3, 4, 3, padding=1).double()
    large = F.interpolate(x, scale_factor=2.0, mode="nearest")
    torch.testing.assert_close(up(x), F.conv2d(large, up.weight, up.bias, padding=1))
    torch.testing.assert_close(down(x), F.avg_pool2d(F.conv2d(x, down.weight, down.bias, padding=1), 2))


@pytest.mark.parametrize("config", [DCGAN(), SNGAN()])
@pytest.mark.parametrize(("wrong", "right"), [(28, 32), (4, 8), (0, 8), (24, 32), (20, 16), (100, 128)])
def test_resolutions_that_do_not_fit_are_refused(config, wrong, right):
    for refuse in (config.check, config.generator, config.discriminator):
        with pytest.raises(Unusable, match=f"resolution: .*not {wrong}; {right} would work"):
            refuse(Spec(wrong, 3))


def test_configs_are_told_apart_by_name_and_refuse_what_they_do_not_know():
    nets = TypeAdapter(Nets)
    assert nets.validate_python({"name": "sngan", "width": 8, "d_width": 4}) == SNGAN(width=8, d_width=4)
    assert nets.validate_python({"name": "dcgan"}) == DCGAN()
    for wrong in ({"name": "dcgan", "d_width": 4}, {"name": "sngan", "width": 0}, {"name": "biggan"}):
        with pytest.raises(ValidationError):
            nets.validate_python(wrong)
