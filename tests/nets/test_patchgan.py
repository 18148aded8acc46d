"""PatchGAN: layers and patches of the paper, scales, features, and rows that do not influence each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paragan.nets.patchgan import PatchDiscriminator, multi_scale_discriminator, smallest_image
from paragan.nets.spectral_norm import has_spectral_norm, train_mode


def build(make, *args, **options):
    torch.manual_seed(0)
    return train_mode(make(*args, **options)).double()


def test_layers_are_those_of_the_paper():
    D, x = build(PatchDiscriminator, 3, 4, 3), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    h, features = x, []
    convs = [layer for layer in D.modules() if isinstance(layer, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [4, 8, 16, 32, 1]
    for conv, stride in zip(convs, (2, 2, 2, 1, 1)):
        h = F.conv2d(h, conv.weight, conv.bias, stride, padding=1)
        if conv is not convs[-1]:
            h = F.leaky_relu(h, 0.2)
            features.append(h)
    out = D(x, None)
    torch.testing.assert_close(out.logits, h.flatten(1))
    torch.testing.assert_close(out.features, tuple(features))
    assert out.logits.shape == (2, 36)


@pytest.mark.parametrize(("layers", "side"), [(1, 16), (2, 34), (3, 70)])
def test_a_patch_has_as_many_pixels_as_the_paper_says(layers, side):
    D = build(PatchDiscriminator, 1, 2, layers)
    x = torch.zeros(1, 1, 128, 128, dtype=torch.float64, requires_grad=True)
    logits = D(x).logits
    middle = logits.shape[1] // 2 + int(logits.shape[1] ** 0.5) // 2
    (grad,) = torch.autograd.grad(logits[0, middle], x)
    rows = grad[0, 0].abs().sum(1).nonzero().flatten()
    assert rows.max() - rows.min() + 1 == side


def test_scales_see_averaged_images():
    D, x = build(multi_scale_discriminator, 3, 3, 4, 1), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    out, expected, features = D(x, None), [], []
    for part in D.discriminators:
        single = PatchDiscriminator(3, 4, 1).double()
        single.load_state_dict(part.state_dict())
        expected.append(single(x))
        x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
    assert out.patches == tuple(e.logits.shape[1] for e in expected) == (14 * 14, 6 * 6, 2 * 2)
    torch.testing.assert_close(out.logits, torch.cat([e.logits for e in expected], 1))
    features = tuple(f for e in expected for f in e.features)
    torch.testing.assert_close(out.features, features)


@pytest.mark.parametrize("norm", ["none", "spectral", "group"])
def test_rows_do_not_influence_each_other_and_all_parameters_learn(norm):
    D, x = build(multi_scale_discriminator, 3, 2, 8, 2, norm), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert has_spectral_norm(D) == (norm == "spectral")
    together = D(x).logits
    torch.testing.assert_close(together, torch.cat([D(row[None]).logits for row in x]))
    together.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in D.parameters())


def test_autocast_and_memory_format_change_no_dtype_and_no_value():
    D, x = build(multi_scale_discriminator, 1, 2, 8, 2).float(), torch.randn(2, 1, 32, 32)
    expected = D(x)
    D.to(memory_format=torch.channels_last)
    torch.testing.assert_close(D(x).logits, expected.logits, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert D(x).logits.dtype == torch.float32


@pytest.mark.parametrize(("layers", "scales"), [(1, 1), (2, 1), (3, 2)])
def test_smallest_image_has_a_patch_at_every_scale(layers, scales):
    D = build(multi_scale_discriminator, 1, scales, 2, layers)
    side = smallest_image(layers, scales)
    assert min(D(torch.zeros(1, 1, side, side, dtype=torch.float64)).patches) >= 1
    with pytest.raises(RuntimeError, match=r"[Ss]ize"):
        D(torch.zeros(1, 1, side // 2, side // 2, dtype=torch.float64))
