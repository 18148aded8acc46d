"""Read a run folder for the report: settings, statistics, scores, events; everything except the images."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.jsonl import Row, is_number, kimg_and_values, read_jsonl
from paragan.core.schema import parse_yaml
from paragan.report import number_format
from paragan.report.labels import LabelProgress, read_labels

MAX_RUN_YAML_CHARS = 100_000  # a page shows at most this much of run.yaml


class StatsColumns:
    """The columns of stats.jsonl by key, in order of appearance."""

    def __init__(self, rows: Sequence[Row]) -> None:
        keys = dict.fromkeys(key for row in rows for key in row if key != "nonfinite")
        columns = {key: kimg_and_values(rows, key) for key in keys}
        self._columns = {key: column for key, column in columns.items() if column[1]}

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """Return `(kimg, values)` of a key; both empty for a key that was never recorded."""
        return self._columns.get(key, ([], []))

    def finite_values(self, key: str) -> list[float]:
        """Return the values of a key without nan and infinities."""
        return [value for value in self.column(key)[1] if math.isfinite(value)]


@dataclass(frozen=True)
class HealthEvent:
    """A line of health.jsonl."""

    kimg: float
    kind: str
    message: str
    action: str


@dataclass(frozen=True)
class MembershipChange:
    """A line of members.jsonl: ranks were lost or joined."""

    kimg: float
    members: tuple[int, ...]  # since then
    lost: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass(frozen=True)
class RunData:
    """The content of a run folder."""

    path: Path
    run_yaml: str  # text of run.yaml, shortened to MAX_RUN_YAML_CHARS
    run: Mapping[str, Any]  # run.yaml, parsed
    stats: StatsColumns
    scores: list[Row]
    labels: list[LabelProgress]  # of a per-label run
    events: list[HealthEvent]
    membership: list[MembershipChange]
    decisions: list[tuple[float, str]]  # (kimg, a change by the data pipeline)
    bad_files: list[str]  # lines of `image<tab>reason`
    saved_kimg: float  # the progress of the run by its newest checkpoint, which may be between two ticks

    def get_setting(self, *paths: str) -> Any:
        """Return the first of these dotted fields of the run that is set, or None."""
        for path in paths:
            item: Any = self.run
            for key in path.split("."):
                item = item.get(key) if isinstance(item, Mapping) else None
            if item is not None:
                return item
        return None

    def get_setting_name(self, *paths: str) -> str:
        """Return a setting as a word: the value, or the name of a group of fields; "" if it is not set."""
        setting = self.get_setting(*paths)
        if isinstance(setting, Mapping):
            names = (setting[key] for key in ("name", "kind", "source", "path") if key in setting)
            setting = next(names, None)
        return "" if setting is None or isinstance(setting, Mapping | list) else number_format.format_value(setting)

    @property
    def reasons(self) -> list[str]:
        """The reasons for settings that were chosen automatically, a line each."""
        lines = self.run.get("reasons")
        return [number_format.format_value(line) for line in lines] if isinstance(lines, list) else []

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def kimg(self) -> float:
        """The progress of the run by its last tick or checkpoint; of a per-label run the sum over its labels."""
        label_kimg = sum(label.kimg for label in self.labels)
        return max([*self.stats.finite_values("Progress/kimg"), self.saved_kimg]) or label_kimg

    @property
    def total_kimg(self) -> float | None:
        """The planned length of the run, if run.yaml has it."""
        total = self.get_setting("kimg")
        return float(total) if is_number(total) else None

    @property
    def state(self) -> str:
        """`no ticks yet`, `unfinished` or `finished`."""
        if not self.stats.keys and not self.kimg:
            return "no ticks yet"
        if self.labels and any(label.state != "done" for label in self.labels):
            return "unfinished"
        if self.total_kimg is None:
            return "finished" if (self.path / "model" / "model.safetensors").exists() else "unfinished"
        return "finished" if self.stats.keys and self.kimg >= self.total_kimg * (1 - 1e-6) else "unfinished"


def read_run_data(run_dir: Path) -> RunData:
    """Read a run folder.

    Raises:
        UsageError: the folder holds no run, or one of its files cannot be read.
    """
    path = Path(run_dir)
    file = path / "run.yaml"
    if not file.is_file():
        raise UsageError(_missing_run_message(path))
    try:
        text = file.read_text("utf-8")
        run = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{file}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(run, Mapping):
        raise UsageError(f"{file}: not a run. Use the run.yaml that `paragan train` wrote")
    if "recipe" not in run:
        raise UsageError(f"{file}: the field recipe is missing: not a run of paragan")
    if len(text) > MAX_RUN_YAML_CHARS:
        text = f"{text[:MAX_RUN_YAML_CHARS]}\n... {len(text) - MAX_RUN_YAML_CHARS:,} more characters in run.yaml"
    stats = read_jsonl(path / "stats.jsonl")
    bad_files = path / "bad_files.txt"
    return RunData(
        path=path,
        run_yaml=text,
        run=run,
        stats=StatsColumns(stats),
        scores=read_jsonl(path / "metrics.jsonl"),
        labels=read_labels(path),
        events=read_events(path),
        membership=list(_parse_membership(read_jsonl(path / "members.jsonl"))),
        decisions=_pipeline_decisions(stats),
        bad_files=bad_files.read_text("utf-8", errors="replace").splitlines() if bad_files.is_file() else [],
        saved_kimg=_read_saved_kimg(path / "checkpoints"),
    )


def _read_saved_kimg(folder: Path) -> float:
    """Return the progress that the newest readable checkpoint states; 0 if there is none."""
    for path in sorted((path for path in folder.glob("*/checkpoint.json") if path.parent.name.isdigit()), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads(path.read_text("utf-8"))["clock"]["images"]) / 1000
    return 0.0


def read_events(run_dir: Path) -> list[HealthEvent]:
    """Return what was found wrong with a run."""
    return list(_parse_events(read_jsonl(run_dir / "health.jsonl")))


def _parse_events(rows: Sequence[Row]) -> Iterator[HealthEvent]:
    for row in rows:
        kimg = row.get("kimg")
        if is_number(kimg) and math.isfinite(kimg):
            texts = (number_format.format_value(row.get(key) or "") for key in ("kind", "message", "action"))
            yield HealthEvent(float(kimg), *texts)


def _parse_membership(rows: Sequence[Row]) -> Iterator[MembershipChange]:
    for row in rows:
        kimg = row.get("kimg")
        if is_number(kimg) and all(isinstance(row.get(key), list) for key in ("members", "lost", "joined")):
            members, lost, joined = (
                tuple(rank for rank in row[key] if isinstance(rank, int)) for key in ("members", "lost", "joined")
            )
            yield MembershipChange(float(kimg), members, lost, joined)


def _pipeline_decisions(rows: Sequence[Row]) -> list[tuple[float, str]]:
    result: list[tuple[float, str]] = []
    for row in rows:
        kimg = row.get("Progress/kimg")
        decisions = row.get("Data/decisions")
        if is_number(kimg) and isinstance(decisions, list):
            result += [(kimg, number_format.format_value(decision)) for decision in decisions]
    return result


def _missing_run_message(path: Path) -> str:
    if not path.is_dir():
        return f"RUN_DIR {path}: {'is a file, not a folder' if path.exists() else 'does not exist'}"
    for pattern in ("*/run.yaml", "*/*/run.yaml"):
        below = sorted(str(file.parent) for file in path.glob(pattern))
        if below:
            more = f" and {len(below) - 4} more" if len(below) > 4 else ""
            return f"RUN_DIR {path}: run.yaml is missing; it contains the run folders {', '.join(below[-4:])}{more}"
    above = next((str(parent) for parent in path.resolve().parents if (parent / "run.yaml").is_file()), None)
    hint = f"it is inside the run folder {above}" if above else "`paragan train` makes run folders"
    return f"RUN_DIR {path}: run.yaml is missing; {hint}"
