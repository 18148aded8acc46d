"""Grouped convolutions and their gradients equal torch bit for bit, second derivatives up to rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paragan.nets.grouped_conv import GroupedConv, grouped_conv

CASES = {  # channels in, out, kernel, stride, padding, groups, bias
    "groups": (8, 12, 3, 1, 1, 4, True),
    "each channel": (6, 6, 3, 2, 1, 6, False),
    "to one pixel": (5, 5, 4, 1, 0, 5, False),
    "one group": (3, 4, 1, 1, 0, 1, True),
}
cases = pytest.mark.parametrize(("a", "b", "kernel", "stride", "padding", "groups", "bias"), CASES.values(), ids=CASES)


def inputs(a, b, kernel, groups, bias, dtype):
    gen = torch.Generator().manual_seed(0)
    shapes = [(2, a, 4, 4), (b, a // groups, kernel, kernel), *([(b,)] if bias else [])]
    return [torch.randn(shape, generator=gen, dtype=dtype).requires_grad_() for shape in shapes]


def gradients(conv, tensors, rest, twice):
    """Return the output and its gradients; with `twice` those of a gradient penalty, as in R1, after a leaky ReLU."""
    y = conv(*tensors, *([None] * (3 - len(tensors))), *rest)
    if not twice:
        return y, *torch.autograd.grad(y.square().sum(), tensors)
    h = F.leaky_relu(y, 0.2).square().sum()
    grads = torch.autograd.grad(h, tensors, create_graph=True)
    return y, *torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)


def torch_conv(x, weight, bias, stride, padding, groups):
    return F.conv2d(x, weight, bias, stride, padding, 1, groups)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases
def test_output_and_gradients_equal_torch_bit_for_bit(a, b, kernel, stride, padding, groups, bias, dtype, layout):
    tensors = inputs(a, b, kernel, groups, bias, dtype)
    tensors[:2] = [x.detach().contiguous(memory_format=layout).requires_grad_() for x in tensors[:2]]
    result, expected = (
        gradients(conv, tensors, (stride, padding, groups), False) for conv in (grouped_conv, torch_conv)
    )
    assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@cases
def test_second_derivative_equals_torch(a, b, kernel, stride, padding, groups, bias):
    tensors = inputs(a, b, kernel, groups, bias, torch.float64)
    result, expected = (
        gradients(conv, tensors, (stride, padding, groups), True) for conv in (grouped_conv, torch_conv)
    )
    for x, y in zip(result, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@cases
def test_both_derivatives_match_finite_differences(a, b, kernel, stride, padding, groups, bias):
    tensors = inputs(a, b, kernel, groups, bias, torch.float64)

    def conv(*tensors):
        return grouped_conv(*tensors, *([None] * (3 - len(tensors))), stride, padding, groups)

    assert torch.autograd.gradcheck(conv, tensors)
    assert torch.autograd.gradgradcheck(conv, tensors)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_tensors_get_no_gradient(frozen):
    tensors = inputs(4, 4, 3, 2, True, torch.float64)
    tensors[frozen].requires_grad_(False)
    moving = [x for i, x in enumerate(tensors) if i != frozen]
    pairs = []
    for conv in (grouped_conv, torch_conv):
        (first, *_) = torch.autograd.grad(conv(*tensors, 1, 1, 2).square().sum(), moving, create_graph=True)
        pairs.append((first, *torch.autograd.grad(first.square().sum(), moving, allow_unused=True)))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_autocast_equals_torch():
    torch.manual_seed(0)
    layer = GroupedConv(8, 8, 3, padding=1, groups=2)
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
        expected = torch.nn.Conv2d.forward(layer, x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected)
    variables = (x, *layer.parameters())
    grads = [torch.autograd.grad(y.float().square().sum(), variables) for y in (result, expected)]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(*grads, strict=True))


def test_groups_are_convolved_in_one_call():
    """Torch would convolve group after group."""

    class Counted(TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.convolutions += "convolution" in str(func)
            return func(*args, **(kwargs or {}))

    tensors = inputs(32, 32, 3, 32, False, torch.float32)
    with Counted() as counted:
        gradients(grouped_conv, tensors, (1, 1, 32), True)
    # itself; its gradients; of these, towards g twice, towards x and towards w; and what comes through y once more
    assert counted.convolutions == 7
