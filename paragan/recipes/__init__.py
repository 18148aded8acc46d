"""Recipes: functions that return a complete run, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paragan.config.batch_scaling import scale_to_batch
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import apply_overrides, did_you_mean, diff, from_dict, to_dict
from paragan.optim.policies import describe_optim, get_policy, to_cli_args, to_cli_line
from paragan.recipes.autoencoders import super_resolution, tokenizer, vocoder
from paragan.recipes.custom import custom
from paragan.recipes.diffusion import diffusion, distill
from paragan.recipes.digits import digits
from paragan.recipes.images import fashion, folder
from paragan.recipes.published import published_recipes as published

_BUILT_IN = (digits, fashion, folder, tokenizer, super_resolution, vocoder, diffusion, distill, custom)
RECIPES: dict[str, Callable[[], Run]] = {
    recipe.__name__.replace("_", "-"): recipe for recipe in _BUILT_IN
} | published()


def describe_recipes() -> str:
    """Return the names of all recipes and what they are, one a line: the content of recipes.txt."""
    return "".join(f"{name:<24} {(recipe.__doc__ or '').splitlines()[0]}\n" for name, recipe in RECIPES.items())


def get_recipe(name: str) -> Run:
    """Return the run of a recipe. Raises UsageError with the nearest name if there is none."""
    if name not in RECIPES and (Path(name) / "run.yaml").is_file():
        raise UsageError(f"recipe={name}: is a run folder. Use `paragan train {name}/run.yaml --run-dir {name}`")
    if name not in RECIPES and Path(name).exists():
        raise UsageError(f"recipe={name}: is a path, and no recipe. Use `paragan train folder --data {name}`")
    if name not in RECIPES:
        raise UsageError(
            f"recipe={name}: there is no such recipe{did_you_mean(name, RECIPES)} (`paragan recipes` lists them)"
        )
    return RECIPES[name]()


def build_run(
    base: dict[str, Any], overrides: Sequence[tuple[str, str]], policy_name: str = "none", batch_scaling: str = "none"
) -> tuple[Run, list[str]]:
    """Return the run of a plain record with the user's settings, and the reasons for its values, one line each.

    Args:
        overrides: dotted fields and their values, as on the command line.
        policy_name: a policy to apply before the overrides.
        batch_scaling: none, or what of the record is scaled to the user's batch: rates or all.
    """
    if batch_scaling not in ("none", "rates", "all"):
        raise UsageError(f"--batch-scaling {batch_scaling}: what follows the batch is rates, all or none")
    if batch_scaling != "none" and policy_name != "none":
        raise UsageError(
            f"--policy {policy_name}: has rates for the batch at hand. Leave --batch-scaling {batch_scaling} out"
        )
    run, lines = _apply_policy(base, overrides, policy_name)
    lines += _describe_borrowed_rates(run)
    before = run.reasons
    run = dataclasses.replace(run, reasons=(*before, *lines))
    if batch_scaling != "none":
        right = from_dict(Run, {name: base[name] for name in ("batch",) if name in base})
        run = scale_to_batch(
            run, right.batch, scale_penalties=batch_scaling == "all", fixed_fields={name for name, _ in overrides}
        )
    run = dataclasses.replace(
        run, reasons=tuple(dict.fromkeys(run.reasons))
    )  # said once, however often it is asked for
    return run, [line for line in run.reasons if line not in before]


def _describe_borrowed_rates(run: Run) -> list[str]:
    """Say so if plain gradient steps are taken at learning rates of another optimizer."""
    players = {"G": run.g.optimizer, "D": run.d.optimizer}
    borrowed = {name: optimizer for name, optimizer in players.items() if optimizer.name != "sgd"}
    if not run.strategy.requires_sgd or not borrowed:
        return []
    rates = " and ".join(f"{name} at {optimizer.lr:g}" for name, optimizer in borrowed.items())
    kinds = " and ".join(dict.fromkeys(optimizer.name for optimizer in borrowed.values()))
    return [
        f"strategy {run.strategy.name}: plain gradient steps, {rates}, which are rates for {kinds}. --policy dposg and "
        "--policy dqgan have rates for gradient steps"
    ]


def _check_gradient_descent(policy_name: str, run: Run) -> None:
    optimizers = {"g": run.g.optimizer.name, "d": run.d.optimizer.name}
    others = {name: optimizer for name, optimizer in optimizers.items() if optimizer != "sgd"}
    if others:
        given = " and ".join(f"{name.upper()} {optimizer}" for name, optimizer in others.items())
        remedy = " and ".join(f"--{name}.optimizer=sgd" for name in others)
        raise UsageError(
            f"--policy {policy_name}: gives {given}, and --strategy.paper_update=true moves by gradient descent. "
            f"Leave --policy out, or set {remedy}"
        )


def _apply_policy(
    base: dict[str, Any], overrides: Sequence[tuple[str, str]], policy_name: str
) -> tuple[Run, list[str]]:
    settings = apply_overrides(base, overrides)
    if policy_name == "none":
        return from_dict(Run, settings), []
    fit = from_dict(Run, {name: value for name, value in settings.items() if name not in ("g", "d", "d_steps", "nets")})
    nets = _tag_of(settings.get("nets", fit.nets.name))
    policy = get_policy(policy_name, fit.batch, fit.g_batch, nets)
    policy_fields = {"g": to_dict(policy.g), "d": to_dict(policy.d), "d_steps": policy.d_steps}
    by_name = [(name, text) for name, text in overrides if name in ("nets", "nets.name")]  # then what is said of them
    others = by_name and policy.settings.get("nets", nets) != nets  # than those the policy is about
    also = {name: value for name, value in policy.settings.items() if not (others and name.startswith("nets"))}
    rest = [setting for setting in overrides if setting not in by_name]
    run = from_dict(Run, apply_overrides(base | policy_fields, [*by_name, *to_cli_args(also), *rest]))
    if run.strategy.requires_sgd:
        _check_gradient_descent(policy_name, run)
    user_fields = [name for name, _, _ in diff(policy_fields, {name: to_dict(run)[name] for name in policy_fields})]
    user_fields += [name for name, value in also.items() if _tag_of(_nested_value(to_dict(run), name)) != value]
    user_fields += ["nets"] if others else []
    steps = f"{run.d_steps} D steps for one of G" if run.d_steps > 1 else "one D step for one of G"
    lines = [
        f"G {describe_optim(run.g)}",
        f"D {describe_optim(run.d)}",
        f"{steps}: {run.total_rounds:,} steps of G in {run.kimg:g} kimg",
        *([f"also sets {to_cli_line(also)}"] if also else []),
        *([f"set by hand: {', '.join(user_fields)}"] if user_fields else []),
        *policy.reasons,
    ]
    return run, [f"policy {policy_name}: {line}" for line in lines]


def _nested_value(data: dict[str, Any], path: str) -> Any:
    """Return the value of a dotted field."""
    first, _, rest = path.partition(".")
    return _nested_value(data[first], rest) if rest else data[first]


def _tag_of(part: Any) -> Any:
    """Return the name of a part, which may be given by its name alone."""
    return part.get("name", "") if isinstance(part, dict) else part
