"""Named runs: functions that return a complete record."""

from __future__ import annotations

from collections.abc import Callable

from ..config import nearest
from ..errors import Unusable
from ..train.run import Run
from .digits import digits
from .images import fashion, folder

RECIPES: dict[str, Callable[[], Run]] = {recipe.__name__: recipe for recipe in (digits, fashion, folder)}


def recipe(name: str) -> Run:
    """The run of a recipe. Unusable names the nearest."""
    if name not in RECIPES:
        raise Unusable(f"there is no recipe {name}{nearest(name, RECIPES)} (`paragan recipes` lists them)")
    return RECIPES[name]()
