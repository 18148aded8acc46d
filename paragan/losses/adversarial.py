"""The adversarial losses, each as its paper writes it, with the penalties that may be added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import relu, softplus
from torch.nn.utils.parametrize import cached

from ..batch import Batch, Loss, Net
from ..config import record
from .penalties import gradient_penalty, r1

# name: (D's loss on real and fake logits, G's loss on fake logits), all [N] -> [N]
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # Lim & Ye 2017, Miyato et al. 2018
    "hinge": (lambda real, fake: relu(1 - real) + relu(1 + fake), lambda fake: -fake),
    # Goodfellow et al. 2014, section 3: G maximises log D(G(z))
    "nonsaturating": (lambda real, fake: softplus(-real) + softplus(fake), lambda fake: softplus(-fake)),
    # Arjovsky et al. 2017
    "wasserstein": (lambda real, fake: fake - real, lambda fake: -fake),
}

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@record
class Adversarial:
    """A loss by name and the weights of its penalties.

    r1   : gamma; adds gamma / 2 E|grad D|^2 on reals every `r1_every` steps, times r1_every ("lazy")
    gp   : lambda; adds lambda E(|grad D| - 1)^2 between reals and fakes
    clip : c; after every step of D each of its weights is put back into [-c, c] (Arjovsky et al. 2017; 0: none)
    """

    loss: Literal["hinge", "nonsaturating", "wasserstein"] = "hinge"
    r1: Weight = 0.0
    r1_every: Annotated[int, Field(ge=1)] = 1
    gp: Weight = 0.0
    clip: Weight = 0.0

    @property
    def second_order(self) -> bool:
        return self.r1 > 0 or self.gp > 0

    def kind(self, step: int) -> bool:
        """Which steps are computed alike: those with a lazy penalty, and those without."""
        return self.r1 > 0 and step % self.r1_every == 0

    def discriminator(self, d: Net, real: Batch, fake: Batch, step: int) -> Loss:
        penalised = self.kind(step)
        images = real.images.detach().requires_grad_(True) if penalised else real.images
        with cached():  # spectral norm divides D's weights once for both calls
            on_real, on_fake = d(images, real.labels), d(fake.images, fake.labels)
        total = LOSSES[self.loss][0](on_real, on_fake).mean()
        parts = {"scores/real": on_real.detach().mean(), "scores/fake": on_fake.detach().mean()}
        if penalised:
            penalty = r1(on_real, images)
            total = total + self.r1 / 2 * self.r1_every * penalty
            parts["D/r1"] = penalty.detach()
        if self.gp > 0:
            penalty = gradient_penalty(d, real, fake)
            total = total + self.gp * penalty
            parts["D/gp"] = penalty.detach()
        return Loss(total, parts)

    def generator(self, d: Net, fake: Batch, real: Batch, step: int) -> Loss:
        return Loss(LOSSES[self.loss][1](d(fake.images, fake.labels)).mean())
