"""The interface of a logger: `Logger`, the base class of the built-in ones and of those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RunInfo:
    """What a logger learns about a run when it starts.

    name   : of the run: that of its folder
    folder : the run folder; None in a loop of the user's own (`ScalingManager`)
    config : the record of the run, as in run.yaml
    run_id : what `new_run_id` or `on_start` returned, now or at an earlier start; "" if neither has yet
    """

    name: str
    folder: Path | None
    config: Mapping[str, Any]
    run_id: str = ""


class Logger:
    """Gets what happens in a run. The methods here do nothing; override those that you need.

        class Curve(pg.Logger):
            def on_tick(self, stats, images):
                print(images, stats["Loss/G/loss"])

    The main rank calls the methods, one after the other, in a thread of the logger. So they may take their time, but
    where a logger is slower than the run, ticks are dropped. After an error only `close` is called, and training goes
    on. The constructor is called on every rank, as a check: it should only store its arguments.

    The argument `images` is the training time: how many real images D was trained on. After a resume, what was logged
    since the last checkpoint is logged again.
    """

    def new_run_id(self, info: RunInfo) -> str:
        """Choose the id of a new run, before `on_start` is called for the first time.

        Returns:
            The id, kept in the run folder at once, so that a run that is stopped while the logger starts continues
            with it; "" if `on_start` returns the id.
        """
        return ""

    def on_start(self, info: RunInfo) -> str | None:
        """Start, or continue the run `info.run_id`.

        Returns:
            An id by which to continue, kept in the run folder (loggers.json) as the next `info.run_id`; None: none.
        """

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        """Log a line of statistics, such as {"Loss/G/loss": 0.7, "Progress/kimg": 4.0} (docs/run_folder.md)."""

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        """Log a grid of samples.

        Args:
            path: the PNG file of the whole grid.
            pictures: its first images, at most 64, [n, H, W, 3] uint8.
            images: the training time.
        """

    def on_scores(self, scores: Mapping[str, float], images: int) -> None:
        """Log scores, such as {"fd_pixels": 1.2}."""

    def on_finding(self, text: str, images: int) -> None:
        """Log what the health monitor has detected."""

    def on_checkpoint(self, path: Path, images: int) -> None:
        """Handle a checkpoint that was written. Later ones replace it (`output.max_checkpoints`)."""

    def on_model(self, folder: Path, images: int) -> None:
        """Handle a model folder that was written: model/, or best/. Later ones replace its files."""

    def close(self, error: str = "") -> None:
        """End. Called once, and nothing after it.

        Args:
            error: why the run ends before it is complete; "" if it is complete.
        """
