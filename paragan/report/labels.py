"""The labels of a run per label: how far each is, whether or not all are trained."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paragan.core.jsonl import Row, is_number, newest_values, read_jsonl
from paragan.report import number_format

MAX_LABELS = 1000  # labels that a page lists


@dataclass(frozen=True)
class LabelProgress:
    """One game of a run per label."""

    number: int
    name: str
    kimg: float = 0.0
    seconds: float = 0.0
    num_images: int | None = None  # of its class
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    worker: str = ""
    folder: str = ""  # relative to the run's; empty where it is not there
    state: str = "not begun"  # or begun, or done


def read_labels(run_dir: Path) -> list[LabelProgress]:
    """Those of labels.jsonl, which is written when all are done; before, those whose folders are there, and those that
    the model waits for. Nothing in the folder of another run."""
    folders = _label_folders(run_dir)
    table = [one for row in read_jsonl(run_dir / "labels.jsonl")[:MAX_LABELS] for one in _from_table_row(row, folders)]
    if table:
        return table
    names, counts = _class_names_and_counts(run_dir) if folders else ([], [])
    found = {number: _from_label_folder(run_dir, number, folder, names) for number, folder in folders.items()}
    waiting = {number: LabelProgress(number, name) for number, name in enumerate(names)}
    every = sorted((waiting | found).items())[:MAX_LABELS]
    return [replace(one, num_images=counts[number]) if number < len(counts) else one for number, one in every]


def _from_table_row(row: Row, folders: Mapping[int, str]) -> Iterator[LabelProgress]:
    number, scores = row.get("label"), row.get("scores")
    if isinstance(number, int):
        yield LabelProgress(
            number,
            number_format.format_value(row.get("name", "")),
            _number_or_zero(row.get("kimg")),
            _number_or_zero(row.get("seconds")),
            row["images"] if isinstance(row.get("images"), int) else None,
            _finite_scores(scores),
            number_format.format_value(row.get("worker", "")),
            folder := folders.get(number, ""),
            "begun" if "." in folder else "done",  # again
        )


def _label_folders(run_dir: Path) -> dict[int, str]:
    """Where each label is, by number; of several folders of one label that which was taken last."""
    found = dict[int, tuple[float, str]]()
    for path in (run_dir / "labels").glob("[0-9]*"):
        match = re.fullmatch(r"(\d{4,})(?:\.(\d+))?", path.name)
        if match and (path / "run.yaml").is_file():
            taken = float(match[2] or "inf")
            found[int(match[1])] = max(found.get(int(match[1]), (-1.0, "")), (taken, f"labels/{path.name}"))
    return {number: folder for number, (_, folder) in sorted(found.items())}


def _from_label_folder(run_dir: Path, number: int, folder: str, names: list[str]) -> LabelProgress:
    rows = read_jsonl(run_dir / folder / "stats.jsonl")
    last: Row = rows[-1] if rows else {}
    scores = newest_values(read_jsonl(run_dir / folder / "metrics.jsonl"))
    name = names[number] if number < len(names) else str(number)
    kimg, seconds = _number_or_zero(last.get("Progress/kimg")), _number_or_zero(last.get("Timing/total_s"))
    return LabelProgress(
        number, name, kimg, seconds, None, _finite_scores(scores), "", folder, "begun" if "." in folder else "done"
    )


def _class_names_and_counts(run_dir: Path) -> tuple[list[str], list[int]]:
    """Names and numbers of images, as the model has them."""
    try:
        about = json.loads((run_dir / "model" / "config.json").read_text("utf-8"))
        counts = [count for count in about.get("images", []) if isinstance(count, int)]
        return [number_format.format_value(name) for name in about["classes"]], counts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], []


def _number_or_zero(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


def _finite_scores(scores: Any) -> dict[str, float]:
    return {
        number_format.format_value(name): float(value)
        for name, value in (scores.items() if isinstance(scores, Mapping) else ())
        if is_number(value)
    }
