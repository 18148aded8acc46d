"""Log to Trackio. Its environment variables set it up: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ..."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import trackio  # pyright: ignore[reportMissingImports]

from paragan.train.loggers.logger import Logger, RunInfo


class TrackioLogger(Logger):
    """Writes a run: configuration, curves, grids, scores, findings as alerts, and models as artifacts at its end."""

    def __init__(self) -> None:
        self._run: Any = None
        self._models: dict[str, Path] = {}

    def new_run_id(self, info: RunInfo) -> str:
        return f"{info.name}-{secrets.token_hex(2)}"

    def on_start(self, info: RunInfo) -> None:
        self._run = trackio.init(
            project="paragan",
            name=info.run_id,  # a run is found again by its name
            config=dict(info.config),
            resume="allow",
            embed=False,
        )

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        self._run.log(dict(stats), step=images)

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        self._run.log({"fakes": trackio.Image(str(path))}, step=images)

    def on_scores(self, scores: Mapping[str, float], images: int) -> None:
        self._run.log({f"Scores/{name}": value for name, value in scores.items()}, step=images)

    def on_finding(self, text: str, images: int) -> None:
        self._run.alert(f"{self._run.name} at {images / 1000:g} kimg", text)

    def on_model(self, folder: Path, images: int) -> None:
        self._models[folder.name] = folder  # copied at the end: its files may be replaced until then

    def close(self, error: str = "") -> None:
        if not self._run:
            return
        if not error:
            for name, folder in self._models.items():
                artifact_name = re.sub(r"[^\w.-]", "-", f"{self._run.name}-{name}", flags=re.ASCII)
                self._run.log_artifact(folder, name=artifact_name, type="model")
        self._run.finish()
