"""A discriminator made of several, whose patches stand next to one another."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from paragan.core.types import DiscriminatorOutput


class DiscriminatorEnsemble(nn.Module):
    """x, y -> `DiscriminatorOutput`: logits [N, sum of P] of all discriminators, and the P of each in `patches`.

    Args:
        discriminators: (x, y) -> `DiscriminatorOutput` with logits [N, P] each.
    """

    def __init__(self, discriminators: Iterable[nn.Module]):
        super().__init__()
        self.discriminators = nn.ModuleList(discriminators)

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        return join_outputs([discriminator(x, y) for discriminator in self.discriminators])


def join_outputs(outputs: Sequence[DiscriminatorOutput]) -> DiscriminatorOutput:
    """Return the outputs of several discriminators as one; patches of each stay distinguishable."""
    logits = torch.cat([output.logits for output in outputs], 1)
    features = tuple(feature for output in outputs for feature in output.features)
    patches = tuple(count for output in outputs for count in output.patches or (output.logits.shape[1],))
    return DiscriminatorOutput(logits, features=features, patches=patches)
