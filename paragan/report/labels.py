"""The progress of each label of a per-label run."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paragan.core.jsonl import Row, is_number, newest_values, read_jsonl
from paragan.report import number_format

MAX_LABELS = 1000  # on a page


@dataclass(frozen=True)
class LabelProgress:
    """The state of one label."""

    number: int
    name: str
    kimg: float = 0.0
    seconds: float = 0.0
    num_images: int | None = None  # real images of this label
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    worker: str = ""
    folder: str = ""  # relative to the run folder; "" if it does not exist
    state: str = "not begun"  # "not begun", "begun" or "done"


def read_labels(run_dir: Path) -> list[LabelProgress]:
    """Read the progress of all labels; [] if the run is not per label.

    labels.jsonl exists once all labels are done. Before that, the folders of labels are read, and labels of the model
    without a folder have not begun.
    """
    folders = _label_folders(run_dir)
    table = [one for row in read_jsonl(run_dir / "labels.jsonl")[:MAX_LABELS] for one in _from_table_row(row, folders)]
    if table:
        return table
    names, counts = _class_names_and_counts(run_dir) if folders else ([], [])
    labels = {number: LabelProgress(number, name) for number, name in enumerate(names)}
    for number, folder in folders.items():
        labels[number] = _from_label_folder(run_dir, number, folder, names)
    for number in labels:
        if number < len(counts):
            labels[number] = replace(labels[number], num_images=counts[number])
    return [labels[number] for number in sorted(labels)[:MAX_LABELS]]


def _from_table_row(row: Row, folders: Mapping[int, str]) -> Iterator[LabelProgress]:
    number = row.get("label")
    if isinstance(number, int):
        num_images = row.get("images")
        folder = folders.get(number, "")
        yield LabelProgress(
            number,
            name=number_format.format_value(row.get("name", "")),
            kimg=_number_or_zero(row.get("kimg")),
            seconds=_number_or_zero(row.get("seconds")),
            num_images=num_images if isinstance(num_images, int) else None,
            scores=finite_scores(row.get("scores")),
            worker=number_format.format_value(row.get("worker", "")),
            folder=folder,
            state=_folder_state(folder),
        )


def _folder_state(folder: str) -> str:
    """`labels/0003` is complete; `labels/0003.2`, the second attempt, is still being trained."""
    return "begun" if "." in folder else "done"


def _label_folders(run_dir: Path) -> dict[int, str]:
    """Return the folder of each label by its number; if a label has several, the complete one or the last attempt."""
    newest: dict[int, tuple[float, str]] = {}
    for path in (run_dir / "labels").glob("[0-9]*"):
        match = re.fullmatch(r"(\d{4,})(?:\.(\d+))?", path.name)
        if match and (path / "run.yaml").is_file():
            number = int(match[1])
            attempt = float(match[2] or "inf")
            newest[number] = max(newest.get(number, (-1.0, "")), (attempt, f"labels/{path.name}"))
    return {number: folder for number, (_, folder) in sorted(newest.items())}


def _from_label_folder(run_dir: Path, number: int, folder: str, names: list[str]) -> LabelProgress:
    rows = read_jsonl(run_dir / folder / "stats.jsonl")
    last: Row = rows[-1] if rows else {}
    return LabelProgress(
        number,
        name=names[number] if number < len(names) else str(number),
        kimg=_number_or_zero(last.get("Progress/kimg")),
        seconds=_number_or_zero(last.get("Timing/total_s")),
        scores=finite_scores(newest_values(read_jsonl(run_dir / folder / "metrics.jsonl"))),
        folder=folder,
        state=_folder_state(folder),
    )


def _class_names_and_counts(run_dir: Path) -> tuple[list[str], list[int]]:
    """Return the names of the labels and their numbers of images, from the model's config.json."""
    try:
        config = json.loads((run_dir / "model" / "config.json").read_text("utf-8"))
        counts = [count for count in config.get("images", []) if isinstance(count, int)]
        return [number_format.format_value(name) for name in config["classes"]], counts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], []


def _number_or_zero(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


def finite_scores(scores: Any) -> dict[str, float]:
    """Return the scores that are numbers, by their names."""
    return {
        number_format.format_value(name): float(value)
        for name, value in (scores.items() if isinstance(scores, Mapping) else ())
        if is_number(value)
    }
