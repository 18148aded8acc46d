"""Configs of optimizers, learning-rate schedules, and the scaling of learning rates with the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from paragan.core.schema import config_class, name_shorthand
from paragan.optim.lookahead import lookahead
from paragan.optim.third_party import or_third_party

OptimizerWrapper = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Kimg = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LrScaling = Literal["linear", "sqrt", "none"]


@config_class
class Adam:
    """Adam (Kingma & Ba 2015); with weight_decay, AdamW (Loshchilov & Hutter 2019).

    lr           : learning rate
    betas        : decay of the means of the gradient and of its square, per step
    eps          : is added to the root of the mean square
    weight_decay : decoupled weight decay; above 0 this is AdamW
    fused        : torch's fused kernel: one pass over the weights
    """

    name: Literal["adam"] = "adam"
    lr: PositiveNumber = 2e-4
    betas: tuple[Beta, Beta] = (0.0, 0.99)
    eps: PositiveNumber = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    fused: bool = True
    elementwise: ClassVar[bool] = True  # a network can be stepped as one flat vector

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        kind = torch.optim.AdamW if self.weight_decay else torch.optim.Adam
        options = {"fused": True} if self.fused else {"foreach": False}
        return kind(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, **options)


@config_class
class SGD:
    """Gradient descent, optionally with momentum.

    lr       : learning rate
    momentum : 0: none
    fused    : torch's fused kernel: one pass over the weights
    """

    name: Literal["sgd"] = "sgd"
    lr: PositiveNumber = 1e-2
    momentum: Beta = 0.0
    fused: bool = True
    elementwise: ClassVar[bool] = True

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        # torch 2.13's fused kernel for CPUs leaves most 16-bit numbers as they were
        is_broken = any(p.device.type == "cpu" and p.itemsize == 2 for p in parameters)
        options = {"fused": True} if self.fused and not is_broken else {"foreach": False}
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, **options)


@config_class
class RMSprop:
    """RMSprop (Tieleman & Hinton 2012), used by the original Wasserstein GAN.

    lr    : learning rate
    alpha : decay of the mean square of the gradient, per step
    eps   : is added to the root of the mean square
    """

    name: Literal["rmsprop"] = "rmsprop"
    lr: PositiveNumber = 5e-5
    alpha: Beta = 0.99
    eps: PositiveNumber = 1e-8
    elementwise: ClassVar[bool] = True

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        return torch.optim.RMSprop(parameters, lr=self.lr, alpha=self.alpha, eps=self.eps, foreach=False)


BUILTIN_NAMES = ("adam", "sgd", "rmsprop", "lookahead")
InnerOptimizer = Annotated[
    Adam | SGD | RMSprop, Field(discriminator="name"), or_third_party(*BUILTIN_NAMES), name_shorthand
]


@config_class
class Lookahead:
    """Lookahead (Zhang et al. 2019) around the optimizer `inner`.

    Every k steps the slow weights move by alpha of the way to the current ones, and training continues from there.

    inner : the optimizer that steps
    k     : steps between two interpolations
    alpha : how far the slow weights move towards the fast ones
    """

    name: Literal["lookahead"] = "lookahead"
    inner: InnerOptimizer = Adam()
    k: Annotated[int, Field(ge=1)] = 5
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5

    @property
    def lr(self) -> float:
        """Learning rate of the inner optimizer."""
        return self.inner.lr

    @property
    def elementwise(self) -> bool:
        """Whether a network can be stepped as one flat vector."""
        return self.inner.elementwise

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        return build_optimizer(self, parameters, lambda optimizer: optimizer)


# These, and every optimizer of the pytorch-optimizer library that can train a game.
Optimizer = Annotated[
    Adam | SGD | RMSprop | Lookahead, Field(discriminator="name"), or_third_party(*BUILTIN_NAMES), name_shorthand
]


@config_class
class PlayerOptim:
    """Optimizer and learning rate of one player.

    optimizer         : adam, sgd, rmsprop, lookahead (around another), or a name of the pytorch-optimizer library
    warm_up_kimg      : the learning rate grows linearly from 0 over this time
    schedule          : after that: constant, or decay to 0 at the end of the run, linear or half a cosine
    optimizer_wrapper : wrapper of the optimizer; auto: the strategy's
    extrapolation     : of the optimistic wrapper, in steps; None: the strategy's
    lr_scaling        : how the learning rate follows the batch size, in a batch ramp and with --tune
    """

    optimizer: Optimizer = Adam()
    warm_up_kimg: Kimg = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    optimizer_wrapper: Literal["auto", "none", "optimistic", "extragradient"] = "auto"
    extrapolation: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    lr_scaling: LrScaling = "sqrt"

    def lr_schedule(self, end_images: int) -> Callable[[int], float]:
        """Return the schedule of a run of `end_images`: images shown -> factor on the learning rate."""
        warm_up = warm_up_factor(self.warm_up_kimg)
        decay = SCHEDULES[self.schedule]
        start_images = 1000 * self.warm_up_kimg

        def factor(images: int) -> float:
            progress = max(0.0, images - start_images) / max(1.0, end_images - start_images)
            return warm_up(images) * decay(min(1.0, progress))

        return factor


def build_optimizer(
    optimizer: Optimizer, parameters: list[nn.Parameter], wrap: OptimizerWrapper
) -> torch.optim.Optimizer:
    """Build the optimizer of a config, wrapped by `wrap`; Lookahead goes around both."""
    if isinstance(optimizer, Lookahead):
        return lookahead(build_optimizer(optimizer.inner, parameters, wrap), optimizer.k, optimizer.alpha)
    return wrap(optimizer.build(parameters))


def with_lr(optimizer: Optimizer, lr: float) -> Optimizer:
    """Return the config with another learning rate."""
    if isinstance(optimizer, Lookahead):
        return replace(optimizer, inner=with_lr(optimizer.inner, lr))
    return replace(optimizer, lr=lr)


def warm_up_factor(kimg: float) -> Callable[[int], float]:
    """Return a schedule, images -> factor on the learning rate: linear from 0 to 1 over the first `kimg`."""
    return lambda images: min(1.0, images / (1000 * kimg)) if kimg > 0 else 1.0


# Progress after the warm-up, 0 to 1 -> factor on the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,  # Loshchilov & Hutter 2017, no restarts
}

# Ratio of batch sizes -> factor on the learning rate.
LR_SCALINGS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,  # Goyal et al. 2017
    "sqrt": lambda ratio: ratio**0.5,  # Krizhevsky 2014, Hoffer et al. 2017: usual with Adam
    "none": lambda ratio: 1.0,
}

LR_SCALING_SOURCES = {
    "linear": "Goyal et al. 2017",
    "sqrt": "Krizhevsky 2014; for Adam Malladi et al. 2022",
    "none": "it stays",
}


def scale_lr(lr: float, lr_scaling: LrScaling, batch: int, base_batch: int) -> float:
    """Return the learning rate for `batch`, given the one for `base_batch`."""
    return lr * LR_SCALINGS[lr_scaling](batch / base_batch)


@config_class
class DiscriminatorOptim(PlayerOptim):
    """Optimizer and learning rate of D, and when it starts.

    start_kimg          : until then rounds train G alone, on the part of its loss that needs no D; the learning rate of
                          D follows its schedule from then on
    weight_warm_up_kimg : from then on, the weight of D in G's loss grows linearly to 1 over this time
    """

    start_kimg: Kimg = 0.0
    weight_warm_up_kimg: Kimg = 0.0

    @property
    def is_late(self) -> bool:
        """Whether D's weight in G's loss is not 1 from the first round on."""
        return self.start_kimg > 0 or self.weight_warm_up_kimg > 0


def as_discriminator_optim(value: Any) -> Any:
    """Return how D learns from fields that any player has."""
    if type(value) is not PlayerOptim:
        return value
    return DiscriminatorOptim(**{field.name: getattr(value, field.name) for field in fields(value)})
