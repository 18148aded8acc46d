"""Score the models of a run as they appear, from another process: `paragan eval --follow RUN_DIR`.

A run replaces its model with every checkpoint. The follower scores the newest one; models that were replaced while an
older one was scored are left out, and counted. The lines of metrics.jsonl are those that the run itself would write;
whoever writes lines locks the file, and checks whether it was replaced meanwhile (core/jsonl.py).
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
from paragan.models.model import load_model
from paragan.models.model_files import ModelSnapshot, is_per_label, try_read_consistent
from paragan.train.callbacks import best_model
from paragan.train.callbacks.scoring import (
    append_scores,
    format_failures,
    format_score_summary,
    make_feature_space,
    score,
    scored_names,
)
from paragan.train.console import RunConsole
from paragan.train.health.monitor import read_rollbacks
from paragan.train.run_dir import RunDir

POLL_S = 2.0


@dataclass(frozen=True)
class RunFollower:
    """Follows one run.

    evaluation  : what is scored
    device      : where it is scored
    patience_s  : how long the run may show nothing new before the follower gives up
    best_metric : the score by which the best model is kept ("": it is not, or the run does it)
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
        """Score models until the run is complete. Returns how many were scored.

        Raises:
            RunError: the run showed nothing new for `patience_s`.
        """
        num_scored = 0
        kimg = -1.0  # of the last model
        config: dict[str, Any] = {}  # of the last model; has checksums, so a model after a rollback differs
        rollbacks_of_model = 0
        signature: tuple[Any, ...] | None = None
        last_change_s = time.monotonic()
        while True:
            num_rollbacks = len(read_rollbacks(self.folder))
            model = self._newest_model()
            if model and model.config != config:
                new_kimg = float(model.config["kimg"])
                self._report_skipped(kimg, new_kimg)
                kimg = new_kimg
                config = model.config
                rollbacks_of_model = num_rollbacks
                last_change_s = time.monotonic()
                num_scored += self._score_missing(model, num_rollbacks)
                continue  # it may have been replaced meanwhile
            if 1000 * kimg >= self._current_run().total_images and num_rollbacks == rollbacks_of_model:
                return num_scored
            new_signature = file_signature(self.folder)
            if new_signature != signature:
                signature = new_signature
                last_change_s = time.monotonic()
            if time.monotonic() - last_change_s >= self.patience_s:
                raise RunError(
                    f"{self.folder} is at {max(kimg, 0):g} of {self._current_run().kimg:g} kimg and showed nothing new "
                    f"for {self.patience_s:g} s (--patience). Continue the run, then repeat this command"
                )
            self.sleep(POLL_S)

    def _current_run(self) -> Run:
        """Return the run with the length that its record has now: it may be extended meanwhile."""
        kimg = (RunDir(self.folder).read_run_config() or {}).get("kimg", self.run.kimg)
        return dataclasses.replace(self.run, kimg=float(kimg))

    def _newest_model(self) -> ModelSnapshot | None:
        model = self.folder / "model"
        if is_per_label(model):
            raise UsageError(f"--follow: {self.folder} has a model for every label, which workers score. Leave it out")
        return try_read_consistent(model)

    def _score_missing(self, model_snapshot: ModelSnapshot, num_rollbacks: int) -> bool:
        """Measure the scores that are missing of a model. Returns True if there were any.

        Args:
            num_rollbacks: how often the run had gone back before the model was read.
        """
        kimg = float(model_snapshot.config["kimg"])
        space = make_feature_space(self.evaluation, self.dataset)
        known = scored_names(self.folder, kimg)
        missing = tuple(m for m in self.evaluation.metrics if not known.issuperset(metric_names(m, space)))
        if present := [metric for metric in self.evaluation.metrics if metric not in missing]:
            self.console.print(f"{kimg:g} kimg: scored before: {', '.join(present)}")
        if not missing:
            return False
        evaluation = dataclasses.replace(self.evaluation, metrics=missing)
        with tempfile.TemporaryDirectory(prefix="paragan-follow-") as name:
            folder = model_snapshot.write_to(Path(name))
            start = time.perf_counter()
            scores = self._compute_scores(folder, evaluation)
            if len(read_rollbacks(self.folder)) != num_rollbacks:  # the run went back meanwhile: the model was undone
                return False
            append_scores(self.folder, scores, kimg)
            self._update_best(folder, scores, kimg)
        self.console.print(f"{kimg:g} kimg: {format_score_summary(scores)}  (in {time.perf_counter() - start:.3g} s)")
        for line in format_failures(scores):
            self.console.print(line)
        return True

    def _compute_scores(self, folder: Path, evaluation: EvaluationOptions) -> list[Score]:
        model = load_model(folder, self.device, self.nets, self.dataset, self.run.data.decoder)
        protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=self.run.seed)
        return score(model.sampler, self.dataset, evaluation, protocol, SingleRankGroup())

    def _update_best(self, model_dir: Path, scores: list[Score], kimg: float) -> None:
        """Keep a model if it is the best so far."""
        best_score = next((score for score in scores if score.name == self.best_metric), None)
        if best_score and best_model.is_better(best_score, best_model.read_best(self.folder)):
            best_model.copy_model(model_dir, best_model.create_staging_folder(self.folder))
            best_model.publish(self.folder, best_score, kimg)

    def _report_skipped(self, previous_kimg: float, current_kimg: float) -> None:
        """Print how many models were replaced before they were scored."""
        period_kimg = self.run.output.checkpoint_kimg
        if not period_kimg or previous_kimg < 0:
            return
        skipped = round(current_kimg // period_kimg - previous_kimg // period_kimg) - 1
        if skipped > 0:
            self.console.print(
                f"{skipped} models between {previous_kimg:g} and {current_kimg:g} kimg were replaced before that"
            )


def file_signature(folder: Path) -> tuple[Any, ...]:
    """Return a value that changes whenever a run that is being trained writes something."""
    watched = (folder / "stats.jsonl", folder / "model" / "config.json", RunDir(folder).checkpoints_dir)
    return tuple((path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in watched)
