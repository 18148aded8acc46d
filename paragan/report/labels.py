"""The labels of a run per label: how far each is, whether or not all are trained."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paragan.core.jsonl import Row, is_number, latest, read
from paragan.report import number_format

MOST = 1000  # labels that a page lists


@dataclass(frozen=True)
class Label:
    """One game of a run per label."""

    number: int
    name: str
    kimg: float = 0.0
    seconds: float = 0.0
    images: int | None = None  # of its class
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    worker: str = ""
    folder: str = ""  # relative to the run's; empty where it is not there
    state: str = "not begun"  # or begun, or done


def labels_of(run_dir: Path) -> list[Label]:
    """Those of labels.jsonl, which is written when all are done; before, those whose folders are there, and those that
    the model waits for. Nothing in the folder of another run."""
    folders = _folders(run_dir)
    table = [one for row in read(run_dir / "labels.jsonl")[:MOST] for one in _told(row, folders)]
    if table:
        return table
    names, counts = _classes(run_dir) if folders else ([], [])
    found = {number: _begun(run_dir, number, folder, names) for number, folder in folders.items()}
    waiting = {number: Label(number, name) for number, name in enumerate(names)}
    every = sorted((waiting | found).items())[:MOST]
    return [replace(one, images=counts[number]) if number < len(counts) else one for number, one in every]


def _told(row: Row, folders: Mapping[int, str]) -> Iterator[Label]:
    number, scores = row.get("label"), row.get("scores")
    if isinstance(number, int):
        yield Label(
            number,
            number_format.value(row.get("name", "")),
            _number(row.get("kimg")),
            _number(row.get("seconds")),
            row["images"] if isinstance(row.get("images"), int) else None,
            _finite(scores),
            number_format.value(row.get("worker", "")),
            folder := folders.get(number, ""),
            "begun" if "." in folder else "done",  # again
        )


def _folders(run_dir: Path) -> dict[int, str]:
    """Where each label is, by number; of several folders of one label that which was taken last."""
    found = dict[int, tuple[float, str]]()
    for path in (run_dir / "labels").glob("[0-9]*"):
        match = re.fullmatch(r"(\d{4,})(?:\.(\d+))?", path.name)
        if match and (path / "run.yaml").is_file():
            taken = float(match[2] or "inf")
            found[int(match[1])] = max(found.get(int(match[1]), (-1.0, "")), (taken, f"labels/{path.name}"))
    return {number: folder for number, (_, folder) in sorted(found.items())}


def _begun(run_dir: Path, number: int, folder: str, names: list[str]) -> Label:
    rows = read(run_dir / folder / "stats.jsonl")
    last: Row = rows[-1] if rows else {}
    scores = latest(read(run_dir / folder / "metrics.jsonl"))
    name = names[number] if number < len(names) else str(number)
    kimg, seconds = _number(last.get("Progress/kimg")), _number(last.get("Timing/total_s"))
    return Label(number, name, kimg, seconds, None, _finite(scores), "", folder, "begun" if "." in folder else "done")


def _classes(run_dir: Path) -> tuple[list[str], list[int]]:
    """Names and numbers of images, as the model has them."""
    try:
        about = json.loads((run_dir / "model" / "config.json").read_text("utf-8"))
        counts = [count for count in about.get("images", []) if isinstance(count, int)]
        return [number_format.value(name) for name in about["classes"]], counts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], []


def _number(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


def _finite(scores: Any) -> dict[str, float]:
    return {
        number_format.value(name): float(value)
        for name, value in (scores.items() if isinstance(scores, Mapping) else ())
        if is_number(value)
    }
