"""How old what each team saw was, round by round: lags.jsonl, and a run that repeats it in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, Row, read_jsonl
from paragan.game.replay_policy import LagPattern
from paragan.strategies.async_paragan import Async

LAGS_FILE = "lags.jsonl"


def append_lags(folder: Path, step: int, lags: Mapping[str, Sequence[int]]) -> None:
    """The lags of the rounds up to `step`."""
    JsonlFile(folder / LAGS_FILE).append({"Progress/step": step, "first": step - len(lags["fakes"]), **lags})


def with_recorded_lags(strategy: Async) -> Async:
    """The strategy with the lags of the run that `lags_of` names."""
    if not strategy.lags_from_run:
        return strategy
    if strategy.has_fixed_lags:
        raise UsageError("strategy.lags_from_run says what the lags are: leave strategy.fake_lags and critic_lags out")
    path = Path(strategy.lags_from_run) / LAGS_FILE
    rows = read_jsonl(path)
    if not rows:
        ran = "a run with --strategy async on two or more ranks has one"
        raise UsageError(f"strategy.lags_from_run={strategy.lags_from_run}: there is no {path}; {ran}")
    try:
        fakes, critic = _join_rows(rows, path)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no record of lags: {error!r}") from error
    return dataclasses.replace(strategy, fake_lags=fakes, critic_lags=critic, lags_from_run="")


def _join_rows(rows: Sequence[Row], path: Path) -> tuple[LagPattern, LagPattern]:
    fakes, critic = list[int](), list[int]()
    for row in rows:
        if row["first"] != len(fakes):
            missing = f"rounds {len(fakes)} to {row['first'] - 1}"
            raise UsageError(f"{path} lacks {missing}: that run was stopped and resumed")
        fakes += row["fakes"]
        critic += row["critic"]
    pattern = TypeAdapter[LagPattern](LagPattern)
    return pattern.validate_python(fakes), pattern.validate_python(critic)
