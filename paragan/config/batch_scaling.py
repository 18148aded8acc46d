"""Settings that are right for one batch, carried to another: what follows the batch, by which rule, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from paragan.config.run import Run
from paragan.core.errors import Unusable
from paragan.losses.adversarial import Adversarial
from paragan.optim.optimizers import SOURCES, Side, at_rate, scaled_rate

WARM_UP_STEPS = 100  # for each doubling of the batch
WARM_UP_SHARE = 0.1  # of the run, at most
GAMMA = "as automatic settings of Karras et al. 2020 (StyleGAN2-ADA); its interval is in steps, and stays"
FEWEST_ROUNDS = 10  # in a half-life of the average, where it had as many


def tuned(
    run: Run, base: int, *, warm_up_steps: int = WARM_UP_STEPS, penalties: bool = False, own: Collection[str] = ()
) -> Run:
    """A run whose settings are right for `base` images a step, as is fit for its batch.

    g.rule, d.rule : how each player's learning rate follows
    warm_up_steps  : over which the rates grow from 0, for each doubling
    penalties      : whether the weights of R1 and R2 follow too
    own            : dotted fields that the user has set: they stay as they are
    """
    if base < 1:
        raise Unusable(f"settings that are right for {base} images a step: it must be 1 or more")
    about = [f"batch {run.batch} over {run.lanes} lanes of {run.batch // run.lanes} images, settings for {base}"]
    for name in ("g", "d"):
        side, of_rate = _rate(run, name, base, own)
        side, of_warm_up = _warm_up(run, name, side, warm_up_steps * max(0.0, math.log2(run.batch / base)), own)
        run = dataclasses.replace(run, **{name: side})
        about += [*of_rate, *of_warm_up]
    run, of_average = _average(run, base, own)
    run, of_penalties = _penalties(run, base, own) if penalties else (run, [])
    return dataclasses.replace(run, about=(*run.about, *about, *of_average, *of_penalties))


def _rate(run: Run, name: str, base: int, own: Collection[str]) -> tuple[Side, list[str]]:
    """A player's learning rate by its rule."""
    side: Side = getattr(run, name)
    if {f"{name}.optimizer.lr", f"{name}.optimizer.inner.lr"} & set(own):
        return side, [f"{name.upper()}: learning rate {side.optimizer.lr:.3g}, set by hand"]
    before, ratio = side.optimizer.lr, run.batch / base
    if ratio == 1:
        return side, [f"{name.upper()}: learning rate {before:.3g}, as it is for this batch"]
    side = dataclasses.replace(side, optimizer=at_rate(side.optimizer, scaled_rate(before, side.rule, run.batch, base)))
    how = f"{before:.3g} x {side.rule}({ratio:g}): {SOURCES[side.rule]}"
    return side, [f"{name.upper()}: learning rate {side.optimizer.lr:.3g} = {how}"]


def _warm_up(run: Run, name: str, side: Side, rounds: float, own: Collection[str]) -> tuple[Side, list[str]]:
    """Over so many rounds, but not much of the run."""
    asked, most = rounds * run.round / 1000, WARM_UP_SHARE * run.kimg
    kimg = float(f"{min(asked, most):.6g}")
    if side.rule == "none" or kimg <= side.warm_up_kimg or f"{name}.warm_up_kimg" in own:
        return side, []
    why = "a tenth of the run, the most there is" if asked > most else f"{rounds:.4g} rounds, for each doubling as many"
    told = f"{name.upper()}: warm-up {kimg:.4g} kimg, {why}: a larger batch begins gently (Goyal et al. 2017)"
    return dataclasses.replace(side, warm_up_kimg=kimg), [told]


def _average(run: Run, base: int, own: Collection[str]) -> tuple[Run, list[str]]:
    """The half-life is in images, and stays; but an average over a few rounds is none."""
    half_life, largest = run.average.half_life_kimg, max((run.batch, *(batch for _, batch in run.ramp)))
    rounds = min(FEWEST_ROUNDS, 1000 * half_life / (base * run.d_steps))
    least = float(f"{rounds * largest * run.d_steps / 1000:.6g}")
    if "average.half_life_kimg" in own or least <= half_life:
        return run, [f"average: half-life stays at {half_life:g} kimg: it is in images"]
    average = dataclasses.replace(run.average, half_life_kimg=least)
    told = f"average: half-life {least:.4g} kimg: {half_life:g} would be fewer than {rounds:.3g} rounds"
    return dataclasses.replace(run, average=average), [told]


def _penalties(run: Run, base: int, own: Collection[str]) -> tuple[Run, list[str]]:
    """R1 and R2 weigh as much less as the batch is larger: gamma = 0.0002 resolution^2 / batch in StyleGAN2-ADA."""
    objective, told = run.objective, list[str]()
    if not isinstance(objective, Adversarial):
        return run, ["penalties: the objective is your own, and stays as it is"]
    for name, weight in (("r1", objective.r1), ("r2", objective.r2)):
        if weight and f"objective.{name}" not in own:
            value = float(f"{weight * base / run.batch:.6g}")
            objective = dataclasses.replace(objective, **{name: value})
            told.append(f"objective.{name} {value:.3g} = {weight:.3g} x {base} / {run.batch}: {GAMMA}")
        elif weight:
            told.append(f"objective.{name} stays at {weight:.3g}, as you set it")
    return dataclasses.replace(run, objective=objective), told or ["penalties: there is no R1 or R2 that could follow"]
