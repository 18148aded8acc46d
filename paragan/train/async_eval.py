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

from paragan.comm.process_group import SingleRankGroup
from paragan.config.run import Run
from paragan.config.sections import EvaluationOptions
from paragan.core.errors import RunError, UsageError
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import EvalProtocol, Score
from paragan.eval.metrics import metric_names
from paragan.models.model import is_per_label, load_model
from paragan.models.model_files import ModelSnapshot, try_read_consistent
from paragan.train.callbacks import best_model
from paragan.train.callbacks.scoring import append_scores, format_score_summary, make_feature_space, score, scored_names
from paragan.train.console import RunConsole
from paragan.train.health.monitor import read_rollbacks
from paragan.train.run_dir import RunDir

POLL_S = 2.0


@dataclass(frozen=True)
class RunFollower:
    """Follows one run.

    wanted   : what is scored
    device   : where
    patience : seconds for which the run may show nothing new, before this ends
    best     : the score by which the best model is kept ("": nobody keeps it, or the run itself does)
    """

    folder: Path
    run: Run
    dataset: Dataset
    evaluation: EvaluationOptions
    device: Any
    console: RunConsole
    patience_s: float
    best_metric: str = ""
    nets: Any = None
    sleep: Callable[[float], None] = time.sleep

    def __call__(self) -> int:
        """Score until the run is complete; how many models were. Failed, where it showed nothing for too long."""
        number, kimg, last, before, seen, since = 0, -1.0, dict[str, Any](), 0, None, time.monotonic()
        while True:
            undone, found = len(read_rollbacks(self.folder)), self._newest_model()
            if found and found.config != last:  # which has checksums: after going back there is another of that moment
                self._report_skipped(kimg, float(found.config["kimg"]))
                kimg, last, before, since = float(found.config["kimg"]), found.config, undone, time.monotonic()
                number += self._score_missing(found, undone)
                continue  # it may have been replaced meanwhile
            if 1000 * kimg >= self._current_run().total_images and undone == before:
                return number
            now = file_signature(self.folder)
            seen, since = (now, since) if now == seen else (now, time.monotonic())
            if time.monotonic() - since >= self.patience_s:
                at = f"{kimg:g}" if kimg >= 0 else "0"
                raise RunError(
                    f"{self.folder} is at {at} of {self._current_run().kimg:g} kimg and showed nothing new for "
                    f"{self.patience_s:g} s (--patience): go on with the run, then with the same command"
                )
            self.sleep(POLL_S)

    def _current_run(self) -> Run:
        """The run as its record has it now: it may be taken further meanwhile."""
        kimg = (RunDir(self.folder).read_run_config() or {}).get("kimg", self.run.kimg)
        return dataclasses.replace(self.run, kimg=float(kimg))

    def _newest_model(self) -> ModelSnapshot | None:
        model = self.folder / "model"
        if is_per_label(model):
            raise UsageError(f"{self.folder} has a model for every label, which workers score: leave --follow out")
        return try_read_consistent(model)

    def _score_missing(self, model_snapshot: ModelSnapshot, num_rollbacks: int) -> bool:
        """Score a model by what is missing of it; whether anything was. undone: how often the run had gone back before
        the model was read."""
        kimg = float(model_snapshot.config["kimg"])
        there = scored_names(self.folder, kimg)
        space = make_feature_space(self.evaluation, self.dataset)
        missing = tuple(m for m in self.evaluation.metrics if not there.issuperset(metric_names(m, space)))
        if not missing:
            return False
        wanted = dataclasses.replace(self.evaluation, metrics=missing)
        with tempfile.TemporaryDirectory(prefix="paragan-follow-") as name:
            folder = model_snapshot.write_to(Path(name))
            start = time.perf_counter()
            scores = self._compute_scores(folder, wanted)
            if len(read_rollbacks(self.folder)) != num_rollbacks:  # the run went back meanwhile, behind this model
                return False
            append_scores(self.folder, scores, kimg)
            self._update_best(folder, scores, kimg)
        self.console.print(f"{kimg:g} kimg: {format_score_summary(scores)}  (in {time.perf_counter() - start:.3g} s)")
        return True

    def _compute_scores(self, folder: Path, evaluation: EvaluationOptions) -> list[Score]:
        model = load_model(folder, self.device, self.nets, self.dataset)
        protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
        return score(model.sampler, self.dataset, evaluation, protocol, SingleRankGroup())

    def _update_best(self, model_dir: Path, scores: list[Score], kimg: float) -> None:
        chosen = next((one for one in scores if one.name == self.best_metric), None)
        if chosen and best_model.is_better(chosen, best_model.read_best(self.folder)):
            best_model.copy_model(model_dir, best_model.create_staging_folder(self.folder))
            best_model.publish(self.folder, chosen, kimg)

    def _report_skipped(self, previous_kimg: float, current_kimg: float) -> None:
        every = self.run.output.checkpoint_kimg
        skipped = round(current_kimg // every - previous_kimg // every) - 1 if every and previous_kimg >= 0 else 0
        if skipped > 0:
            self.console.print(
                f"{skipped} models between {previous_kimg:g} and {current_kimg:g} kimg were replaced before that"
            )


def file_signature(folder: Path) -> tuple[Any, ...]:
    """Changes whenever a run that is being trained writes something."""
    run = RunDir(folder)
    watched = (folder / "stats.jsonl", folder / "model" / "config.json", run.checkpoints_dir)
    return tuple((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in watched)
