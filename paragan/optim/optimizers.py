"""Configs of optimizers, learning-rate schedules, and the scaling of learning rates with the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class, get_field, name_shorthand
from paragan.optim import eager
from paragan.optim.compatibility import check_groups
from paragan.optim.lookahead import lookahead
from paragan.optim.param_groups import ParamGroup, SelectedParameters, optimizer_field, select_parameters
from paragan.optim.third_party import or_third_party

Parameters = list[nn.Parameter] | list[dict[str, Any]]  # or groups of them, as torch's optimizers take them
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

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        decays = self.weight_decay or any(group.get("weight_decay") for group in as_groups(parameters))
        kind = eager.AdamW if decays else eager.Adam
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

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        # torch 2.13's fused kernel for CPUs leaves most 16-bit numbers as they were
        is_broken = any(
            p.device.type == "cpu" and p.itemsize == 2 for group in as_groups(parameters) for p in group["params"]
        )
        options = {"fused": True} if self.fused and not is_broken else {"foreach": False}
        return eager.SGD(parameters, lr=self.lr, momentum=self.momentum, **options)


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

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        return eager.RMSprop(parameters, lr=self.lr, alpha=self.alpha, eps=self.eps, foreach=False)


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

    def build(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Build the torch optimizer."""
        return build_optimizer(self, parameters, lambda optimizer: optimizer)


# These, and every optimizer of the pytorch-optimizer library that can train a game.
Optimizer = Annotated[
    Adam | SGD | RMSprop | Lookahead, Field(discriminator="name"), or_third_party(*BUILTIN_NAMES), name_shorthand
]


def _check_max_norm(max_norm: float | None) -> float | None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError("must be positive. Use 1, or null to clip nothing")
    return max_norm


MaxNorm = Annotated[Annotated[float, Field(allow_inf_nan=False)] | None, AfterValidator(_check_max_norm)]


@config_class
class PlayerOptim:
    """Optimizer and learning rate of one player.

    optimizer              : adam, sgd, rmsprop, lookahead (around another), or a name of the pytorch-optimizer library
    max_norm               : the gradient is clipped to this norm before the step, when ranks have exchanged it; None:
                             not clipped
    decay_norms_and_biases : whether parameters of fewer than two dimensions (biases, gains of norms) get weight decay
    groups                 : parameters with a learning rate or weight decay of their own, or that are frozen:
                             [{pattern: encoder.*, lr_factor: 0.1, weight_decay: 0, freeze_from_kimg: 100}, ...]
    warm_up_kimg           : the learning rate grows linearly from 0 over this time
    schedule               : after that: constant, decay to 0 at the end of the run (linear or half a cosine), or
                             exponential decay
    lr_half_life_kimg      : with schedule=exponential: the learning rate halves in this time
    optimizer_wrapper      : wrapper of the optimizer; auto: the strategy's
    extrapolation          : of the optimistic wrapper, in steps; None: the strategy's
    lr_scaling             : how the learning rate follows the batch size, in a batch ramp and with --tune
    """

    optimizer: Optimizer = Adam()
    max_norm: MaxNorm = None
    decay_norms_and_biases: bool = True
    groups: tuple[ParamGroup, ...] = ()
    warm_up_kimg: Kimg = 0.0
    schedule: Literal["constant", "linear", "cosine", "exponential"] = "constant"
    lr_half_life_kimg: Kimg = 0.0
    optimizer_wrapper: Literal["auto", "none", "optimistic", "extragradient"] = "auto"
    extrapolation: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    lr_scaling: LrScaling = "sqrt"

    def lr_schedule(self, end_images: int) -> Callable[[int], float]:
        """Return the schedule of a run of `end_images`: images shown -> factor on the learning rate."""
        warm_up = warm_up_factor(self.warm_up_kimg)
        start_images = 1000 * self.warm_up_kimg
        if self.schedule == "exponential":
            half_life = 1000 * self.lr_half_life_kimg
            return lambda images: warm_up(images) * 0.5 ** (max(0.0, images - start_images) / half_life)
        decay = SCHEDULES[self.schedule]

        def factor(images: int) -> float:
            progress = max(0.0, images - start_images) / max(1.0, end_images - start_images)
            return warm_up(images) * decay(min(1.0, progress))

        return factor

    @property
    def ends_with_run(self) -> bool:
        """Whether the learning rate depends on the length of the run."""
        return self.schedule in ("linear", "cosine")

    def check(self, section: str) -> None:
        """Raise `UsageError` if two fields contradict each other. section: of the run, "g" or "d"."""
        if self.schedule == "exponential" and not self.lr_half_life_kimg:
            raise UsageError(
                f"{section}.lr_half_life_kimg=0: {section}.schedule=exponential halves the learning rate in this time. "
                f"Use --{section}.lr_half_life_kimg=100, or another schedule"
            )
        if self.schedule != "exponential" and self.lr_half_life_kimg:
            raise UsageError(
                f"{section}.lr_half_life_kimg={self.lr_half_life_kimg:g}: is of schedule=exponential, not "
                f"{self.schedule}. Use --{section}.schedule=exponential, or leave it out"
            )
        self._check_groups(section)

    def _check_groups(self, section: str) -> None:
        inner = self.optimizer.inner if isinstance(self.optimizer, Lookahead) else self.optimizer
        if (self.groups or not self.decay_norms_and_biases) and inner.name not in BUILTIN_NAMES:
            check_groups(section, inner)
        field = optimizer_field(self.optimizer, "weight_decay")
        decays = [group.weight_decay for group in self.groups if group.weight_decay is not None]
        name = self.optimizer.name
        if decays and not field:
            raise UsageError(
                f"{section}.groups: a group has weight_decay={decays[0]:g}, and {section}.optimizer={name} has no "
                f"weight decay. Use --{section}.optimizer=adam, or leave it out"
            )
        if not self.decay_norms_and_biases and not field:
            raise UsageError(
                f"{section}.decay_norms_and_biases=false: {section}.optimizer={name} has no weight decay. Use "
                f"--{section}.optimizer=adam, or leave it out"
            )
        if not self.decay_norms_and_biases and field and not (get_field(self.optimizer, field) or any(decays)):
            selected = f"--{section}.optimizer.inner={inner.name} " if inner is not self.optimizer else ""
            raise UsageError(
                f"{section}.decay_norms_and_biases=false: nothing has weight decay. Use "
                f"{selected}--{section}.optimizer.{field}=0.01, or leave it out"
            )

    def select_parameters(self, section: str, parameters: Mapping[str, Tensor]) -> list[SelectedParameters]:
        """Return the groups of the optimizer; none if all parameters are trained alike.

        Args:
            section: of the run, "g" or "d".
            parameters: those that are trained, by name.

        Raises:
            UsageError: a pattern matches nothing.
        """
        if not self.groups and self.decay_norms_and_biases:
            return []
        return select_parameters(section, self.groups, self.decay_norms_and_biases, self.optimizer.lr, parameters)


def as_groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Return parameters as groups of an optimizer."""
    return [p if isinstance(p, dict) else {"params": [p]} for p in parameters]


def build_optimizer(optimizer: Optimizer, parameters: Parameters, wrap: OptimizerWrapper) -> torch.optim.Optimizer:
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
