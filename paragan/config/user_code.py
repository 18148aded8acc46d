"""Networks and objectives of the user's own, beside those that are here: as `module:Class` in a record, or as objects
from Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import nn

from paragan.core.errors import Unusable
from paragan.core.schema import build, by_name, or_own
from paragan.core.types import Batch, Loss, Net
from paragan.game.game import Given
from paragan.losses.adversarial import Adversarial
from paragan.nets import Nets, Spec

Picture = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (samples [n, ...], reals [n, ...]) -> uint8 [H, W, 1 or 3]


def prove_nets(nets: Any) -> None:
    """Unusable where networks lack a size of what G makes its images from."""
    if given_of(nets) is None and not (isinstance(getattr(nets, "latent", None), int) and nets.latent > 0):
        raise Unusable("it has neither latent, the size of z, nor given(real), what else G makes its images from")


AnyNets = Annotated[Nets, or_own(prove_nets, "generator", "discriminator"), by_name]
AnyObjective = Annotated[Adversarial, or_own(lambda own: None, "second_order", "discriminator", "generator"), by_name]


@dataclass(frozen=True)
class OwnObjective:
    """An objective of the user's own, which has two losses and no more, as a game asks for it."""

    own: Any
    nearby: float = 0.0

    @property
    def second_order(self) -> bool:
        return bool(self.own.second_order)

    def discriminator(self, d: Net, real: Batch, fake: Batch, step: int) -> Loss:
        return self.own.discriminator(d, real, fake, step)

    def generator(self, d: Net, fake: Batch, real: Batch, step: int) -> Loss:
        return self.own.generator(d, fake, real, step)

    def of_weights(self, player: str, net: nn.Module) -> Loss | None:
        return None


def own_nets(config: Any) -> Any:
    """Networks from their plain record; the module it names is imported."""
    return build(AnyNets, config)  # pyright: ignore


def is_own(nets: Any, objective: Any = None) -> bool:
    """Whether a part of the game is the user's, and has to be tried."""
    return not (_is_ours(nets, "nets") and (objective is None or _is_ours(objective, "losses")))


def _is_ours(part: Any, room: str) -> bool:
    return type(part).__module__.startswith(f"{__name__.partition('.')[0]}.{room}.")


def given_of(nets: Any) -> Given | None:
    """What networks of one's own give G in place of latents, if they say so."""
    return getattr(nets, "given", None)


def picture_of(nets: Any) -> Picture | None:
    """How networks of one's own draw what G makes, if they say so."""
    return getattr(nets, "picture", None)


def check_nets(nets: Any, spec: Spec) -> None:
    """Unusable where networks cannot be built for such data."""
    if spec.values and not is_own(nets):
        raise Unusable(
            f"--nets {nets.name} makes square images, and the data are numbers {list(spec.values)}: bring networks of "
            "your own, --nets=module:Class"
        )
    if check := getattr(nets, "check", None):
        check(spec)


def clip_of(objective: Any) -> float:
    """The box that D's weights are put back into; 0 where an objective has none."""
    return getattr(objective, "clip", 0.0)
