"""Log to Weights & Biases. Its environment variables set it up: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, ..."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import wandb  # pyright: ignore[reportMissingImports]

from paragan.core.errors import UsageError
from paragan.train.loggers.logger import Logger, RunInfo

TIME_KEY = "Progress/kimg"  # the x axis of all curves


class WandbLogger(Logger):
    """Writes a run: configuration, curves, grids, scores, findings as alerts, and models as artifacts at its end."""

    def __init__(self) -> None:
        self._run: Any = None
        self._models: dict[str, Path] = {}

    def new_run_id(self, info: RunInfo) -> str:
        return secrets.token_hex(5)

    def on_start(self, info: RunInfo) -> None:
        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False, verify=False):  # init would wait for an answer on the terminal
            raise UsageError("--output.loggers=wandb: there is no API key. Use wandb login, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paragan"),
            name=os.environ.get("WANDB_NAME", info.name),
            dir=os.environ.get("WANDB_DIR", str(info.folder or "")) or None,
            config=dict(info.config),
            id=info.run_id or None,
            resume="allow",
            settings=wandb.Settings(console="off"),  # it would replace sys.stdout
        )
        self._run.define_metric("*", step_metric=TIME_KEY)

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        self._run.log(dict(stats))

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        self._run.log({"fakes": wandb.Image(str(path)), TIME_KEY: images / 1000})

    def on_scores(self, scores: Mapping[str, float], images: int) -> None:
        self._run.log({f"Scores/{name}": value for name, value in scores.items()} | {TIME_KEY: images / 1000})

    def on_finding(self, text: str, images: int) -> None:
        self._run.alert(f"{self._run.name} at {images / 1000:g} kimg", text)

    def on_model(self, folder: Path, images: int) -> None:
        self._models[folder.name] = folder  # uploaded at the end: its files may be replaced until then

    def close(self, error: str = "") -> None:
        if not self._run:
            return
        if not error:
            for name, folder in self._models.items():
                self._run.log_artifact(self._make_artifact(name, folder))
        self._run.finish(exit_code=1 if error else 0)

    def _make_artifact(self, name: str, folder: Path) -> Any:
        artifact_name = re.sub(r"[^\w.-]", "-", f"{self._run.name}-{name}", flags=re.ASCII)
        artifact = wandb.Artifact(artifact_name, type="model")
        for file in sorted(folder.iterdir()):
            artifact.add_file(str(file))
        return artifact
