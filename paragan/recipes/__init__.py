"""Named runs: functions that return a complete record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paragan.config.batch_scaling import tuned
from paragan.config.run import Run
from paragan.core.errors import Unusable
from paragan.core.schema import build, differences, nearest, override, plain
from paragan.optim.policies import described, policy, stated, written
from paragan.recipes.custom import custom
from paragan.recipes.digits import digits
from paragan.recipes.images import fashion, folder
from paragan.recipes.published import recipes as published

_OURS = (digits, fashion, folder, custom)
RECIPES: dict[str, Callable[[], Run]] = {recipe.__name__: recipe for recipe in _OURS} | published()


def recipe(name: str) -> Run:
    """The run of a recipe. Unusable names the nearest."""
    if name not in RECIPES:
        raise Unusable(f"there is no recipe {name}{nearest(name, RECIPES)} (`paragan recipes` lists them)")
    return RECIPES[name]()


def asked(
    data: dict[str, Any], settings: Sequence[tuple[str, str]], by: str = "none", tune: str = "none"
) -> tuple[Run, list[str]]:
    """The run of a plain record, with the policy `by` laid over it and then the user's settings, or with those of the
    record carried to the user's batch (`tune`: rates, all); and why it is as it is, a line each."""
    if tune not in ("none", "rates", "all"):
        raise Unusable(f"--tune {tune}: what follows the batch is rates, all or none")
    if tune != "none" and by != "none":
        raise Unusable(f"--policy {by} has rates for the batch at hand: leave --tune {tune} out")
    run, lines = _with_policy(data, settings, by)
    before = run.about
    run = dataclasses.replace(run, about=(*before, *lines))
    if tune != "none":
        right = build(Run, {name: data[name] for name in ("batch",) if name in data})
        run = tuned(run, right.batch, penalties=tune == "all", own={name for name, _ in settings})
    run = dataclasses.replace(run, about=tuple(dict.fromkeys(run.about)))  # said once, however often it is asked for
    return run, [line for line in run.about if line not in before]


def _with_policy(data: dict[str, Any], settings: Sequence[tuple[str, str]], by: str) -> tuple[Run, list[str]]:
    wanted = override(data, settings)
    if by == "none":
        return build(Run, wanted), []
    fit = build(Run, {name: value for name, value in wanted.items() if name not in ("g", "d", "d_steps", "nets")})
    nets = _name(wanted.get("nets", fit.nets.name))
    chosen = policy(by, fit.batch, fit.g_batch, nets)
    given = {"g": plain(chosen.g), "d": plain(chosen.d), "d_steps": chosen.d_steps}
    by_name = [(name, text) for name, text in settings if name in ("nets", "nets.name")]  # then what is said of them
    others = by_name and chosen.settings.get("nets", nets) != nets  # than those the policy is about
    also = {name: value for name, value in chosen.settings.items() if not (others and name.startswith("nets"))}
    rest = [setting for setting in settings if setting not in by_name]
    run = build(Run, override(data | given, [*by_name, *written(also), *rest]))
    for name, side in (("g", run.g), ("d", run.d)):
        if run.strategy.plain_descent and side.optimizer.name != "sgd":
            raise Unusable(
                f"--policy {by} gives {name.upper()} {side.optimizer.name}, and --strategy.exact=true moves by "
                f"gradient descent: leave --policy out, or set --{name}.optimizer=sgd"
            )
    own = [name for name, _, _ in differences(given, {name: plain(run)[name] for name in given})]
    own += [name for name, value in also.items() if _name(_at(plain(run), name)) != value]
    own += ["nets"] if others else []
    steps = f"{run.d_steps} D steps for one of G" if run.d_steps > 1 else "one D step for one of G"
    lines = [
        f"G {described(run.g)}",
        f"D {described(run.d)}",
        f"{steps}: {run.rounds:,} steps of G in {run.kimg:g} kimg",
        *([f"also sets {stated(also)}"] if also else []),
        *([f"set by hand: {', '.join(own)}"] if own else []),
        *chosen.reasons,
    ]
    return run, [f"policy {by}: {line}" for line in lines]


def _at(data: dict[str, Any], path: str) -> Any:
    """The value of a dotted field."""
    first, _, rest = path.partition(".")
    return _at(data[first], rest) if rest else data[first]


def _name(part: Any) -> Any:
    """What a part is called that may be given by its name alone."""
    return part.get("name", "") if isinstance(part, dict) else part
