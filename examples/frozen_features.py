"""A frozen ResNet-20 whose feature maps a discriminator sees (docs/networks.md, "Pretrained features in D").

    export RESNET20_WEIGHTS=resnet20.pt          # a state dict of this network, trained on CIFAR-10
    paragan train sngan-cifar10 --data cifar10.npz --d_features.network=examples.frozen_features:ResNet20

Without RESNET20_WEIGHTS the network is random, which is of little use but shows how it works.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters (He et al. 2016, section 4.2, option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride, self.padding = stride, (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding)))


class ResNet20(nn.Module):
    """Images [N, 3, H, W] in [-1, 1] -> the maps of its three stages, of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.stage1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.stage2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.stage3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)
        weights = os.environ.get("RESNET20_WEIGHTS")
        if weights:
            self.load_state_dict(rename(torch.load(weights, weights_only=True)))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = F.relu(self.bn1(self.conv1(((x + 1) / 2 - self.mean) / self.std)))
        maps = []
        for stage in (self.stage1, self.stage2, self.stage3):
            h = stage(h)
            maps.append(h)
        return maps


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the features by the names of `ResNet20`; the classifier is left out."""
    renamed = {name.replace("layer", "stage"): value for name, value in state.items()}
    return {name: value for name, value in renamed.items() if not name.startswith(("fc.", "linear."))}
