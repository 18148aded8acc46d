"""The last layer of a discriminator."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paragan.errors import Unusable
from paragan.nets.spectral import spectral


class Projection(nn.Module):
    """Features [N, F] to logits [N]: linear, plus their product with a vector per class if there are classes.

    Miyato and Koyama, "cGANs with Projection Discriminator", 2018, eq. 3. `initialise` fills a weight in
    place.
    """

    def __init__(self, features: int, classes: int, initialise: Callable[[Tensor], object], normalised: bool):
        super().__init__()
        linear = nn.Linear(features, 1)
        initialise(linear.weight)
        nn.init.zeros_(linear.bias)
        self.linear = spectral(linear) if normalised else linear
        self.embedding = None
        if classes:
            embedding = nn.Embedding(classes, features)
            initialise(embedding.weight)
            self.embedding = spectral(embedding) if normalised else embedding

    def forward(self, features: Tensor, y: Tensor | None) -> Tensor:
        """[N, F], int64 [N] -> [N], at least float32. Without classes `y` is ignored; with, it is needed."""
        logits = self.linear(features)[:, 0]
        if self.embedding is not None:
            if y is None:
                raise Unusable("y: a conditional network needs labels, int64 [N], not None")
            logits = logits + (self.embedding(y) * features).sum(1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
