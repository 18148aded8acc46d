"""lags.jsonl: how old what each team trained against was, round by round.

A run with `strategy.lags_from_run` repeats these lags in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from paragan.core.errors import UsageError
from paragan.core.jsonl import JsonlFile, Row, read_jsonl
from paragan.game.replay_policy import LagPattern

LAGS_FILE = "lags.jsonl"


def append_lags(folder: Path, step: int, lags: Mapping[str, Sequence[int]]) -> None:
    """Append the lags of the rounds up to `step`."""
    JsonlFile(folder / LAGS_FILE).append({"Progress/step": step, "first": step - len(lags["fakes"]), **lags})


def read_lags(run_dir: str) -> tuple[LagPattern, LagPattern]:
    """Return the lags of the fakes and of the discriminator that a run recorded.

    Raises:
        UsageError: if there is no such file, or it is incomplete.
    """
    path = Path(run_dir) / LAGS_FILE
    rows = read_jsonl(path)
    if not rows:
        raise UsageError(
            f"strategy.lags_from_run={run_dir}: there is no {path}. Use the folder of a run with --strategy async on "
            "two ranks or more."
        )
    try:
        return _join_rows(rows, path)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not a valid record of lags: {error!r}") from error


def _join_rows(rows: Sequence[Row], path: Path) -> tuple[LagPattern, LagPattern]:
    fake_lags = list[int]()
    critic_lags = list[int]()
    for row in rows:
        if row["first"] != len(fake_lags):
            missing = f"rounds {len(fake_lags)} to {row['first'] - 1}"
            raise UsageError(f"{path} lacks {missing}: that run was stopped and resumed")
        fake_lags += row["fakes"]
        critic_lags += row["critic"]
    pattern = TypeAdapter[LagPattern](LagPattern)
    return pattern.validate_python(fake_lags), pattern.validate_python(critic_lags)
