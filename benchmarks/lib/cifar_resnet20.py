"""A ResNet-20 trained on CIFAR-10, whose state dict is in the file of the environment variable CIFAR_RESNET20.

Keys as in the published CIFAR-10 ResNets of He et al. 2015, section 4.2 (conv1, bn1, layer1.0.conv1, ..., linear).
Input: (x / 255 - mean) / deviation of CIFAR-10. Its pooled features are the space of `fd_resnet20`, which is not FID.
"""

from __future__ import annotations

import os
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.eval.classifier import NUM_FEATURES, ResNet20

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BLOCKS_PER_STAGE = 3


class CifarFeatures(nn.Module):
    """Images [N, 3, 32, 32] in [-1, 1] -> the maps after each stage: 16, 32 and 64 channels."""

    def __init__(self, net: ResNet20):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = ((images + 1) / 2 - self.mean) / self.deviation
        h = F.relu(self.net.norm(self.net.conv(x)))
        maps = []
        for i, block in enumerate(self.net.blocks, 1):
            h = block(h)
            if i % BLOCKS_PER_STAGE == 0:
                maps.append(h)
        return maps

    def pooled(self, images: Tensor) -> Tensor:
        """Return the 64 pooled features [N, 64]."""
        return self(images)[-1].mean((2, 3))

    def classify(self, images: Tensor) -> Tensor:
        """Return the classes int64 [N]."""
        return self.net.logits(self.pooled(images)).argmax(1)


def cifar_features() -> CifarFeatures:
    """Load the network, frozen."""
    state = torch.load(os.environ["CIFAR_RESNET20"], weights_only=True)
    net = ResNet20(3, 10)
    net.load_state_dict({_our_name(name): value for name, value in state.items() if "num_batches" not in name}, False)
    expected = {name for name in net.state_dict() if "num_batches" not in name}
    assert expected == {_our_name(name) for name in state if "num_batches" not in name}
    assert net.linear.in_features == NUM_FEATURES
    return CifarFeatures(net).eval().requires_grad_(False)


def untrained_features() -> CifarFeatures:
    """Return the network with random weights, frozen, to measure its time."""
    with torch.random.fork_rng():  # what is built after it does not depend on whether this is the first call
        net = ResNet20(3, 10)
    return CifarFeatures(net).eval().requires_grad_(False)


def _our_name(name: str) -> str:
    """Return the name in `ResNet20` of a weight: layer2.1.bn1.weight -> blocks.4.norm1.weight."""
    name = re.sub(r"^layer(\d)\.(\d)", lambda m: f"blocks.{BLOCKS_PER_STAGE * (int(m[1]) - 1) + int(m[2])}", name)
    return re.sub(r"^conv1\.", "conv.", re.sub(r"^bn1\.", "norm.", name)).replace(".bn", ".norm")
