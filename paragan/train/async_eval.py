"""Scores of models as they appear in a run folder, from a process beside the run: `paragan eval --follow RUN_DIR`.

A run replaces its model with every checkpoint. Whoever follows scores the newest; what was replaced while an older one
was scored is left out, and said to be. The lines of metrics.jsonl are those the run itself would have written.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.comm.process_group import Solo
from paragan.config.run import Run
from paragan.config.sections import Evaluation
from paragan.core.errors import Failed, Unusable
from paragan.data.dataset import Images
from paragan.eval.evaluate import Protocol, Score
from paragan.eval.metrics import metric_names
from paragan.models.model import is_per_label, load_model
from paragan.models.model_files import Snapshot, snapshot
from paragan.train.callbacks import best_model
from paragan.train.callbacks.scoring import append, feature_space, names_there, score, summary
from paragan.train.console import Screen
from paragan.train.health.monitor import rollbacks
from paragan.train.run_dir import RunFolder

POLL_S = 2.0


@dataclass(frozen=True)
class Follow:
    """Follows one run.

    wanted   : what is scored
    device   : where
    patience : seconds for which the run may show nothing new, before this ends
    best     : the score by which the best model is kept ("": nobody keeps it, or the run itself does)
    """

    folder: Path
    run: Run
    images: Images
    wanted: Evaluation
    device: Any
    screen: Screen
    patience: float
    best: str = ""
    nets: Any = None
    sleep: Callable[[float], None] = time.sleep

    def __call__(self) -> int:
        """Score until the run is complete; how many models were. Failed, where it showed nothing for too long."""
        number, kimg, last, before, seen, since = 0, -1.0, dict[str, Any](), 0, None, time.monotonic()
        while True:
            undone, found = len(rollbacks(self.folder)), self._newest()
            if found and found.config != last:  # which has checksums: after going back there is another of that moment
                self._tell_skipped(kimg, float(found.config["kimg"]))
                kimg, last, before, since = float(found.config["kimg"]), found.config, undone, time.monotonic()
                number += self._score(found, undone)
                continue  # it may have been replaced meanwhile
            if 1000 * kimg >= self._asked().images and undone == before:
                return number
            now = signature(self.folder)
            seen, since = (now, since) if now == seen else (now, time.monotonic())
            if time.monotonic() - since >= self.patience:
                at = f"{kimg:g}" if kimg >= 0 else "0"
                raise Failed(
                    f"{self.folder} is at {at} of {self._asked().kimg:g} kimg and showed nothing new for "
                    f"{self.patience:g} s (--patience): go on with the run, then with the same command"
                )
            self.sleep(POLL_S)

    def _asked(self) -> Run:
        """The run as its record has it now: it may be taken further meanwhile."""
        kimg = (RunFolder(self.folder).record() or {}).get("kimg", self.run.kimg)
        return dataclasses.replace(self.run, kimg=float(kimg))

    def _newest(self) -> Snapshot | None:
        model = self.folder / "model"
        if is_per_label(model):
            raise Unusable(f"{self.folder} has a model for every label, which workers score: leave --follow out")
        return snapshot(model)

    def _score(self, found: Snapshot, undone: int) -> bool:
        """Score a model by what is missing of it; whether anything was. undone: how often the run had gone back before
        the model was read."""
        kimg = float(found.config["kimg"])
        there = names_there(self.folder, kimg)
        space = feature_space(self.wanted, self.images)
        missing = tuple(m for m in self.wanted.metrics if not there.issuperset(metric_names(m, space)))
        if not missing:
            return False
        wanted = dataclasses.replace(self.wanted, metrics=missing)
        with tempfile.TemporaryDirectory(prefix="paragan-follow-") as name:
            folder = found.written(Path(name))
            start = time.perf_counter()
            scores = self._scores(folder, wanted)
            if len(rollbacks(self.folder)) != undone:  # the run went back meanwhile, behind this model
                return False
            append(self.folder, scores, kimg)
            self._keep(folder, scores, kimg)
        self.screen.say(f"{kimg:g} kimg: {summary(scores)}  (in {time.perf_counter() - start:.3g} s)")
        return True

    def _scores(self, folder: Path, wanted: Evaluation) -> list[Score]:
        model = load_model(folder, self.device, self.nets, self.images)
        protocol = Protocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
        return score(model.sampler, self.images, wanted, protocol, Solo())

    def _keep(self, model: Path, scores: list[Score], kimg: float) -> None:
        chosen = next((one for one in scores if one.name == self.best), None)
        if chosen and best_model.better(chosen, best_model.so_far(self.folder)):
            best_model.copy(model, best_model.begin(self.folder))
            best_model.publish(self.folder, chosen, kimg)

    def _tell_skipped(self, before: float, now: float) -> None:
        every = self.run.output.checkpoint_kimg
        skipped = round(now // every - before // every) - 1 if every and before >= 0 else 0
        if skipped > 0:
            self.screen.say(f"{skipped} models between {before:g} and {now:g} kimg were replaced before that")


def signature(folder: Path) -> tuple[Any, ...]:
    """Changes whenever a run that is being trained writes something."""
    run = RunFolder(folder)
    watched = (folder / "stats.jsonl", folder / "model" / "config.json", run.checkpoints)
    return tuple((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in watched)
