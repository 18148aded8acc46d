"""Log to MLflow. Its environment variables set it up: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ..."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
from PIL import Image

from paragan.train.loggers.logger import Logger, RunInfo

MAX_PARAMS = 100  # of a request
MAX_PARAM_LENGTH = 6000  # of its value, by the rules of MLflow


class MlflowLogger(Logger):
    """Writes a run: configuration, curves, grids, scores, findings as tags, and models as artifacts at its end."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""
        self._models: dict[str, Path] = {}

    def on_start(self, info: RunInfo) -> str:
        self._client = MlflowClient()
        if info.run_id:
            with contextlib.suppress(MlflowException):  # another server: a new run
                self._client.update_run(info.run_id, status="RUNNING")
                self._run_id = info.run_id
        if not self._run_id:
            self._run_id = self._client.create_run(self._experiment_id(), run_name=info.name).info.run_id
            params = [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in dotted_fields(info.config)]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
        self._client.log_dict(self._run_id, dict(info.config), "run.yaml")  # params cannot change when it is extended
        return self._run_id

    def _experiment_id(self) -> str:
        if "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paragan")
        with contextlib.suppress(MlflowException):  # it exists
            return self._client.create_experiment(name)
        return self._client.get_experiment_by_name(name).experiment_id

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, now_ms, images) for name, value in stats.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        with Image.open(path) as grid:
            self._client.log_image(self._run_id, grid, key="fakes", step=images)

    def on_scores(self, scores: Mapping[str, float], images: int) -> None:
        self.on_tick({f"Scores/{name}": value for name, value in scores.items()}, images)

    def on_finding(self, text: str, images: int) -> None:
        self._client.set_tag(self._run_id, f"finding at {images / 1000:g} kimg", text)

    def on_model(self, folder: Path, images: int) -> None:
        self._models[folder.name] = folder  # uploaded at the end: its files may be replaced until then

    def close(self, error: str = "") -> None:
        if not self._run_id:
            return
        if not error:
            for name, folder in self._models.items():
                self._client.log_artifacts(self._run_id, str(folder), name)
        self._client.set_terminated(self._run_id, "KILLED" if error else "FINISHED")


def dotted_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted field, value) of every value in a nested configuration."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from dotted_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
