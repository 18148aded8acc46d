"""Scale settings that are right for one batch size to another.

Learning rates, warm-up, the half-life of the EMA and the weights of penalties each follow by a rule; every
decision adds a line to `Run.reasons` (docs/batch_scaling.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.losses.adversarial import Adversarial
from paragan.optim.optimizers import LR_SCALING_SOURCES, PlayerOptim, scale_lr, with_lr

WARM_UP_STEPS_PER_DOUBLING = 100  # for each doubling of the batch
MAX_WARM_UP_FRACTION = 0.1  # of the run, at most
GAMMA_SOURCE = "as automatic settings of Karras et al. 2020 (StyleGAN2-ADA); its interval is in steps, and stays"
MIN_HALF_LIFE_ROUNDS = 10  # in a half-life of the average, where it had as many


def scale_to_batch(
    run: Run,
    base_batch: int,
    *,
    warm_up_steps: int = WARM_UP_STEPS_PER_DOUBLING,
    scale_penalties: bool = False,
    fixed_fields: Collection[str] = (),
) -> Run:
    """Return a run, whose settings are right for `base_batch` images a step, with those that are right for its batch.

    Learning rates follow by the rules in g.lr_scaling and d.lr_scaling.

    Args:
        warm_up_steps: steps over which learning rates grow from 0, for each doubling of the batch.
        scale_penalties: whether the weights of R1 and R2 follow too.
        fixed_fields: dotted fields that the user set: they stay.
    """
    if base_batch < 1:
        raise UsageError(f"base_batch={base_batch}: must be 1 or more")
    reasons = [
        f"batch {run.batch} over {run.lanes} lanes of {run.batch // run.lanes} images, settings for {base_batch}"
    ]
    for name in ("g", "d"):
        player_optim, of_rate = _scale_lr(run, name, base_batch, fixed_fields)
        rounds = warm_up_steps * max(0.0, math.log2(run.batch / base_batch))
        player_optim, of_warm_up = _scale_warm_up(run, name, player_optim, rounds, fixed_fields)
        run = dataclasses.replace(run, **{name: player_optim})
        reasons += [*of_rate, *of_warm_up]
    run, of_average = _scale_ema(run, base_batch, fixed_fields)
    run, of_penalties = _scale_penalties(run, base_batch, fixed_fields) if scale_penalties else (run, [])
    return dataclasses.replace(run, reasons=(*run.reasons, *reasons, *of_average, *of_penalties))


def _scale_lr(run: Run, name: str, base_batch: int, fixed_fields: Collection[str]) -> tuple[PlayerOptim, list[str]]:
    """Scale a player's learning rate by its rule."""
    side: PlayerOptim = getattr(run, name)
    if {f"{name}.optimizer.lr", f"{name}.optimizer.inner.lr"} & set(fixed_fields):
        return side, [f"{name.upper()}: learning rate {side.optimizer.lr:.3g}, set by hand"]
    before = side.optimizer.lr
    ratio = run.batch / base_batch
    if ratio == 1:
        return side, [f"{name.upper()}: learning rate {before:.3g}, as it is for this batch"]
    side = dataclasses.replace(
        side, optimizer=with_lr(side.optimizer, scale_lr(before, side.lr_scaling, run.batch, base_batch))
    )
    formula = f"{before:.3g} x {side.lr_scaling}({ratio:g}): {LR_SCALING_SOURCES[side.lr_scaling]}"
    return side, [f"{name.upper()}: learning rate {side.optimizer.lr:.3g} = {formula}"]


def _scale_warm_up(
    run: Run, name: str, player_optim: PlayerOptim, rounds: float, fixed_fields: Collection[str]
) -> tuple[PlayerOptim, list[str]]:
    """Warm up over so many rounds, but at most over a part of the run."""
    proportional_kimg = rounds * run.round_images / 1000
    max_kimg = MAX_WARM_UP_FRACTION * run.kimg
    kimg = float(f"{min(proportional_kimg, max_kimg):.6g}")
    if player_optim.lr_scaling == "none" or kimg <= player_optim.warm_up_kimg or f"{name}.warm_up_kimg" in fixed_fields:
        return player_optim, []
    if proportional_kimg > max_kimg:
        limit = "a tenth of the run, the maximum"
    else:
        limit = f"{rounds:.4g} rounds, in proportion to the doublings"
    reason = f"{name.upper()}: warm-up {kimg:.4g} kimg, {limit}: a larger batch starts slowly (Goyal et al. 2017)"
    return dataclasses.replace(player_optim, warm_up_kimg=kimg), [reason]


def _scale_ema(run: Run, base_batch: int, fixed_fields: Collection[str]) -> tuple[Run, list[str]]:
    """Keep the half-life, which is in images, but let the average span enough rounds."""
    half_life = run.ema.half_life_kimg
    largest = max((run.batch, *(batch for _, batch in run.ramp)))
    rounds = min(MIN_HALF_LIFE_ROUNDS, 1000 * half_life / (base_batch * run.d_steps))
    least = float(f"{rounds * largest * run.d_steps / 1000:.6g}")
    if "ema.half_life_kimg" in fixed_fields or least <= half_life:
        return run, [f"average: half-life stays at {half_life:g} kimg: it is in images"]
    ema = dataclasses.replace(run.ema, half_life_kimg=least)
    reason = f"average: half-life {least:.4g} kimg: {half_life:g} would be fewer than {rounds:.3g} rounds"
    return dataclasses.replace(run, ema=ema), [reason]


def _scale_penalties(run: Run, base_batch: int, fixed_fields: Collection[str]) -> tuple[Run, list[str]]:
    """Divide the weights of R1 and R2 by the growth of the batch.

    In StyleGAN2-ADA, gamma = 0.0002 resolution^2 / batch.
    """
    objective = run.objective
    reasons = list[str]()
    if not isinstance(objective, Adversarial):
        return run, ["penalties: the objective is user-defined, and stays"]
    for name, weight in (("r1", objective.r1), ("r2", objective.r2)):
        if weight and f"objective.{name}" not in fixed_fields:
            value = float(f"{weight * base_batch / run.batch:.6g}")
            objective = dataclasses.replace(objective, **{name: value})
            reasons.append(f"objective.{name} {value:.3g} = {weight:.3g} x {base_batch} / {run.batch}: {GAMMA_SOURCE}")
        elif weight:
            reasons.append(f"objective.{name} stays at {weight:.3g}, as you set it")
    return dataclasses.replace(run, objective=objective), reasons or ["penalties: there is no R1 or R2 to scale"]
