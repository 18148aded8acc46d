"""Named runs: functions that return a complete record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..config import build, differences, nearest, override, plain
from ..errors import Unusable
from ..optim.policies import described, policy
from ..train.run import Run
from .digits import digits
from .images import fashion, folder

RECIPES: dict[str, Callable[[], Run]] = {recipe.__name__: recipe for recipe in (digits, fashion, folder)}


def recipe(name: str) -> Run:
    """The run of a recipe. Unusable names the nearest."""
    if name not in RECIPES:
        raise Unusable(f"there is no recipe {name}{nearest(name, RECIPES)} (`paragan recipes` lists them)")
    return RECIPES[name]()


def asked(data: dict[str, Any], settings: Sequence[tuple[str, str]], by: str = "none") -> tuple[Run, list[str]]:
    """The run of a plain record, with the policy `by` laid over it and then the user's settings; and why its players
    learn as they do, a line each."""
    wanted = override(data, settings)
    if by == "none":
        return build(Run, wanted), []
    fit = build(Run, {name: value for name, value in wanted.items() if name not in ("g", "d", "d_steps")})
    chosen = policy(by, fit.batch, fit.g_batch, fit.nets.name)
    given = {"g": plain(chosen.g), "d": plain(chosen.d), "d_steps": chosen.d_steps}
    run = build(Run, override(data | given, settings))
    for name, side in (("g", run.g), ("d", run.d)):
        if run.strategy.plain_descent and side.optimizer.name != "sgd":
            raise Unusable(
                f"--policy {by} gives {name.upper()} {side.optimizer.name}, and --strategy.exact=true moves by "
                f"gradient descent: leave --policy out, or set --{name}.optimizer=sgd"
            )
    own = [name for name, _, _ in differences(given, {name: plain(run)[name] for name in given})]
    steps = f"{run.d_steps} D steps for one of G" if run.d_steps > 1 else "one D step for one of G"
    lines = [
        f"G {described(run.g)}",
        f"D {described(run.d)}",
        f"{steps}: {run.images // run.round:,} steps of G in {run.kimg:g} kimg",
        *([f"set by hand: {', '.join(own)}"] if own else []),
        *chosen.reasons,
    ]
    return run, [f"policy {by}: {line}" for line in lines]
