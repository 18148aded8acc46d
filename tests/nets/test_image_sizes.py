"""Images that are not square, and sides that are no power of two: every family makes them, or names sizes that work."""

import re

import pytest
import torch

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.core.schema import from_dict, to_dict
from paragan.core.types import DiscriminatorOutput
from paragan.nets import DCGAN, R3GAN, SAGAN, SNGAN, BigGAN, BigGANDeep, ContraGAN, Spec, StyleGAN2
from paragan.nets.attention import SelfAttention, attention_resolution
from paragan.nets.spec import check_size, num_halvings, start_grid

FAMILIES = (
    DCGAN(width=4, latent=8),
    SNGAN(width=4, latent=8),
    SAGAN(width=8, latent=8),
    BigGAN(width=8, latent=60, shared=4),
    BigGANDeep(width=8, latent=8, shared=4),
    ContraGAN(width=8, latent=60, shared=4),
    StyleGAN2(channel_base=2048, channel_max=32, latent=8, style=8, mapping_layers=1),
    R3GAN(width=32, latent=8, group=4, blocks=1),
)
RANGES = ((1, None), (1, 8), (3, 8))  # halvings of all families


@pytest.mark.slow(after=16)
@pytest.mark.parametrize("nets", FAMILIES, ids=lambda nets: nets.name)
@pytest.mark.parametrize("resolution", [48, "64x32", "32x64", "96x64"])
def test_every_family_makes_and_judges_such_images(nets, resolution):
    spec = Spec(resolution, 3, 4)
    size = ImageSize.of(resolution)
    torch.manual_seed(0)
    g = nets.generator(spec)
    d = nets.discriminator(spec)
    y = torch.tensor([0, 3])
    images = g(torch.randn(2, nets.latent), y)
    assert images.shape == (2, 3, size.height, size.width)
    out = d(images, y)
    logits = out.logits if isinstance(out, DiscriminatorOutput) else out
    assert logits.shape == (2,)
    logits.sum().backward()
    grads = [p.grad for net in (g, d) for p in net.parameters()]
    assert all(grad is None or torch.isfinite(grad).all() for grad in grads)
    with_attention = [m for net in (g, d) for m in net.modules() if isinstance(m, SelfAttention)]
    assert len(with_attention) == (2 if hasattr(nets, "attention") else 0)


@pytest.mark.parametrize("nets", FAMILIES[:2] + FAMILIES[-1:], ids=lambda nets: nets.name)
def test_families_without_attention_make_100_and_28(nets):
    for resolution, grid in ((100, (25, 25)), (28, (7, 7)), ("20x12", (6, 10))):
        spec = Spec(resolution, 1)
        assert start_grid(spec.size) == grid
        assert nets.generator(spec)(torch.randn(1, nets.latent)).shape[2:] == (spec.size.height, spec.size.width)


def test_powers_of_two_start_at_4_by_4():
    for halvings in range(1, 12):
        size = ImageSize.of(4 << halvings)
        assert num_halvings(size) == halvings
        assert start_grid(size) == (4, 4)
    assert start_grid(ImageSize.of("256x128")) == (4, 8)  # height, width


def refusal(resolution, least, most) -> str:
    """The message that refuses a size, or "" if it is not refused."""
    try:
        check_size(Spec(resolution, 3), least, most)
    except UsageError as error:
        return str(error)
    return ""


def test_the_advice_of_a_refusal_works():
    """On all squares to 300 and many others, some far beyond what networks have."""
    others = [f"{w}x{h}" for w in (7, 31, 50, 96, 99, 130, 640, 1000, 5000) for h in (5, 30, 64, 98, 255, 1080, 4096)]
    num_refused = 0
    for resolution in [*range(1, 300), 500, 1000, 2000, 4000, 10**6, *others]:
        for least, most in RANGES:
            if not (message := refusal(resolution, least, most)):
                continue
            num_refused += 1
            assert message.startswith(f"data.resolution={resolution}: ")
            advice = re.search(r"Use (\S+)(?: or (\S+))?$", message)
            assert advice, message
            assert not any(refusal(other, least, most) for other in advice.groups() if other), message
    assert num_refused > 300


def test_a_refusal_says_which_side_is_which():
    message = refusal("250x130", 1, None)
    assert message.startswith("data.resolution=250x130: 250 wide, 130 high can be halved once, to 125 wide, 65 high; ")
    assert message.endswith("Use 256x128 or 224x128")


def test_attention_is_placed_by_the_short_side():
    assert attention_resolution(None, Spec("256x128", 3)) == 64
    assert attention_resolution(None, Spec(96, 3)) == 48
    with pytest.raises(UsageError, match=r"nets.attention=32: must be 48 or 24 or 12 .*Use 48"):
        SAGAN(attention=32).check(Spec(96, 3))
    SAGAN(attention=24).check(Spec(96, 3))


def test_the_record_of_a_square_is_what_it_was():
    assert to_dict(Spec(64, 3, 10)) == {
        "resolution": 64,
        "channels": 3,
        "classes": 10,
        "array_shape": [],
        "fields": {},
        "main_field": "",
        "sample_rate": 0,
        "image_shape": [],
    }
    assert Spec("64x64", 3) == Spec(64, 3)
    for spec in (Spec(64, 3, 10), Spec("256x128", 4), Spec(0, 0, 2, (5, 2))):
        assert from_dict(Spec, to_dict(spec)) == spec
