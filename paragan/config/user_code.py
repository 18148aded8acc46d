"""Networks and objectives of the user's own, beside those that are here: as `module:Class` in a record, or as objects
from Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import nn

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, name_shorthand, or_user_class
from paragan.core.types import Batch, DiscriminatorFn, Loss
from paragan.game.game import ConditioningFn
from paragan.losses.adversarial import Adversarial
from paragan.nets import Nets, Spec

RenderFn = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (samples [n, ...], reals [n, ...]) -> uint8 [H, W, 1 or 3]


def validate_user_nets(nets: Any) -> None:
    """Unusable where networks lack a size of what G makes its images from."""
    if conditioning_input_of(nets) is None and not (isinstance(getattr(nets, "latent", None), int) and nets.latent > 0):
        raise UsageError("it has neither latent, the size of z, nor given(real), what else G makes its images from")


AnyNets = Annotated[Nets, or_user_class(validate_user_nets, "generator", "discriminator"), name_shorthand]
AnyObjective = Annotated[
    Adversarial, or_user_class(lambda own: None, "second_order", "discriminator", "generator"), name_shorthand
]


@dataclass(frozen=True)
class UserObjective:
    """An objective of the user's own, which has two losses and no more, as a game asks for it."""

    user_objective: Any
    latent_perturbation: float = 0.0

    @property
    def second_order(self) -> bool:
        return bool(self.user_objective.second_order)

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        return self.user_objective.discriminator(d, real, fake, step)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return self.user_objective.generator(d, fake, real, step)

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return None


def load_user_nets(config: Any) -> Any:
    """Networks from their plain record; the module it names is imported."""
    return from_dict(AnyNets, config)  # pyright: ignore


def is_user_defined(nets: Any, objective: Any = None) -> bool:
    """Whether a part of the game is the user's, and has to be tried."""
    return not (_is_builtin(nets, "nets") and (objective is None or _is_builtin(objective, "losses")))


def _is_builtin(part: Any, package: str) -> bool:
    return type(part).__module__.startswith(f"{__name__.partition('.')[0]}.{package}.")


def conditioning_input_of(nets: Any) -> ConditioningFn | None:
    """What networks of one's own give G in place of latents, if they say so."""
    return getattr(nets, "given", None)


def render_fn_of(nets: Any) -> RenderFn | None:
    """How networks of one's own draw what G makes, if they say so."""
    return getattr(nets, "picture", None)


def check_nets(nets: Any, spec: Spec) -> None:
    """Unusable where networks cannot be built for such data."""
    if spec.array_shape and not is_user_defined(nets):
        raise UsageError(
            f"--nets {nets.name} makes square images, and the data are numbers {list(spec.array_shape)}: bring "
            "networks of your own, --nets=module:Class"
        )
    if check := getattr(nets, "check", None):
        check(spec)


def weight_clip_of(objective: Any) -> float:
    """The box that D's weights are put back into; 0 where an objective has none."""
    return getattr(objective, "clip", 0.0)
