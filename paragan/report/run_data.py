"""What is in a run folder, but for its pictures."""

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

MAX_RUN_YAML_CHARS = 100_000  # characters of run.yaml that are kept


class StatsColumns:
    """The columns of stats.jsonl by key, in order of appearance."""

    def __init__(self, rows: Sequence[Row]) -> None:
        keys = dict.fromkeys(key for row in rows for key in row if key != "nonfinite")
        found = {key: kimg_and_values(rows, key) for key in keys}
        self._columns = {key: column for key, column in found.items() if column[1]}

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """`(kimg, values)`; empty for a key that was never recorded."""
        return self._columns.get(key, ([], []))

    def finite_values(self, key: str) -> list[float]:
        return [value for value in self.column(key)[1] if math.isfinite(value)]


@dataclass(frozen=True)
class HealthEvent:
    """What the watcher of a run's health has told: a line of health.jsonl."""

    kimg: float
    kind: str
    message: str
    action: str


@dataclass(frozen=True)
class RunData:
    path: Path
    run_yaml: str  # run.yaml
    run: Mapping[str, Any]  # the same
    stats: StatsColumns
    scores: list[Row]
    labels: list[LabelProgress]  # of a run per label
    events: list[HealthEvent]
    decisions: list[tuple[float, str]]  # kimg, and what the data pipeline changed
    bad_files: list[str]  # image, tab, reason

    def get_setting(self, *paths: str) -> Any:
        """The first of some dotted places in the run that is set."""
        for place in paths:
            item: Any = self.run
            for key in place.split("."):
                item = item.get(key) if isinstance(item, Mapping) else None
            if item is not None:
                return item
        return None

    def get_setting_name(self, *paths: str) -> str:
        """A setting in a word: itself, or the name of what it describes; empty where there is none."""
        setting = self.get_setting(*paths)
        if isinstance(setting, Mapping):
            names = (setting[key] for key in ("name", "kind", "source", "path") if key in setting)
            setting = next(names, None)
        return "" if setting is None or isinstance(setting, Mapping | list) else number_format.format_value(setting)

    @property
    def reasons(self) -> list[str]:
        """Why the run is as it is, a line each."""
        lines = self.run.get("reasons")
        return [number_format.format_value(line) for line in lines] if isinstance(lines, list) else []

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def kimg(self) -> float:
        """How far it has come, by its last tick, or by those of its labels."""
        of_labels = sum(label.kimg for label in self.labels)
        return max(self.stats.finite_values("Progress/kimg"), default=of_labels)

    @property
    def total_kimg(self) -> float | None:
        """How far it is to come, where run.yaml says so."""
        total = self.get_setting("kimg", "duration.kimg")
        return float(total) if is_number(total) else None

    @property
    def state(self) -> str:
        if not self.stats.keys and not self.kimg:
            return "no ticks yet"
        if self.labels and any(label.state != "done" for label in self.labels):
            return "unfinished"
        if self.total_kimg is None:
            return "finished" if (self.path / "model" / "model.safetensors").exists() else "unfinished"
        return "finished" if self.stats.keys and self.kimg >= self.total_kimg * (1 - 1e-6) else "unfinished"


def read_run_data(run_dir: Path) -> RunData:
    """Unusable is a folder that holds no run, or one with a file that cannot be read."""
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
        raise UsageError(f"{file}: holds no run; the resolved run that `paragan train` wrote belongs there")
    if "recipe" not in run:
        raise UsageError(f"{file}: is of another program: the field recipe, which every run of paragan has, is missing")
    if len(text) > MAX_RUN_YAML_CHARS:
        text = f"{text[:MAX_RUN_YAML_CHARS]}\n... {len(text) - MAX_RUN_YAML_CHARS:,} more characters in run.yaml"
    rows, scores, health = (read_jsonl(path / f"{name}.jsonl") for name in ("stats", "metrics", "health"))
    listed = path / "bad_files.txt"
    bad = listed.read_text("utf-8", errors="replace").splitlines() if listed.is_file() else []
    events = [*_parse_events(health)]
    return RunData(
        path, text, run, StatsColumns(rows), scores, read_labels(path), events, _pipeline_decisions(rows), bad
    )


def _parse_events(rows: Sequence[Row]) -> Iterator[HealthEvent]:
    for row in rows:
        kimg = row.get("kimg")
        if is_number(kimg) and math.isfinite(kimg):
            told = (number_format.format_value(row.get(key) or "") for key in ("kind", "message", "action"))
            yield HealthEvent(float(kimg), *told)


def _pipeline_decisions(rows: Sequence[Row]) -> list[tuple[float, str]]:
    told = [(row.get("Progress/kimg"), row.get("Data/decisions")) for row in rows]
    return [
        (kimg, number_format.format_value(one))
        for kimg, some in told
        if isinstance(some, list) and is_number(kimg)
        for one in some
    ]


def _missing_run_message(path: Path) -> str:
    if not path.is_dir():
        return f"RUN_DIR {path}: {'is a file, not a folder' if path.exists() else 'does not exist'}"
    for pattern in ("*/run.yaml", "*/*/run.yaml"):
        near = sorted(str(found.parent) for found in path.glob(pattern))
        if near:
            found = ", ".join(near[-4:]) + (f" and {len(near) - 4} more" if len(near) > 4 else "")
            return f"RUN_DIR {path}: run.yaml is missing; under it are the run folders {found}"
    above = next((str(parent) for parent in path.resolve().parents if (parent / "run.yaml").is_file()), None)
    hint = f"; it is inside the run folder {above}" if above else "; `paragan train` makes run folders"
    return f"RUN_DIR {path}: run.yaml is missing{hint}"
