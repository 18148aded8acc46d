"""Lane batch norm: groups equal slices, moments equal their mean, and one group equals torch's layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.nets.lane_batch_norm import (
    ConditionalBatchNorm2d,
    LaneBatchNorm,
    LaneBatchNorm1d,
    LaneBatchNorm2d,
    LaneBatchNorm3d,
    LinearConditionalBatchNorm2d,
    convert_batch_norm,
)

KINDS = [
    (LaneBatchNorm1d, nn.BatchNorm1d, (12, 3)),
    (LaneBatchNorm1d, nn.BatchNorm1d, (12, 3, 5)),
    (LaneBatchNorm2d, nn.BatchNorm2d, (12, 3, 4, 5)),
    (LaneBatchNorm3d, nn.BatchNorm3d, (12, 3, 2, 3, 2)),
]


def pair(lane, plain, lane_batch=None):
    torch.manual_seed(0)
    norm = lane(3)
    reference = plain(3)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    norm.load_state_dict(reference.state_dict())
    norm.lane_batch = lane_batch
    return norm, reference


@pytest.mark.parametrize(("lane", "plain", "shape"), KINDS)
def test_groups_equal_a_loop_over_slices(lane, plain, shape):
    norm, reference = pair(lane, plain, lane_batch=4)
    x, weight = torch.randn(shape) * 3 + 1, torch.randn(shape)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = norm(a)
    expected = torch.cat([reference(part) for part in b.split(4)])
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(a.grad, b.grad)
    for p, q in zip(norm.parameters(), reference.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lane_batch", [None, 12])
def test_one_group_is_torch_bit_for_bit(lane_batch, dtype):
    norm, reference = pair(LaneBatchNorm2d, nn.BatchNorm2d, lane_batch)
    x = torch.randn(12, 3, 4, 4).to(dtype)
    assert torch.equal(norm(x), F.batch_norm(x, None, None, reference.weight, reference.bias, training=True))


def test_eval_uses_running_statistics_for_any_lanes():
    norm, reference = pair(LaneBatchNorm2d, nn.BatchNorm2d, lane_batch=5)
    x = torch.randn(12, 3, 4, 4)
    reference(x)
    norm.load_state_dict(reference.state_dict())
    assert torch.equal(norm.eval()(x), reference.eval()(x))


def test_forward_collects_moments_only_while_tracking():
    norm = LaneBatchNorm2d(3)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(6, 3, 4, 4)
    norm(x)
    norm.tracking = True
    norm.eval()(x)
    assert not norm.moments.any()
    norm.train()(x)
    assert norm.moments.any()
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    assert "moments" not in before


def test_apply_moments_applies_the_mean_over_groups_once():
    norm, _ = pair(LaneBatchNorm2d, nn.BatchNorm2d, lane_batch=4)
    norm.tracking = True
    x = torch.randn(12, 3, 4, 4, dtype=torch.float32) * 2 + 1
    norm(x[:4])  # lanes one by one, or merged: the same moments
    norm(x[4:])
    mean = torch.stack([part.mean((0, 2, 3)) for part in x.split(4)]).mean(0)
    var = torch.stack([part.var((0, 2, 3)) for part in x.split(4)]).mean(0)
    norm.apply_moments()
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * var)
    assert norm.num_batches_tracked == 1
    assert not norm.moments.any()


def test_apply_moments_of_one_group_equals_torch():
    norm, reference = pair(LaneBatchNorm2d, nn.BatchNorm2d)
    norm.tracking = True
    for _ in range(5):
        x = torch.randn(12, 3, 4, 4)
        norm(x), reference(x), norm.apply_moments()
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)


def test_apply_moments_without_moments_is_a_no_op():
    for momentum in (0.1, None):
        norm = LaneBatchNorm2d(3, momentum=momentum)
        before = copy.deepcopy(norm.state_dict())
        norm.apply_moments()
        assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


def test_momentum_none_is_the_cumulative_average():
    norm = LaneBatchNorm1d(3, momentum=None)
    norm.tracking, norm.lane_batch = True, 4
    steps = torch.randn(5, 8, 3)
    for x in steps:
        norm(x)
        norm.apply_moments()
    torch.testing.assert_close(norm.running_mean, steps.mean((0, 1)))


def test_moments_may_be_a_view_of_a_shared_vector():
    norm = LaneBatchNorm2d(3)
    flat = torch.zeros(20)
    norm.moments, norm.tracking = flat[4:11], True
    norm(torch.randn(6, 3, 2, 2))
    assert flat[10] == 1
    norm.apply_moments()
    assert not flat.any()


def test_lanes_must_divide_the_batch():
    norm = LaneBatchNorm2d(3)
    norm.lane_batch = 8
    for images, advised in ((20, 16), (3, 8)):
        with advises(f"lane_batch=8: does not divide a batch of {images} images. Use a batch of {advised}"):
            norm(torch.randn(images, 3, 2, 2))
        assert norm(torch.randn(advised, 3, 2, 2)).shape[0] == advised


@pytest.mark.parametrize("layer", [LaneBatchNorm2d(3), ConditionalBatchNorm2d(3, 5)])
def test_memory_format_and_autocast_dtype_are_preserved(layer):
    getattr(layer, "norm", layer).lane_batch = 2
    y = torch.arange(6) % 5
    x = torch.randn(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            out = layer(x.to(dtype), y)
            assert out.dtype == dtype
            assert out.is_contiguous(memory_format=torch.channels_last)


def test_bf16_statistics_are_float32():
    norm = LaneBatchNorm2d(3, affine=False)
    norm.tracking = True
    x = (torch.randn(64, 3, 8, 8) + 10).bfloat16()
    norm(x)
    torch.testing.assert_close(norm.moments[:3], x.float().mean((0, 2, 3)))
    torch.testing.assert_close(norm.moments[3:6], x.float().var((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_two_forwards_before_one_backward():
    norm = LaneBatchNorm2d(3)
    norm.tracking, norm.lane_batch = True, 2
    (norm(torch.randn(4, 3, 2, 2)) * norm(torch.randn(4, 3, 2, 2))).sum().backward()


@pytest.mark.parametrize("conditional", [False, True])
def test_double_backward(conditional):
    torch.manual_seed(0)
    norm = ConditionalBatchNorm2d(2, 3) if conditional else LaneBatchNorm2d(2)
    getattr(norm, "norm", norm).lane_batch = 3
    norm.double()
    y = torch.tensor([0, 1, 2, 0, 0, 1])
    x = torch.randn(6, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x, y), x)
    assert torch.autograd.gradgradcheck(lambda x: norm(x, y), x)


def test_conditional_is_a_gain_and_bias_per_class():
    torch.manual_seed(0)
    norm = ConditionalBatchNorm2d(3, 5)
    nn.init.normal_(norm.gain.weight), nn.init.normal_(norm.bias.weight)
    x, y = torch.randn(8, 3, 4, 4), torch.randint(5, (8,))
    for lane_batch, training in ((None, True), (4, True), (4, False)):
        norm.norm.lane_batch = lane_batch
        norm.train(training)
        groups = x.split(lane_batch or 8) if training else [x]
        plain = torch.cat([nn.BatchNorm2d(3, affine=False).train(training)(part) for part in groups])
        expected = norm.gain(y)[:, :, None, None] * plain + norm.bias(y)[:, :, None, None]
        torch.testing.assert_close(norm(x, y), expected)
    with pytest.raises(UsageError, match="y=None: "):
        norm(x, None)


def test_linear_conditional_gains_start_at_one_and_biases_at_zero():
    torch.manual_seed(0)
    norm = LinearConditionalBatchNorm2d(3, 5, lambda layer: layer)
    norm.norm.lane_batch = 4
    x, c = torch.randn(8, 3, 4, 4), torch.randn(8, 5)
    plain = torch.cat([nn.BatchNorm2d(3, affine=False)(part) for part in x.split(4)])
    gain, bias = (1 + c @ norm.gain.weight.T), c @ norm.bias.weight.T
    torch.testing.assert_close(norm(x, c), gain[:, :, None, None] * plain + bias[:, :, None, None])


class CustomBatchNorm(nn.BatchNorm2d):
    pass


def test_convert_preserves_objects_and_names_and_returns_the_unconverted():
    plain = [nn.BatchNorm1d(2), nn.BatchNorm2d(3), nn.BatchNorm3d(4), nn.SyncBatchNorm(5)]
    inner = nn.Sequential(CustomBatchNorm(3), nn.LazyBatchNorm2d(), nn.GroupNorm(1, 3), nn.BatchNorm2d(6))
    net = nn.Sequential(*plain, nn.InstanceNorm2d(3), inner, LaneBatchNorm2d(3))
    tensors = [*net.parameters(), *net.buffers()]
    keys = list(net.state_dict())
    assert convert_batch_norm(net) == ["5.0", "5.1"]
    kinds = [type(net[i]) for i in range(4)]
    assert kinds == [LaneBatchNorm1d, LaneBatchNorm2d, LaneBatchNorm3d, LaneBatchNorm]
    assert isinstance(net[1], nn.BatchNorm2d)
    assert type(net[4]) is nn.InstanceNorm2d
    assert type(net[5][0]) is CustomBatchNorm
    assert list(net.state_dict()) == keys
    now = {id(t) for t in [*net.parameters(), *net.buffers()]}
    assert {id(t) for t in tensors} <= now
    assert convert_batch_norm(net) == ["5.0", "5.1"]


def test_converted_network_equals_the_original_lane_by_lane():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5))
    twin = copy.deepcopy(net)
    assert convert_batch_norm(twin) == []
    for part in twin.modules():
        if isinstance(part, LaneBatchNorm):
            part.lane_batch = 4
    x = torch.randn(8, 3, 4, 4)
    torch.testing.assert_close(twin(x), torch.cat([net(part) for part in x.split(4)]))


def test_without_running_statistics_eval_uses_the_batch():
    net = nn.BatchNorm2d(3, track_running_stats=False)
    x = torch.randn(4, 3, 2, 2)
    expected = net.eval()(x)
    assert convert_batch_norm(net) == []
    assert torch.equal(net(x), expected)
    net.apply_moments()
