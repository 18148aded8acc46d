"""Distil one generator for all labels from the generators of a per-label run (`paragan merge`).

The student is an ordinary conditional run with `distill_from`; afterwards both models are scored in the same way and
written side by side to merge.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.comm.world import World
from paragan.config.resolve import load_dataset
from paragan.config.run import Run
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.schema import apply_overrides, from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import EvalProtocol, Score
from paragan.models.model import load_model, weights_bytes
from paragan.strategies.sync import Sync
from paragan.train.callbacks.scoring import score
from paragan.train.console import RunConsole
from paragan.train.per_label.lease_queue import FINALIZE_JOB, LeaseQueue
from paragan.train.run_dir import require_run_dir
from paragan.train.saved_run import load_run

COMPARISON_FILE = "merge.json"


def student_run(teacher_run_dir: Path, settings: Sequence[tuple[str, str]]) -> Run:
    """Return the run that is distilled from a per-label run: its record, with one conditional game.

    Args:
        settings: fields that differ, as (name, value).

    Raises:
        UsageError: the folder holds no per-label run, or one of which labels wait to be trained anew.
    """
    folder = require_run_dir(teacher_run_dir).absolute()
    run = load_run(folder)
    if not run.per_label:
        raise UsageError(f"{folder}: has one generator for all labels already. Use a run of --strategy per-label")
    entries = LeaseQueue(folder / "queue", run.per_label.lease_s).entries()
    waiting = sorted(int(job) for job, entry in entries.items() if job != FINALIZE_JOB and entry.state != "done")
    if waiting:
        labels = ", ".join(map(str, waiting[:5])) + (f" and {len(waiting) - 5} more" if len(waiting) > 5 else "")
        raise UsageError(f"{folder}: label {labels} is not trained to its end. `paragan status` shows its progress")
    run = dataclasses.replace(run, strategy=Sync(), init_from="", distill_from=str(folder))
    return from_dict(Run, apply_overrides(to_dict(run), settings))


@dataclass(frozen=True)
class MeasuredModel:
    """One of the two models that are compared."""

    folder: Path
    kimg: float
    size_bytes: int
    scores: Sequence[Score]

    def to_json(self) -> dict[str, Any]:
        """Return its entry of merge.json."""
        scores = [score.to_json() for score in self.scores]
        return {"folder": str(self.folder), "kimg": self.kimg, "bytes": self.size_bytes, "scores": scores}


def compare_with_teacher(run: Run, student_run_dir: Path, world: World, console: RunConsole) -> None:
    """Score the student and the per-label model it was distilled from in the same way; print both and write merge.json.

    All ranks call this.
    """
    dataset = load_dataset(run.data)
    console.print(f"scoring {run.evaluation.count:,} fakes of {run.distill_from} and of {student_run_dir}")
    teacher = _measure_model(Path(run.distill_from), run, dataset, world)
    student = _measure_model(student_run_dir, run, dataset, world)
    if not world.is_main:
        return
    comparison = {
        "distill_weight": run.distill_weight,
        "per_label": teacher.to_json(),
        "merged": student.to_json(),
    }
    atomic_write_bytes(student_run_dir / COMPARISON_FILE, json.dumps(comparison, indent=1).encode())
    for line in format_comparison(teacher, student):
        console.print(line)


def _measure_model(folder: Path, run: Run, dataset: Dataset, world: World) -> MeasuredModel:
    model = load_model(folder, world.device, run.nets, dataset, run.data.decoder)
    protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=run.seed)
    scores: list[Score] = []
    if run.evaluation.metrics:
        scores = score(model.sampler, dataset, run.evaluation, protocol, world.all_ranks)
    return MeasuredModel(folder, model.kimg, weights_bytes(folder), scores)


def format_comparison(teacher: MeasuredModel, student: MeasuredModel) -> list[str]:
    """Return the lines of a table with a column for each model."""
    rows = [("", "per label", "merged")]
    rows += [(a.name, f"{a.value:.4g}", f"{b.value:.4g}") for a, b in zip(teacher.scores, student.scores, strict=True)]
    rows += [
        ("kimg", f"{teacher.kimg:g}", f"{student.kimg:g}"),
        ("bytes of G", f"{teacher.size_bytes:,}", f"{student.size_bytes:,}"),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}" for name, a, b in rows]
