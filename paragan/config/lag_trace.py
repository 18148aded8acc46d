"""How old what each team saw was, round by round: lags.jsonl, and a run that repeats it in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from paragan.core.errors import Unusable
from paragan.core.jsonl import Records, Row, read
from paragan.game.replay_policy import Pattern
from paragan.strategies.async_paragan import Async

NAME = "lags.jsonl"


def record(folder: Path, step: int, lags: Mapping[str, Sequence[int]]) -> None:
    """The lags of the rounds up to `step`."""
    Records(folder / NAME).append({"Progress/step": step, "first": step - len(lags["fakes"]), **lags})


def repeating(strategy: Async) -> Async:
    """The strategy with the lags of the run that `lags_of` names."""
    if not strategy.lags_of:
        return strategy
    if strategy.lagging:
        raise Unusable("strategy.lags_of says what the lags are: leave strategy.fake_lags and critic_lags out")
    path = Path(strategy.lags_of) / NAME
    rows = read(path)
    if not rows:
        ran = "a run with --strategy async on two or more ranks has one"
        raise Unusable(f"strategy.lags_of={strategy.lags_of}: there is no {path}; {ran}")
    try:
        fakes, critic = _joined(rows, path)
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{path} is no record of lags: {error!r}") from error
    return dataclasses.replace(strategy, fake_lags=fakes, critic_lags=critic, lags_of="")


def _joined(rows: Sequence[Row], path: Path) -> tuple[Pattern, Pattern]:
    fakes, critic = list[int](), list[int]()
    for row in rows:
        if row["first"] != len(fakes):
            missing = f"rounds {len(fakes)} to {row['first'] - 1}"
            raise Unusable(f"{path} lacks {missing}: that run was stopped and resumed")
        fakes += row["fakes"]
        critic += row["critic"]
    pattern = TypeAdapter[Pattern](Pattern)
    return pattern.validate_python(fakes), pattern.validate_python(critic)
