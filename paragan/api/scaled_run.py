"""The run of a `Config`, scaled to a total batch and a number of virtual workers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import Field

from paragan.api.estimator import EstimatorNets
from paragan.api.game_config import Config
from paragan.config.batch_scaling import scale_to_batch
from paragan.config.run import Run
from paragan.config.sections import DeviceOptions
from paragan.core.errors import UsageError
from paragan.core.schema import config_class, from_dict


@config_class
class _ScaledSize:
    """Validated arguments of ScalingManager: images per step, and virtual workers."""

    bs: Annotated[int, Field(ge=1)]
    num_workers: Annotated[int, Field(ge=1)]


def build_scaled_run(config: Config, bs: int | str, num_workers: int) -> Run:
    """Return the run of a config, scaled to a total batch of `bs` on `num_workers` lanes."""
    if config.strategy.per_label:
        raise UsageError(
            "strategy=per-label: trains a game for every label, and an Estimator is one game. Use sync, quantized, "
            "gossip or async, or `paragan train custom --nets=module:Class --strategy per-label`"
        )
    size = from_dict(_ScaledSize, {"bs": bs, "num_workers": num_workers})
    nets: Any = EstimatorNets()
    run = Run(
        recipe="estimator",
        data=config.data,
        nets=nets,
        objective=config.objective,
        g=dataclasses.replace(config.g, lr_scaling=config.g_lr_scaling),
        d=dataclasses.replace(config.d, lr_scaling=config.d_lr_scaling),
        d_steps=config.d_steps,
        ema=config.ema,
        strategy=config.strategy.without_rank_loss(),
        batch=size.bs,
        lanes=size.num_workers,
        kimg=config.max_steps * size.bs * config.d_steps / 1000,
        seed=config.seed,
        evaluation=config.evaluation,
        device=_resolve_device(config.device),
        timeout_s=config.timeout_s,
        reasons=config.reasons,
    )
    return scale_to_batch(
        run, config.base_bs, warm_up_steps=config.warm_up_steps, scale_penalties=config.scale_penalties
    )


def _resolve_device(device: DeviceOptions) -> DeviceOptions:
    """Return the options until a layout is measured.

    D is called separately on reals and fakes unless configured otherwise: a user's D may mix the images of a batch.
    """
    concat_real_fake = False if device.concat_real_fake == "auto" else device.concat_real_fake
    return dataclasses.replace(device, concat_real_fake=concat_real_fake, tune="rules")
