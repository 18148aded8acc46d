"""The best model of a run by a named score: best/, an ordinary model folder, complete or absent.

best/config.json      also says {"best": {"name", "value", "kimg", "fingerprint"}}
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.eval.evaluate import Score
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import metric_names
from paragan.report.scores import score_direction
from paragan.train.callbacks.save import CheckpointCallback
from paragan.train.session import Session

BEST_FOLDER, STAGING_FOLDER, PREVIOUS_FOLDER = "best", ".best-new", ".best-former"


@dataclass(frozen=True)
class BestModelTracker:
    """Keeps the model that was just scored, where it is the best so far by the score `name`."""

    folder: Path
    checkpoint_callback: CheckpointCallback
    metric_name: str

    def __call__(self, session: Session, scores: Sequence[Score]) -> None:
        score = next((one for one in scores if one.name == self.metric_name), None)
        if score is None:
            return
        beats = torch.tensor([float(session.world.is_main and is_better(score, read_best(self.folder)))])
        session.world.all_ranks.all_reduce_sum(beats).wait()  # as rank 0 sees the folder
        if not beats[0]:
            return
        if session.world.is_main:
            create_staging_folder(self.folder)
        if not self.checkpoint_callback.is_saved(session):
            self.checkpoint_callback.write_model(session, STAGING_FOLDER)
        if session.world.is_main:
            if self.checkpoint_callback.is_saved(session):
                copy_model(self.folder / "model", self.folder / STAGING_FOLDER)
            publish(self.folder, score, session.clock.kimg)


def resolve_best_metric(requested: str, metrics: Sequence[str], space: FeatureSpace) -> str:
    """The score by which models are compared; "" for none. Unusable where nobody measures it."""
    names = [name for metric in metrics for name in metric_names(metric, space)]
    if requested == "none" or not names:
        return ""
    if requested != "auto" and requested not in names:
        raise UsageError(
            f"output.best_metric={requested} is not measured (evaluation.metrics); there are: {', '.join(names)}"
        )
    return names[0] if requested == "auto" else requested


def is_better(score: Score, current_best: dict[str, Any] | None) -> bool:
    """Whether a score beats the best so far. One that was measured in another way cannot be compared, and does."""
    if not math.isfinite(score.value):
        return False
    if current_best is None or current_best["name"] != score.name or current_best["fingerprint"] != score.fingerprint:
        return True
    return (
        score.value > current_best["value"]
        if score_direction(score.name) == "higher"
        else score.value < current_best["value"]
    )


def read_best(folder: Path) -> dict[str, Any] | None:
    """What the best model of a run folder is; None where there is none."""
    try:
        best = json.loads((folder / BEST_FOLDER / "config.json").read_text())["best"]
        return {"name": str(best["name"]), "value": float(best["value"]), **best}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def create_staging_folder(folder: Path) -> Path:
    """An empty folder, in which the next best model is made."""
    shutil.rmtree(folder / STAGING_FOLDER, ignore_errors=True)
    (folder / STAGING_FOLDER).mkdir()
    return folder / STAGING_FOLDER


def copy_model(source: Path, destination: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, destination / file.name)


def publish(folder: Path, score: Score, kimg: float) -> None:
    """Let the model that was made aside be the best, by this score."""
    new, former, best = folder / STAGING_FOLDER, folder / PREVIOUS_FOLDER, folder / BEST_FOLDER
    about = {"name": score.name, "value": score.value, "kimg": kimg, "fingerprint": score.fingerprint}
    config = json.loads((new / "config.json").read_text())
    atomic_write_bytes(new / "config.json", json.dumps({**config, "best": about}, indent=1).encode())
    recover_interrupted_publish(folder)
    if best.exists():
        best.rename(former)
    new.rename(best)
    shutil.rmtree(former, ignore_errors=True)


def recover_interrupted_publish(folder: Path) -> None:
    """What `publish` left when it was killed between its two renames."""
    former, best = folder / PREVIOUS_FOLDER, folder / BEST_FOLDER
    if former.exists() and not best.exists():
        former.rename(best)
    shutil.rmtree(former, ignore_errors=True)
