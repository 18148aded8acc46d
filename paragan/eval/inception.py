"""The Inception network of 2015-12-05, which FID and the Inception score use.

Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision" (arXiv 1512.00567), in the version used
by Heusel et al. 2017 (arXiv 1706.08500). It differs from torchvision's Inception v3 in four places: 1008 classes;
average pools that exclude padding from the mean; a *max* pool in the last block; and inputs resized as in TensorFlow 1.
The weights are not part of this package (see `features.inception_2015`).

The network is the table below. A step is a pool, or parallel convolutions whose outputs are concatenated; a branch is a
sequence of steps; a block concatenates its branches. Parameters have the names of pytorch-fid's file, which are
torchvision's.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import UsageError

INPUT_SIDE = 299  # pixels, the resolution the network was trained at
NUM_FEATURES = 2048
NUM_LOGITS = 1008


class ConvSpec(NamedTuple):
    """A convolution without bias, batch norm, ReLU. `padding` is TensorFlow's "same" or "valid"."""

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
WIDE = (1, 7)
TALL = (7, 1)


def conv_step(name: str, out: int, kernel: int | tuple[int, int] = 1) -> tuple[ConvSpec, ...]:
    """Return a step of one convolution; the sum of two such steps is a step of parallel convolutions."""
    return (ConvSpec(name, out, kernel),)


def stride2_conv_step(name: str, out: int) -> tuple[ConvSpec, ...]:
    """Return a step of one 3x3 convolution of stride 2."""
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
    """Parallel branches, concatenated: [N, channels, H, W] -> [N, width, H', W']."""

    def __init__(self, channels: int, branches: list[Branch]):
        super().__init__()
        self.branches = branches
        self.width = sum(add_convolutions(self, channels, branch) for branch in branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([run_branch(self, branch, x) for branch in self.branches], 1)


def add_convolutions(owner: nn.Module, channels: int, branch: Branch) -> int:
    """Add the convolutions of a branch to `owner` under their names; return the channels of the branch's output."""
    for step in branch:
        if isinstance(step, tuple):
            for spec in step:
                owner.add_module(spec.name, ConvNormReLU(channels, spec))
            channels = sum(spec.out for spec in step)
    return channels


def run_branch(owner: nn.Module, branch: Branch, x: Tensor) -> Tensor:
    """Run the steps of a branch with the convolutions of `owner`."""
    for step in branch:
        if isinstance(step, tuple):
            x = torch.cat([owner.get_submodule(spec.name)(x) for spec in step], 1)
        else:
            x = step(x)
    return x


class Inception(nn.Module):
    """uint8 images [N, 3, H, W] (or grey, [N, 1, H, W]) -> pool features [N, 2048] float32.

    `logits` maps the features to logits [N, 1008] without bias, which the Inception score uses. Initial weights are
    random; `load_inception` loads those of a file.
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
        """Map features [N, 2048] to logits [N, 1008], in the dtype of the features."""
        return features @ self.fc.weight.to(features.dtype).T


def three_channels(images: Tensor) -> Tensor:
    """Return [N, 3, H, W] unchanged and [N, 1, H, W] repeated. Raises `UsageError` for other numbers of channels."""
    if images.shape[1] not in (1, 3):
        raise UsageError(f"space=inception: needs images of 1 or 3 channels, got {images.shape[1]}. Use pixels")
    return images.expand(-1, 3, -1, -1)


def resize_like_tf1(x: Tensor, side: int) -> Tensor:
    """Resize [N, C, H, W] to [N, C, side, side]: bilinear, `source = target * in / out`, without antialiasing.

    This is `tf.image.resize_bilinear` of TensorFlow 1. It has no half-pixel centres, so it shifts images. Scores depend
    on it: another resizer yields another FID (Parmar et al. 2022, arXiv 2104.11222).
    """
    return _resize_last(_resize_last(x, side).mT, side).mT


def _resize_last(x: Tensor, side: int) -> Tensor:
    size = x.shape[-1]
    source = torch.arange(side, device=x.device) * (size / side)
    low = source.long()
    high = (low + 1).clamp(max=size - 1)
    return torch.lerp(x[..., low], x[..., high], (source - low).to(x.dtype))


def load_inception(state: dict[str, Tensor]) -> Inception:
    """Return the network with the weights of pytorch-fid's file, which may lack `num_batches_tracked`.

    Raises:
        UsageError: Names or shapes are not those of the network.
    """
    network = Inception()
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except (RuntimeError, AttributeError) as error:
        raise UsageError(f"--inception: not the weights of this network: {' '.join(str(error).split())}") from error
    wrong = [name for name in [*missing, *unexpected] if not name.endswith("num_batches_tracked")]
    if wrong:
        raise UsageError(f"--inception: not the weights of this network, whose names differ: {', '.join(wrong[:3])}")
    return network
