"""Settings of a game that is trained from Python: `Config`, and `with_policy`, which sets those of a paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from paragan.api.field_names import with_python_names
from paragan.config.batch_scaling import WARM_UP_STEPS_PER_DOUBLING
from paragan.config.run import AnyStrategy
from paragan.config.sections import DataOptions, DeviceOptions, EvaluationOptions
from paragan.config.user_code import AnyObjective
from paragan.core.errors import UsageError
from paragan.core.schema import apply_overrides, config_class, from_dict, to_dict
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.optim.optimizers import Adam, DiscriminatorOptim, LrScaling, PlayerOptim, as_discriminator_optim
from paragan.optim.policies import describe_optim, get_policy, to_cli_args, to_cli_line
from paragan.strategies.sync import Sync


class Steps(int):
    """A number of steps that can be iterated, as in the figure: `for step in cfg.max_steps`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self))


yaml.SafeDumper.add_representer(Steps, yaml.SafeDumper.represent_int)


@config_class
class Config:
    """Settings of a game for `base_bs` images per step, which ScalingManager scales to another batch.

    data            : the data set
    max_steps       : length of the run, in steps of G
    base_bs         : the batch that the settings are for
    g, d            : optimizers, with learning rates for `base_bs`
    g_lr_scaling    : how the learning rate of G follows the batch: linear, sqrt or none
    d_lr_scaling    : the same for D
    warm_up_steps   : steps of learning-rate warm-up, for each doubling of the batch beyond base_bs
    scale_penalties : whether the weights of R1 and R2 follow the batch too
    objective       : losses and penalties
    d_steps         : steps of D for each step of G
    ema             : the average of G's weights
    strategy        : how ranks cooperate: any strategy of one game by name ("gossip"), with fields ({"name": "gossip",
                      "rounds": 2}), or "auto": chosen by measurements
    latent          : size of z, unless the generator has an attribute `latent`
    seed            : of all random numbers
    evaluation      : defaults of `ScalingManager.eval`
    device          : where and how to compute; with tune="measured" the fastest settings are chosen by measurements
    timeout_s       : of an exchange between ranks
    reasons         : reasons for these settings, a line each; printed when ScalingManager starts
    """

    data: DataOptions = DataOptions(path="digits")
    max_steps: Annotated[int, Field(ge=1), AfterValidator(Steps)] = Steps(1000)
    base_bs: Annotated[int, Field(ge=1)] = 64
    g: PlayerOptim = PlayerOptim(Adam(lr=2e-4, betas=(0.0, 0.9)))
    d: Annotated[DiscriminatorOptim, BeforeValidator(as_discriminator_optim)] = DiscriminatorOptim(
        Adam(lr=2e-4, betas=(0.0, 0.9))
    )
    g_lr_scaling: LrScaling = "sqrt"
    d_lr_scaling: LrScaling = "sqrt"
    warm_up_steps: Annotated[int, Field(ge=0)] = WARM_UP_STEPS_PER_DOUBLING
    scale_penalties: bool = False
    objective: AnyObjective = Adversarial()
    d_steps: Annotated[int, Field(ge=1)] = 1
    ema: EMAConfig = EMAConfig()
    strategy: AnyStrategy = Sync()
    latent: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0)] = 0
    evaluation: EvaluationOptions = EvaluationOptions()
    device: DeviceOptions = DeviceOptions()
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = 300.0
    reasons: tuple[str, ...] = ()


@with_python_names()
def with_policy(config: Config, name: str, bs: int, nets: str = "") -> Config:
    """Return the config with the optimizer settings of a paper, for a total batch of `bs`.

    `g`, `d` and `d_steps` are replaced, and the objective if the policy has one. What a policy requires of the networks
    is only listed in the reasons, since the networks are yours.

    Args:
        name: ttur, biggan, sngan, paragan, optimistic, wcgan, wcgan-gp, dcgan, dposg or dqgan.
        nets: "sngan" if D is like that of SN-GAN.
    """
    policy = get_policy(name, bs, nets=nets)
    objective_settings = {field: value for field, value in policy.settings.items() if field.startswith("objective.")}
    net_settings = {field: value for field, value in policy.settings.items() if field not in objective_settings}
    objective = config.objective
    if objective_settings:
        if not isinstance(objective, Adversarial):
            raise UsageError(
                f"policy {name}: sets {to_cli_line(objective_settings)}, but config.objective is your own. Use one"
            )
        data = apply_overrides({"objective": to_dict(objective)}, to_cli_args(objective_settings))
        objective = from_dict(Adversarial, data["objective"])
    reasons = [f"G {describe_optim(policy.g)}", f"D {describe_optim(policy.d)}"]
    if objective_settings:
        reasons.append(f"also sets {to_cli_line(objective_settings)}")
    if net_settings:
        reasons.append(f"leaves to your networks: {to_cli_line(net_settings)}")
    reasons += policy.reasons
    return dataclasses.replace(
        config,
        g=policy.g,
        d=policy.d,
        d_steps=policy.d_steps,
        objective=objective,
        base_bs=bs,
        reasons=tuple(f"policy {name}: {line}" for line in reasons),
    )
