import math

import pytest
import torch
import torch.nn.functional as F

from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import inception as network
from paragan.eval import pixels


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return network.Inception().eval()


def test_number_of_parameters(net):
    assert sum(p.numel() for p in net.parameters()) == 23_850_960
    assert sum(p.numel() for p in net.fc.parameters()) == 2048 * 1008 + 1008


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Conv2d_1a_3x3.conv.weight", (32, 3, 3, 3)),
        ("Conv2d_4a_3x3.bn.running_var", (192,)),
        ("Mixed_5b.branch5x5_2.conv.weight", (64, 48, 5, 5)),
        ("Mixed_5d.branch_pool.conv.weight", (64, 288, 1, 1)),
        ("Mixed_6a.branch3x3dbl_3.conv.weight", (96, 96, 3, 3)),
        ("Mixed_6b.branch7x7dbl_2.conv.weight", (128, 128, 7, 1)),
        ("Mixed_6e.branch7x7_2.conv.weight", (192, 192, 1, 7)),
        ("Mixed_7a.branch7x7x3_4.conv.weight", (192, 192, 3, 3)),
        ("Mixed_7b.branch3x3dbl_3a.conv.weight", (384, 384, 1, 3)),
        ("Mixed_7c.branch_pool.bn.bias", (192,)),
        ("fc.weight", (1008, 2048)),
        ("fc.bias", (1008,)),
    ],
)
def test_names_and_shapes_equal_the_file(net, name, shape):
    assert tuple(net.state_dict()[name].shape) == shape


def test_features_and_logits_without_bias(net):
    with torch.no_grad():
        features = net(torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8))
        assert features.shape == (2, 2048)
        assert net.logits(features.double()).dtype == torch.float64
        torch.testing.assert_close(net.logits(features), net.fc(features) - net.fc.bias)


def test_grey_is_repeated_and_four_channels_raise():
    grey = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(network.three_channels(grey), grey.repeat(1, 3, 1, 1))
    four = torch.zeros(2, 4, 8, 8, dtype=torch.uint8)
    with advises("space=inception: needs images of 1 or 3 channels, got 4. Use pixels"):
        network.three_channels(four)
    assert pixels(8, 4)(four).shape == (2, 256)


def plain(layer, x, padding=0):
    return F.relu(layer.bn(F.conv2d(x, layer.conv.weight, padding=padding)))


def test_last_block_has_a_max_pool_and_two_forks(net):
    block, x = net.Mixed_7c, torch.randn(1, 2048, 8, 8)
    with torch.no_grad():
        a = plain(block.branch3x3_1, x)
        b = plain(block.branch3x3dbl_2, plain(block.branch3x3dbl_1, x), 1)
        expected = [
            plain(block.branch1x1, x),
            plain(block.branch3x3_2a, a, (0, 1)),
            plain(block.branch3x3_2b, a, (1, 0)),
            plain(block.branch3x3dbl_3a, b, (0, 1)),
            plain(block.branch3x3dbl_3b, b, (1, 0)),
            plain(block.branch_pool, F.max_pool2d(x, 3, 1, 1)),
        ]
        torch.testing.assert_close(block(x), torch.cat(expected, 1))


def test_average_pools_exclude_padding():
    constant = torch.full((1, 2, 5, 5), 3.0)
    assert torch.equal(network.AVG_POOL(constant), constant)
    pools = {name: block[-1][0] for name, block in network.BLOCKS.items()}
    assert all(pools[name] is network.AVG_POOL for name in pools if name[-2:] in ("5b", "5c", "5d", "6b", "6e", "7b"))
    assert pools["Mixed_7c"] is network.MAX_POOL


@pytest.mark.parametrize(("size", "side"), [(8, 19), (19, 8), (7, 7)])
def test_resizes_like_tensorflow_1(size, side):
    image = torch.rand(size, size)
    expected = torch.empty(side, side)
    for i in range(side):
        for j in range(side):
            y, x = i * size / side, j * size / side
            top, left = math.floor(y), math.floor(x)
            low, right = min(top + 1, size - 1), min(left + 1, size - 1)
            above = image[top, left] * (1 - (x - left)) + image[top, right] * (x - left)
            below = image[low, left] * (1 - (x - left)) + image[low, right] * (x - left)
            expected[i, j] = above * (1 - (y - top)) + below * (y - top)
    torch.testing.assert_close(network.resize_like_tf1(image[None, None], side)[0, 0], expected)


def test_other_weights_raise():
    with pytest.raises(UsageError, match=r"whose names differ: Conv2d_1a_3x3\.conv\.weight"):
        network.load_inception({"conv1.weight": torch.zeros(1)})
    with pytest.raises(UsageError, match=r"not the weights of this network: .*fc\.bias"):
        network.load_inception({"fc.bias": torch.zeros(1000)})
