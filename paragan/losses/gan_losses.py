"""The adversarial losses, each as its paper writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import relu, softplus


@dataclass(frozen=True)
class Form:
    """What each player minimises, from D's logits on reals and on fakes: [N], [N] -> [N].

    paired : G's loss looks at the reals too, image i beside fake i
    signed : what D finds real has a logit above 0, and what it finds made one below
    """

    d: Callable[[Tensor, Tensor], Tensor]
    g: Callable[[Tensor, Tensor], Tensor]
    paired: bool = False
    signed: bool = True


LOSSES: dict[str, Form] = {
    # Lim & Ye 2017, Miyato et al. 2018
    "hinge": Form(lambda real, fake: relu(1 - real) + relu(1 + fake), lambda real, fake: -fake),
    # Goodfellow et al. 2014, section 3: G maximises log D(G(z))
    "nonsaturating": Form(lambda real, fake: softplus(-real) + softplus(fake), lambda real, fake: softplus(-fake)),
    # Mao et al. 2017, eq. 9: reals to 1, fakes to 0; G's fakes to 1
    "least_squares": Form(
        lambda real, fake: (real - 1).square() / 2 + fake.square() / 2,
        lambda real, fake: (fake - 1).square() / 2,
        signed=False,
    ),
    # Arjovsky et al. 2017
    "wasserstein": Form(lambda real, fake: fake - real, lambda real, fake: -fake, signed=False),
    # Jolicoeur-Martineau 2019 (RpGAN), as Huang et al. 2024 (R3GAN) use it: how much more real each is than a
    # fake beside it, and for G the reverse
    "relativistic": Form(
        lambda real, fake: softplus(fake - real), lambda real, fake: softplus(real - fake), paired=True, signed=False
    ),
}
