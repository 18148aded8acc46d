"""R3GAN's networks: shapes at every resolution, gradients of all parameters, resampling, and initial weights."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.nets import R3GAN, Nets, Spec
from paragan.nets.r3gan import BinomialDownsample, BinomialUpsample, R3GANBlock
from paragan.nets.spectral_norm import train_mode

SMALL = R3GAN(width=32, latent=6, group=4)


def build(spec, config=SMALL):
    torch.manual_seed(0)
    return train_mode(config.generator(spec)), train_mode(config.discriminator(spec))


def randomize_last_layers(*nets):
    """Make the last layers of blocks non-zero, which are initialized to 0."""
    for net in nets:
        for part in net.modules():
            if isinstance(part, R3GANBlock):
                nn.init.normal_(part.narrow.weight, 0, 0.1)


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize("resolution", [8, 16, 64])
def test_shapes_and_gradients(resolution, classes):
    G, D = build(Spec(resolution, 3, classes))
    randomize_last_layers(G, D)
    z, y = torch.randn(12, 6), torch.arange(12) % classes if classes else None
    fake = G(z, y)
    assert G.latent == 6
    assert fake.shape == (12, 3, resolution, resolution)
    logits = D(fake, y)
    assert logits.shape == (12,)
    (logits * torch.randn(12)).sum().backward()
    for net in (G, D):
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name  # noqa: PT018
            assert parameter.grad.any() or name == "head.linear.bias", name


@pytest.mark.parametrize("resolution", [256, 1024])
def test_large_images(resolution):
    spec = Spec(resolution, 1)
    G, D = build(spec, R3GAN(width=64, latent=4, blocks=1, group=4))
    with torch.no_grad():
        assert D(G(torch.randn(1, 4))).shape == (1,)


def test_labels_are_ignored_without_classes_and_required_otherwise():
    z, y = torch.randn(4, 6), torch.arange(4)
    G, D = build(Spec(8, 1))
    assert torch.equal(G(z, y), G(z, None))
    assert torch.equal(D(G(z), y), D(G(z), None))
    G, D = build(Spec(8, 1, classes=4))
    assert not torch.equal(G(z, y), G(z, y.flip(0)))
    assert not torch.equal(D(G(z, y), y), D(G(z, y), y.flip(0)))
    for wrong in (lambda: G(z, None), lambda: D(torch.randn(4, 1, 8, 8), None)):
        with advises("y=None: a conditional network needs labels. Use an int64 tensor [N]"):
            wrong()


def test_block_starts_as_the_identity_and_equals_the_paper():
    x = torch.randn(2, 32, 5, 5)
    block = R3GANBlock(32, 2, 4, 8)
    assert torch.equal(block(x), x)
    randomize_last_layers(block)
    h = F.leaky_relu(F.conv2d(x, block.widen.weight, block.widen.bias), 0.2)
    parts = [
        F.conv2d(h[:, 4 * i : 4 * i + 4], block.middle.weight[4 * i : 4 * i + 4], padding=1) for i in range(16)
    ]  # each group alone
    h = F.leaky_relu(torch.cat(parts, 1) + block.middle.bias[:, None, None], 0.2)
    torch.testing.assert_close(block(x), x + F.conv2d(h, block.narrow.weight))


def test_initial_weights_shrink_with_the_number_of_blocks():
    few, many = R3GANBlock(256, 2, 16, 1), R3GANBlock(256, 2, 16, 16)
    gain = (2 / 1.04) ** 0.5
    assert few.widen.weight.std().item() == pytest.approx(gain / 16, rel=0.02)
    assert few.middle.weight.std().item() == pytest.approx(gain / 12, rel=0.02)
    assert (many.widen.weight.std() / few.widen.weight.std()).item() == pytest.approx(0.5, rel=0.02)


def test_resampling_is_smoothing():
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    smooth = (row[:, None] * row / 16).expand(3, 1, 3, 3)
    torch.testing.assert_close(BinomialDownsample()(x), F.conv2d(x, smooth, padding=1, groups=3)[:, :, ::2, ::2])
    spread = torch.zeros(2, 3, 12, 12, dtype=torch.float64)
    spread[:, :, ::2, ::2] = x
    torch.testing.assert_close(BinomialUpsample()(x), F.conv2d(spread, 4 * smooth, padding=1, groups=3))


def test_bf16_and_channels_last():
    G, D = build(Spec(16, 3, 3))
    randomize_last_layers(G, D)
    z, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    plain = D(G(z, y), y)
    for net in (G, D):
        net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(D(G(z, y), y), plain, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        fake = G(z, y)
        logits = D(fake, y)
    assert fake.dtype == logits.dtype == torch.float32
    logits.sum().backward()


def test_gradient_penalty_matches_finite_differences():
    _, D = build(Spec(8, 1))
    randomize_last_layers(D)
    D.double()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()

    weight = D.body[0].widen.weight
    (grad,) = torch.autograd.grad(penalty(), weight)
    direction = torch.randn_like(weight)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * 1e-6)
        values.append(penalty().detach())
        with torch.no_grad():
            weight.add_(direction, alpha=-sign * 1e-6)
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, (grad * direction).sum(), rtol=1e-4, atol=1e-8)


def test_widths_fall_above_32_px():
    assert R3GAN().channels(Spec(32, 3)) == [768] * 4
    assert R3GAN().channels(Spec(256, 3)) == [768] * 4 + [384, 192, 96]
    assert R3GAN().channels(Spec(1024, 3))[-1] == 24


def test_sizes_for_cifar10():
    """Per block 2 * 768 * 1536 weights of 1x1, 1536 * 16 * 9 of 3x3, 2 * 1536 biases; eight such, and the ends."""
    blocks = 8 * (2 * 768 * 1536 + 1536 * 16 * 9 + 2 * 1536)
    with torch.device("meta"):
        G, D = R3GAN().generator(Spec(32, 3)), R3GAN().discriminator(Spec(32, 3))
    assert count(G) == blocks + 64 * 768 + 768 * 16 + 768 * 3 == 20_732_160
    assert count(D) == blocks + 3 * 768 + 768 * 16 + 768 + 1 == 20_683_777


@pytest.mark.parametrize(
    ("config", "spec", "words"),
    [
        (SMALL, Spec(25, 3), "resolution=25: .*Use 24 or 28"),
        (SMALL, Spec(2048, 3), "resolution=2048: .*halve 1 to 8 times.*Use 1792"),
        (R3GAN(width=24), Spec(256, 3), r"nets\.width=24: .*3 x 2 channels.*Use 64"),
        (R3GAN(width=20), Spec(256, 3), r"2.5 x 2 channels.*Use 64"),
    ],
)
def test_sizes_that_do_not_fit_raise_with_a_remedy(config, spec, words):
    for check in (config.check, config.generator, config.discriminator):
        with pytest.raises(UsageError, match=words):
            check(spec)


def test_widths_divide_as_advised():
    with advises(
        "nets.width=100: at 32 px its blocks have 100 x 2 channels, which do not divide into groups of 16. Use 96"
    ):
        R3GAN(width=100).check(Spec(32, 3))
    R3GAN(width=96).check(Spec(32, 3))


def test_config_by_name():
    assert TypeAdapter(Nets).validate_python({"name": "r3gan", "width": 32}) == R3GAN(width=32)
