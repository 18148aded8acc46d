"""The Inception network of 2015-12-05, as the FID and the Inception score use it.

Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision" (arXiv 1512.00567), in the
form that Heusel et al. 2017 (arXiv 1706.08500) scored with. It departs from the Inception v3 of torchvision
in four places: 1008 classes; average pools that leave their padding out of the mean; a *max* pool in the last
block; and inputs resized like TensorFlow 1 did. The weights are no part of this package (see
`features.inception_2015`).

The network is the table below. A step is a pool, or convolutions that stand side by side; a branch is a row
of steps; a block concatenates its branches. Parameters are named as in pytorch-fid's file, whose names are
torchvision's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import UsageError

INPUT_SIDE = 299  # pixels, the resolution the network was trained at
NUM_FEATURES = 2048
NUM_LOGITS = 1008
# 21,785,568 (convolutions without bias, and the scale and shift of their batch norms) + 1008 x 2048 + 1008.
NUM_PARAMETERS = 23_850_960


class ConvSpec(NamedTuple):
    """A convolution without bias, its batch norm, a ReLU. `padding` in TensorFlow's words."""

    name: str
    out: int
    kernel: int | tuple[int, int] = 1
    stride: int = 1
    padding: str = "same"


Pool = Callable[[Tensor], Tensor]
Step = Pool | tuple[ConvSpec, ...]
Branch = list[Step]

AVG_POOL: Pool = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
MAX_POOL: Pool = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
MAX_POOL_STRIDE2: Pool = partial(F.max_pool2d, kernel_size=3, stride=2)
WIDE, TALL = (1, 7), (7, 1)


def conv_step(name: str, out: int, kernel: int | tuple[int, int] = 1) -> tuple[ConvSpec, ...]:
    """A step of one convolution; two such steps added stand side by side."""
    return (ConvSpec(name, out, kernel),)


def stride2_conv_step(name: str, out: int) -> tuple[ConvSpec, ...]:
    return (ConvSpec(name, out, 3, 2, "valid"),)


def block_a(pool: int) -> list[Branch]:
    return [
        [conv_step("branch1x1", 64)],
        [conv_step("branch5x5_1", 48), conv_step("branch5x5_2", 64, 5)],
        [conv_step("branch3x3dbl_1", 64), conv_step("branch3x3dbl_2", 96, 3), conv_step("branch3x3dbl_3", 96, 3)],
        [AVG_POOL, conv_step("branch_pool", pool)],
    ]


def block_b() -> list[Branch]:
    return [
        [stride2_conv_step("branch3x3", 384)],
        [conv_step("branch3x3dbl_1", 64), conv_step("branch3x3dbl_2", 96, 3), stride2_conv_step("branch3x3dbl_3", 96)],
        [MAX_POOL_STRIDE2],
    ]


def block_c(n: int) -> list[Branch]:
    return [
        [conv_step("branch1x1", 192)],
        [conv_step("branch7x7_1", n), conv_step("branch7x7_2", n, WIDE), conv_step("branch7x7_3", 192, TALL)],
        [
            conv_step("branch7x7dbl_1", n),
            conv_step("branch7x7dbl_2", n, TALL),
            conv_step("branch7x7dbl_3", n, WIDE),
            conv_step("branch7x7dbl_4", n, TALL),
            conv_step("branch7x7dbl_5", 192, WIDE),
        ],
        [AVG_POOL, conv_step("branch_pool", 192)],
    ]


def block_d() -> list[Branch]:
    return [
        [conv_step("branch3x3_1", 192), stride2_conv_step("branch3x3_2", 320)],
        [
            conv_step("branch7x7x3_1", 192),
            conv_step("branch7x7x3_2", 192, WIDE),
            conv_step("branch7x7x3_3", 192, TALL),
            stride2_conv_step("branch7x7x3_4", 192),
        ],
        [MAX_POOL_STRIDE2],
    ]


def block_e(pool: Pool) -> list[Branch]:
    def split_conv_step(name: str) -> tuple[ConvSpec, ...]:
        return conv_step(f"{name}a", 384, (1, 3)) + conv_step(f"{name}b", 384, (3, 1))

    return [
        [conv_step("branch1x1", 320)],
        [conv_step("branch3x3_1", 384), split_conv_step("branch3x3_2")],
        [conv_step("branch3x3dbl_1", 448), conv_step("branch3x3dbl_2", 384, 3), split_conv_step("branch3x3dbl_3")],
        [pool, conv_step("branch_pool", 192)],
    ]


STEM: Branch = [  # [N, 3, 299, 299] -> [N, 192, 35, 35]
    (ConvSpec("Conv2d_1a_3x3", 32, 3, 2, "valid"),),
    (ConvSpec("Conv2d_2a_3x3", 32, 3, 1, "valid"),),
    (ConvSpec("Conv2d_2b_3x3", 64, 3),),
    MAX_POOL_STRIDE2,
    (ConvSpec("Conv2d_3b_1x1", 80),),
    (ConvSpec("Conv2d_4a_3x3", 192, 3, 1, "valid"),),
    MAX_POOL_STRIDE2,
]

BLOCKS: dict[str, list[Branch]] = {
    "Mixed_5b": block_a(32),  # 256 channels, 35 x 35
    "Mixed_5c": block_a(64),  # 288
    "Mixed_5d": block_a(64),
    "Mixed_6a": block_b(),  # 768 channels, 17 x 17
    "Mixed_6b": block_c(128),
    "Mixed_6c": block_c(160),
    "Mixed_6d": block_c(160),
    "Mixed_6e": block_c(192),
    "Mixed_7a": block_d(),  # 1280 channels, 8 x 8
    "Mixed_7b": block_e(AVG_POOL),  # 2048
    "Mixed_7c": block_e(MAX_POOL),  # the published network averages here; the one of 2015-12-05 does not
}


class ConvNormReLU(nn.Module):
    def __init__(self, channels: int, spec: ConvSpec):
        super().__init__()
        self.conv = nn.Conv2d(channels, spec.out, spec.kernel, spec.stride, spec.padding, bias=False)
        self.bn = nn.BatchNorm2d(spec.out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionBlock(nn.Module):
    """Branches side by side: [N, channels, H, W] -> [N, width, H', W']."""

    def __init__(self, channels: int, branches: list[Branch]):
        super().__init__()
        self.branches = branches
        self.width = sum(add_convolutions(self, channels, branch) for branch in branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([run_branch(self, branch, x) for branch in self.branches], 1)


def add_convolutions(owner: nn.Module, channels: int, branch: Branch) -> int:
    """Give `to` the convolutions of a branch, each under its name; return the branch's number of channels."""
    for step in branch:
        if isinstance(step, tuple):
            for like in step:
                owner.add_module(like.name, ConvNormReLU(channels, like))
            channels = sum(like.out for like in step)
    return channels


def run_branch(owner: nn.Module, branch: Branch, x: Tensor) -> Tensor:
    for step in branch:
        x = concat_convs(owner, step, x) if isinstance(step, tuple) else step(x)
    return x


def concat_convs(owner: nn.Module, step: Sequence[ConvSpec], x: Tensor) -> Tensor:
    return torch.cat([owner.get_submodule(like.name)(x) for like in step], 1)


class Inception(nn.Module):
    """uint8 images [N, 3, H, W] (or grey, [N, 1, H, W]) -> pool features [N, 2048] float32.

    `logits` maps those features to the 1008 logits [N, 1008] without bias, which is what the Inception score
    takes. Freshly made, its weights are random: a stand-in for tests. `load` reads a file's weights into it.
    """

    num_features = NUM_FEATURES

    def __init__(self):
        super().__init__()
        channels = add_convolutions(self, 3, STEM)
        for name, branches in BLOCKS.items():
            block = InceptionBlock(channels, branches)
            self.add_module(name, block)
            channels = block.width
        self.fc = nn.Linear(channels, NUM_LOGITS)

    def forward(self, images: Tensor) -> Tensor:
        x = resize_like_tf1(three_channels(images).float(), INPUT_SIDE)
        x = run_branch(self, STEM, (x - 128) / 128)
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """[N, 2048] -> [N, 1008], in the precision of the features."""
        return features @ self.fc.weight.to(features.dtype).T


def three_channels(images: Tensor) -> Tensor:
    """[N, 3, H, W] as it is, [N, 1, H, W] repeated. Raises `Unusable` for any other number of channels."""
    if images.shape[1] not in (1, 3):
        raise UsageError(f"space: inception sees images of 1 or 3 channels, not {images.shape[1]}")
    return images.expand(-1, 3, -1, -1)


def resize_like_tf1(x: Tensor, side: int) -> Tensor:
    """[N, C, H, W] -> [N, C, side, side], bilinear, `source = target * in / out`, not antialiased.

    This is `tf.image.resize_bilinear` of TensorFlow 1. Without half-pixel centres it shifts the picture, and
    scores have it in them: another resizer gives another FID (Parmar et al. 2022, arXiv 2104.11222).
    """
    return _resize_last(_resize_last(x, side).mT, side).mT


def _resize_last(x: Tensor, side: int) -> Tensor:
    size = x.shape[-1]
    source = torch.arange(side, device=x.device) * (size / side)
    low = source.long()
    high = (low + 1).clamp(max=size - 1)
    return torch.lerp(x[..., low], x[..., high], (source - low).to(x.dtype))


def load_inception(state: dict[str, Tensor]) -> Inception:
    """The network with the weights of pytorch-fid's file; counters of batches seen may be missing from it.

    Raises `Unusable` where names or shapes are not the network's.
    """
    network = Inception()
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except (RuntimeError, AttributeError) as error:
        raise UsageError(f"inception: not the weights of this network: {' '.join(str(error).split())}") from error
    wrong = [name for name in [*missing, *unexpected] if not name.endswith("num_batches_tracked")]
    if wrong:
        raise UsageError(f"inception: the file has not the names of this network, see {', '.join(wrong[:3])}")
    return network
