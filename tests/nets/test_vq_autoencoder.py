"""The autoencoder family: shapes, bottlenecks, gradients, independent rows, and what does not fit."""

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.nets import Nets, Spec, VQAutoencoder
from paragan.nets.memory_format import set_memory_format
from paragan.nets.spectral_norm import train_mode
from paragan.nets.vq_autoencoder import GaussianReconstruction, QuantizedReconstruction

SMALL = {"width": 4, "codes": 8, "code_dim": 3, "d_width": 4}
SPEC = Spec(16, 3)
QUANTIZERS = ["vq", "fsq", "kl"]


def build(spec=SPEC, **options):
    torch.manual_seed(0)
    config = VQAutoencoder(**(SMALL | options))
    return train_mode(config.generator(spec)), train_mode(config.discriminator(spec))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize(("resolution", "downsample", "blocks"), [(16, 2, 1), ("32x24", 3, 2), (20, 1, 1)])
def test_shapes_and_gradients(quantizer, resolution, downsample, blocks):
    spec = Spec(resolution, 3, classes=10)
    G, D = build(spec, quantizer=quantizer, downsample=downsample, blocks=blocks, d_layers=1)
    width, height = spec.size
    x = torch.rand(4, *spec.shape) * 2 - 1
    out = G(x, torch.zeros(4, dtype=torch.int64))
    assert out.images.shape == x.shape
    assert isinstance(out, GaussianReconstruction if quantizer == "kl" else QuantizedReconstruction)
    code = out[1]
    assert code.shape[-2:] == (height >> downsample, width >> downsample)
    loss = (out.images - x).abs().mean() + out[2] + D(out.images).logits.square().mean()
    loss.backward()
    for net in (G, D):
        for name, p in net.named_parameters():
            assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name  # noqa: PT018


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_rows_do_not_influence_each_other(quantizer):
    G, _ = build(quantizer=quantizer)
    G.double()
    G.quantizer.eval()  # no noise
    x = torch.rand(4, 3, 16, 16, dtype=torch.float64)
    rows = [G(row[None]) for row in x]
    together = G(x)
    for name in together._fields[:2]:
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(row, name) for row in rows]))
    torch.testing.assert_close(together[2], torch.stack([row[2] for row in rows]).mean())  # a mean over rows


@pytest.mark.parametrize("quantizer", ["vq", "fsq"])
def test_images_are_those_of_their_codes(quantizer):
    G, _ = build(quantizer=quantizer)
    out = G(torch.rand(2, 3, 16, 16))
    torch.testing.assert_close(G.decode(out.codes), out.images)


def test_last_layer_makes_the_images():
    G, _ = build()
    assert isinstance(G.last_layer, nn.Parameter)
    assert G.last_layer.shape == (3, 4, 3, 3)
    with torch.no_grad():
        G.last_layer.zero_()
    out = G(torch.rand(2, 3, 16, 16)).images
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_bf16_and_channels_last(quantizer):
    G, D = build(Spec(16, 1), quantizer=quantizer)
    x = torch.rand(2, 1, 16, 16)
    G.eval()
    expected = G(x).images
    for net in (G, D):
        set_memory_format(net, torch.channels_last)
    torch.testing.assert_close(G(x).images, expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        out = G(x)
        logits = D(out.images).logits
    assert out.images.dtype == out[2].dtype == logits.dtype == torch.float32
    (logits.mean() + out[2]).backward()


def test_input_of_g_is_the_image_and_only_the_gaussian_draws_numbers():
    x = torch.rand(2, 3, 16, 16)
    assert VQAutoencoder().conditioning_input(Batch(x, None, LaneRng(0, 0, (0,), 2))) is x
    for quantizer in QUANTIZERS:
        G, _ = build(quantizer=quantizer)
        draws = not torch.equal(G(x).images, G(x).images)
        assert draws == VQAutoencoder(quantizer=quantizer).uses_torch_rng


def test_images_are_halved_as_advised():
    with advises("nets.downsample=3: 20 x 20 can be halved 2 times. Use nets.downsample=2 or data.resolution=16"):
        VQAutoencoder(downsample=3).check(Spec(20, 3))
    VQAutoencoder(downsample=2).check(Spec(20, 3))
    VQAutoencoder(downsample=3).check(Spec(16, 3))
    with pytest.raises(UsageError, match=r"Use data\.resolution=24x20"):
        VQAutoencoder(d_layers=1).check(Spec("25x19", 3))
    VQAutoencoder(d_layers=1).check(Spec("24x20", 3))


def test_patches_fit_as_advised():
    with advises(
        "nets.d_layers=3: in 16 x 16 no patch fits at scale 1 of D. Use nets.d_layers=2 or data.resolution=24"
    ):
        VQAutoencoder(d_layers=3).check(Spec(16, 3))
    VQAutoencoder(d_layers=2).check(Spec(16, 3))
    VQAutoencoder(d_layers=3).check(Spec(24, 3))
    with pytest.raises(UsageError, match=r"Use nets\.d_layers=1 and nets\.d_scales=1 or data\.resolution=48"):
        VQAutoencoder(d_layers=2, d_scales=3).discriminator(Spec(16, 3))
    VQAutoencoder(d_layers=1, d_scales=1).check(Spec(16, 3))


def test_codes_are_counted_as_advised():
    levels = (1 << 20,) * 4
    with advises(
        f"nets.levels={list(levels)}: are 1.2e+24 codes, and a code is an int64. Use fewer or smaller levels, such as "
        "nets.levels=[8,8,8]"
    ):
        VQAutoencoder(quantizer="fsq", levels=levels).check(Spec(32, 3))
    VQAutoencoder(quantizer="fsq", levels=(8, 8, 8)).check(Spec(32, 3))


def test_default_codes_of_cifar10_are_8_by_8():
    G = VQAutoencoder().generator(Spec(32, 3))
    assert G(torch.zeros(1, 3, 32, 32)).codes.shape == (1, 8, 8)


def test_config_by_name():
    config = TypeAdapter(Nets).validate_python({"name": "vq-autoencoder", "quantizer": "fsq", "levels": [5, 5]})
    assert config == VQAutoencoder(quantizer="fsq", levels=(5, 5))
