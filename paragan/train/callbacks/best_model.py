"""Keep the best model of a run by a named score in best/, an ordinary model folder, complete or absent.

best/config.json      also has {"best": {"name", "value", "kimg", "fingerprint"}}

It is written to a staging folder and renamed twice; the next start completes a rename that was interrupted in between.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.eval.evaluate import Score
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import metric_names
from paragan.report.scores import score_direction
from paragan.train.best_record import BEST_FOLDER, read_best
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.loggers.logger import Logger
from paragan.train.session import Session

STAGING_FOLDER = ".best-new"
PREVIOUS_FOLDER = ".best-former"


@dataclass(frozen=True)
class BestModelTracker:
    """Keeps the model that was just scored if it is the best so far by the score `metric_name` ("": keeps none)."""

    folder: Path
    checkpoint_callback: CheckpointCallback
    metric_name: str
    logger: Logger = field(default_factory=Logger)

    def __call__(self, session: Session, scores: Sequence[Score]) -> None:
        """All ranks call this, with the same scores."""
        score = next((score for score in scores if score.name == self.metric_name), None)
        if score is None:
            return
        is_best = torch.tensor([float(session.world.is_main and is_better(score, read_best(self.folder)))])
        session.world.all_ranks.all_reduce_sum(is_best).wait()  # rank 0 decides: it sees the folder
        if not is_best[0]:
            return
        if session.world.is_main:
            create_staging_folder(self.folder)
        if not self.checkpoint_callback.is_saved(session):
            self.checkpoint_callback.write_model(session, STAGING_FOLDER)
        if session.world.is_main:
            if self.checkpoint_callback.is_saved(session):
                copy_model(self.folder / "model", self.folder / STAGING_FOLDER)
            publish(self.folder, score, session.clock.kimg)
            self.logger.on_model(self.folder / BEST_FOLDER, session.clock.images)


def resolve_best_metric(requested: str, metrics: Sequence[str], space: FeatureSpace) -> str:
    """Return the score by which models are compared; "" for none.

    Args:
        requested: "none", "auto" (the first score of the first metric), or a score.

    Raises:
        UsageError: the score is not measured.
    """
    names = [name for metric in metrics for name in metric_names(metric, space)]
    if requested == "none" or not names:
        return ""
    if requested != "auto" and requested not in names:
        raise UsageError(
            f"output.best_metric={requested}: not measured (evaluation.metrics). Use one of: {', '.join(names)}"
        )
    return names[0] if requested == "auto" else requested


def is_better(score: Score, current_best: dict[str, Any] | None) -> bool:
    """Return True if a score beats the best so far. One measured in another way is not comparable, and is replaced."""
    if not math.isfinite(score.value):
        return False
    if current_best is None or current_best["name"] != score.name or current_best["fingerprint"] != score.fingerprint:
        return True
    if score_direction(score.name) == "higher":
        return score.value > current_best["value"]
    return score.value < current_best["value"]


def create_staging_folder(folder: Path) -> Path:
    """Create the empty folder in which the next best model is written."""
    shutil.rmtree(folder / STAGING_FOLDER, ignore_errors=True)
    (folder / STAGING_FOLDER).mkdir()
    return folder / STAGING_FOLDER


def copy_model(source: Path, destination: Path) -> None:
    """Copy the files of a model folder, but hidden ones."""
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, destination / file.name)


def publish(folder: Path, score: Score, kimg: float) -> None:
    """Make the model in the staging folder the best one, by this score."""
    staging = folder / STAGING_FOLDER
    previous = folder / PREVIOUS_FOLDER
    best = folder / BEST_FOLDER
    entry = {"name": score.name, "value": score.value, "kimg": kimg, "fingerprint": score.fingerprint}
    config = json.loads((staging / "config.json").read_text())
    atomic_write_bytes(staging / "config.json", json.dumps({**config, "best": entry}, indent=1).encode())
    recover_interrupted_publish(folder)
    if best.exists():
        best.rename(previous)
    staging.rename(best)
    shutil.rmtree(previous, ignore_errors=True)


def recover_interrupted_publish(folder: Path) -> None:
    """Complete or undo a `publish` that was killed between its two renames."""
    previous = folder / PREVIOUS_FOLDER
    best = folder / BEST_FOLDER
    if previous.exists() and not best.exists():
        previous.rename(best)
    shutil.rmtree(previous, ignore_errors=True)
