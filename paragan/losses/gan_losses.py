"""The adversarial losses, as in their papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import relu, softplus


@dataclass(frozen=True)
class GanLoss:
    """The losses of both players from D's logits on reals and on fakes: [N], [N] -> [N].

    d         : minimised by D
    g         : minimised by G
    is_paired : whether G's loss uses the reals too, real i with fake i
    is_signed : whether D's logits are positive for images that it takes for real, and negative for fakes
    """

    d: Callable[[Tensor, Tensor], Tensor]
    g: Callable[[Tensor, Tensor], Tensor]
    is_paired: bool = False
    is_signed: bool = True


GAN_LOSSES: dict[str, GanLoss] = {
    # Lim & Ye 2017, Miyato et al. 2018
    "hinge": GanLoss(lambda real, fake: relu(1 - real) + relu(1 + fake), lambda real, fake: -fake),
    # Goodfellow et al. 2014, section 3: G maximises log D(G(z))
    "nonsaturating": GanLoss(lambda real, fake: softplus(-real) + softplus(fake), lambda real, fake: softplus(-fake)),
    # Mao et al. 2017, eq. 9: reals to 1, fakes to 0; G's fakes to 1
    "least_squares": GanLoss(
        lambda real, fake: (real - 1).square() / 2 + fake.square() / 2,
        lambda real, fake: (fake - 1).square() / 2,
        is_signed=False,
    ),
    # Arjovsky et al. 2017
    "wasserstein": GanLoss(lambda real, fake: fake - real, lambda real, fake: -fake, is_signed=False),
    # Jolicoeur-Martineau 2019 (RpGAN), as used by Huang et al. 2024 (R3GAN): D compares each real with its paired fake
    "relativistic": GanLoss(
        lambda real, fake: softplus(fake - real),
        lambda real, fake: softplus(real - fake),
        is_paired=True,
        is_signed=False,
    ),
}
