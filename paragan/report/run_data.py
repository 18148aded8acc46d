"""What is in a run folder, but for its pictures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.core.errors import Unusable
from paragan.core.jsonl import Row, columns, is_number, read
from paragan.core.schema import parsed
from paragan.report import number_format
from paragan.report.labels import Label, labels_of

TEXT = 100_000  # characters of run.yaml that are kept


class Stats:
    """The columns of stats.jsonl by key, in order of appearance."""

    def __init__(self, rows: Sequence[Row]) -> None:
        keys = dict.fromkeys(key for row in rows for key in row if key != "nonfinite")
        found = {key: columns(rows, key) for key in keys}
        self._columns = {key: column for key, column in found.items() if column[1]}

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """`(kimg, values)`; empty for a key that was never recorded."""
        return self._columns.get(key, ([], []))

    def finite(self, key: str) -> list[float]:
        return [value for value in self.column(key)[1] if math.isfinite(value)]


@dataclass(frozen=True)
class Event:
    """What the watcher of a run's health has told: a line of health.jsonl."""

    kimg: float
    kind: str
    message: str
    action: str


@dataclass(frozen=True)
class Folder:
    path: Path
    text: str  # run.yaml
    run: Mapping[str, Any]  # the same
    stats: Stats
    scores: list[Row]
    labels: list[Label]  # of a run per label
    events: list[Event]
    decisions: list[tuple[float, str]]  # kimg, and what the data pipeline changed
    bad_files: list[str]  # image, tab, reason

    def setting(self, *places: str) -> Any:
        """The first of some dotted places in the run that is set."""
        for place in places:
            item: Any = self.run
            for key in place.split("."):
                item = item.get(key) if isinstance(item, Mapping) else None
            if item is not None:
                return item
        return None

    def word(self, *places: str) -> str:
        """A setting in a word: itself, or the name of what it describes; empty where there is none."""
        setting = self.setting(*places)
        if isinstance(setting, Mapping):
            names = (setting[key] for key in ("name", "kind", "source", "path") if key in setting)
            setting = next(names, None)
        return "" if setting is None or isinstance(setting, Mapping | list) else number_format.value(setting)

    @property
    def about(self) -> list[str]:
        """Why the run is as it is, a line each."""
        lines = self.run.get("about")
        return [number_format.value(line) for line in lines] if isinstance(lines, list) else []

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def kimg(self) -> float:
        """How far it has come, by its last tick, or by those of its labels."""
        of_labels = sum(label.kimg for label in self.labels)
        return max(self.stats.finite("Progress/kimg"), default=of_labels)

    @property
    def total(self) -> float | None:
        """How far it is to come, where run.yaml says so."""
        total = self.setting("kimg", "duration.kimg")
        return float(total) if is_number(total) else None

    @property
    def state(self) -> str:
        if not self.stats.keys and not self.kimg:
            return "no ticks yet"
        if self.labels and any(label.state != "done" for label in self.labels):
            return "unfinished"
        if self.total is None:
            return "finished" if (self.path / "model" / "model.safetensors").exists() else "unfinished"
        return "finished" if self.stats.keys and self.kimg >= self.total * (1 - 1e-6) else "unfinished"


def read_folder(run_dir: Path) -> Folder:
    """Unusable is a folder that holds no run, or one with a file that cannot be read."""
    path = Path(run_dir)
    file = path / "run.yaml"
    if not file.is_file():
        raise Unusable(_no_run(path))
    try:
        text = file.read_text("utf-8")
        run = parsed(text)
    except ValueError as error:
        raise Unusable(f"{file}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(run, Mapping):
        raise Unusable(f"{file}: holds no run; the resolved run that `paragan train` wrote belongs there")
    if "recipe" not in run:
        raise Unusable(f"{file}: is of another program: the field recipe, which every run of paragan has, is missing")
    if len(text) > TEXT:
        text = f"{text[:TEXT]}\n... {len(text) - TEXT:,} more characters in run.yaml"
    rows, scores, health = (read(path / f"{name}.jsonl") for name in ("stats", "metrics", "health"))
    listed = path / "bad_files.txt"
    bad = listed.read_text("utf-8", errors="replace").splitlines() if listed.is_file() else []
    events = [*_events(health)]
    return Folder(path, text, run, Stats(rows), scores, labels_of(path), events, _decisions(rows), bad)


def _events(rows: Sequence[Row]) -> Iterator[Event]:
    for row in rows:
        kimg = row.get("kimg")
        if is_number(kimg) and math.isfinite(kimg):
            told = (number_format.value(row.get(key) or "") for key in ("kind", "message", "action"))
            yield Event(float(kimg), *told)


def _decisions(rows: Sequence[Row]) -> list[tuple[float, str]]:
    told = [(row.get("Progress/kimg"), row.get("Data/decisions")) for row in rows]
    return [
        (kimg, number_format.value(one))
        for kimg, some in told
        if isinstance(some, list) and is_number(kimg)
        for one in some
    ]


def _no_run(path: Path) -> str:
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
