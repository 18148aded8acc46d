"""Log curves and samples for TensorBoard, as event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch.utils.tensorboard.writer import SummaryWriter

from paragan.train.loggers.logger import Logger, RunInfo


class TensorBoardLogger(Logger):
    """Writes event files. Without a run folder they go to the default of PyTorch, runs/DATE_HOST."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._writer: SummaryWriter | None = None

    def on_start(self, info: RunInfo) -> None:
        self._folder = str(info.folder) if info.folder else None

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        writer = self._open_writer()
        for name, value in stats.items():
            writer.add_scalar(name, value, images)

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        self._open_writer().add_images("fakes", pictures, images, dataformats="NHWC")

    def close(self, error: str = "") -> None:
        if self._writer:
            self._writer.close()

    def _open_writer(self) -> SummaryWriter:
        """Return the writer. It is created, and with it a file, once there is something to write."""
        if self._writer is None:
            self._writer = SummaryWriter(self._folder)
        return self._writer
