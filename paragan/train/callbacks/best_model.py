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

from paragan.core.atomic_write import write_whole
from paragan.core.errors import Unusable
from paragan.eval.evaluate import Score
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import metric_names
from paragan.report.scores import which_is_better
from paragan.train.callbacks.save import Save
from paragan.train.session import Session

FOLDER, ASIDE, FORMER = "best", ".best-new", ".best-former"


@dataclass(frozen=True)
class Best:
    """Keeps the model that was just scored, where it is the best so far by the score `name`."""

    folder: Path
    save: Save
    name: str

    def __call__(self, session: Session, scores: Sequence[Score]) -> None:
        score = next((one for one in scores if one.name == self.name), None)
        if score is None:
            return
        beats = torch.tensor([float(session.world.first and better(score, so_far(self.folder)))])
        session.world.everyone.sum(beats).wait()  # as rank 0 sees the folder
        if not beats[0]:
            return
        if session.world.first:
            begin(self.folder)
        if not self.save.wrote(session):
            self.save.write_model(session, ASIDE)
        if session.world.first:
            if self.save.wrote(session):
                copy(self.folder / "model", self.folder / ASIDE)
            publish(self.folder, score, session.clock.kimg)


def chosen(wanted: str, metrics: Sequence[str], space: FeatureSpace) -> str:
    """The score by which models are compared; "" for none. Unusable where nobody measures it."""
    names = [name for metric in metrics for name in metric_names(metric, space)]
    if wanted == "none" or not names:
        return ""
    if wanted != "auto" and wanted not in names:
        raise Unusable(f"output.best={wanted} is not measured (evaluation.metrics); there are: {', '.join(names)}")
    return names[0] if wanted == "auto" else wanted


def better(score: Score, than: dict[str, Any] | None) -> bool:
    """Whether a score beats the best so far. One that was measured in another way cannot be compared, and does."""
    if not math.isfinite(score.value):
        return False
    if than is None or than["name"] != score.name or than["fingerprint"] != score.fingerprint:
        return True
    return score.value > than["value"] if which_is_better(score.name) == "higher" else score.value < than["value"]


def so_far(folder: Path) -> dict[str, Any] | None:
    """What the best model of a run folder is; None where there is none."""
    try:
        best = json.loads((folder / FOLDER / "config.json").read_text())["best"]
        return {"name": str(best["name"]), "value": float(best["value"]), **best}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin(folder: Path) -> Path:
    """An empty folder, in which the next best model is made."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    (folder / ASIDE).mkdir()
    return folder / ASIDE


def copy(model: Path, to: Path) -> None:
    for file in model.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, to / file.name)


def publish(folder: Path, score: Score, kimg: float) -> None:
    """Let the model that was made aside be the best, by this score."""
    new, former, best = folder / ASIDE, folder / FORMER, folder / FOLDER
    about = {"name": score.name, "value": score.value, "kimg": kimg, "fingerprint": score.fingerprint}
    config = json.loads((new / "config.json").read_text())
    write_whole(new / "config.json", json.dumps({**config, "best": about}, indent=1).encode())
    restore(folder)
    if best.exists():
        best.rename(former)
    new.rename(best)
    shutil.rmtree(former, ignore_errors=True)


def restore(folder: Path) -> None:
    """What `publish` left when it was killed between its two renames."""
    former, best = folder / FORMER, folder / FOLDER
    if former.exists() and not best.exists():
        former.rename(best)
    shutil.rmtree(former, ignore_errors=True)
