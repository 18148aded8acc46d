"""The last layers of a discriminator: features [N, F] and labels [N] -> logits [N] or a `DiscriminatorOutput`."""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.types import DiscriminatorOutput
from paragan.nets.conditioning import DConditioningKind, require_labels

MakeLayer = Callable[[nn.Linear | nn.Embedding], nn.Module]  # initialises a layer, and may add spectral norm


class ProjectionHead(nn.Module):
    """Features [N, F] -> logits [N]: linear, plus the inner product with a vector of the class if there are classes.

    Miyato and Koyama, "cGANs with Projection Discriminator", 2018, eq. 3.
    """

    def __init__(self, features: int, classes: int, make: MakeLayer):
        super().__init__()
        self.linear = make(nn.Linear(features, 1))
        self.embedding = make(nn.Embedding(classes, features)) if classes else None

    def forward(self, features: Tensor, y: Tensor | None) -> Tensor:
        """[N, F], int64 [N] -> [N], at least float32. `y` is ignored without classes, and required with them."""
        logits = self.linear(features)[:, 0]
        if self.embedding is not None:
            logits = logits + (self.embedding(require_labels(y)) * features).sum(1)
        return _promote_to_float32(logits)


class ClassifierHead(nn.Module):
    """Features [N, F] -> logits [N] of being real and class logits [N, K]. Labels are ignored.

    Odena, Olah and Shlens, "Conditional Image Synthesis with Auxiliary Classifier GANs", 2017.
    """

    def __init__(self, features: int, classes: int, make: MakeLayer):
        super().__init__()
        self.linear = make(nn.Linear(features, 1))
        self.classes = make(nn.Linear(features, classes, bias=False))

    def forward(self, features: Tensor, y: Tensor | None) -> DiscriminatorOutput:
        logits = _promote_to_float32(self.linear(features)[:, 0])
        return DiscriminatorOutput(logits, class_logits=_promote_to_float32(self.classes(features)))


class ContrastiveHead(nn.Module):
    """Features [N, F] -> logits [N], and unit vectors [N, length] of the images and of their labels (proxies).

    Kang and Park, "ContraGAN: Contrastive Learning for Conditional Image Generation", 2020, section 3.2. The logits do
    not depend on the class; the loss pulls images of a class towards its proxy and towards each other.
    """

    def __init__(self, features: int, classes: int, length: int, make: MakeLayer):
        super().__init__()
        self.linear = make(nn.Linear(features, 1))
        self.embedding = make(nn.Linear(features, length))
        self.proxies = make(nn.Embedding(classes, length))

    def forward(self, features: Tensor, y: Tensor | None) -> DiscriminatorOutput:
        embedding = F.normalize(_promote_to_float32(self.embedding(features)))
        proxies = F.normalize(_promote_to_float32(self.proxies(require_labels(y))))
        logits = _promote_to_float32(self.linear(features)[:, 0])
        return DiscriminatorOutput(logits, embedding=embedding, proxies=proxies)


def make_head(
    kind: DConditioningKind, features: int, classes: int, make: MakeLayer, length: int | None = None
) -> nn.Module:
    """Return the head of a conditioning. ("concat" conditions at the input, so its head is unconditional.)

    Args:
        kind: How the discriminator is conditioned on the class.
        features: Number of input features.
        classes: Number of classes.
        make: Initialises a layer, and may add spectral norm.
        length: Length of a contrastive embedding; None: `features`, at most 512.
    """
    match kind:
        case "none" | "concat":
            return ProjectionHead(features, 0, make)
        case "projection":
            return ProjectionHead(features, classes, make)
        case "classifier":
            return ClassifierHead(features, classes, make)
        case "contrastive":
            return ContrastiveHead(features, classes, length or min(features, 512), make)
        case _:
            assert_never(kind)


def _promote_to_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
