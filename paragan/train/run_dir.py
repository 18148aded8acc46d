"""The run folder: lock it, read and write what it holds. Needs no torch.

RUN/run.yaml          the record of the run
RUN/.lock             held by the process that writes here
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragan.comm.checkpoint_metadata import CorruptCheckpoint, list_checkpoints, read_metadata
from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.folder_lock import FolderLock, read_lock_owner
from paragan.core.schema import did_you_mean, read_yaml, to_yaml


class RunDir:
    """A run folder. A process that locks it owns it until it ends: one run at a time writes there.

    completed_duplicate : another folder in which the same run is complete, for messages
    is_shared           : whether this rank sees the folder of rank 0
    """

    def __init__(self, path: Path):
        self.path = path
        self.is_shared = True
        self.completed_duplicate: RunDir | None = None
        self._lock = FolderLock(path)

    @property
    def run_name(self) -> str:
        """The name of the run: that of its folder; in a per-label run RUN-label-0003."""
        if self.path.parent.name == "labels":
            return f"{self.path.parent.parent.name}-label-{self.path.name.partition('.')[0]}"
        return self.path.name

    @property
    def checkpoints_dir(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def trained_images(self) -> int:
        """Images seen, by the newest readable checkpoint."""
        return self.progress[0]

    @property
    def progress(self) -> tuple[int, float]:
        """Images seen and seconds of training, by the newest readable checkpoint."""
        for path in list_checkpoints(self.checkpoints_dir):
            try:
                clock = read_metadata(path)["clock"]
                return int(clock["images"]), float(clock["seconds"])
            except (CorruptCheckpoint, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0, 0.0

    def read_run_config(self) -> dict[str, Any] | None:
        """Return the contents of run.yaml, or None if there is none."""
        path = self.path / "run.yaml"
        return read_yaml(path) if path.exists() else None

    def write_run_config(self, record: Mapping[str, Any]) -> None:
        """Write run.yaml."""
        atomic_write_bytes(self.path / "run.yaml", to_yaml(record).encode())

    def require_empty(self) -> None:
        """Raise UsageError if the folder has files in it; hidden files do not count."""
        if self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise UsageError(f"--run-dir {self.path}: has files in it but no run.yaml. Use an empty or a new folder")

    def lock(self) -> bool:
        """Own the folder until this process ends. Returns False if another process does."""
        return self._lock.acquire()

    def lock_owner(self) -> str:
        """Return who holds the lock, for messages."""
        return read_lock_owner(self.path)

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        self._lock.release()


def require_run_dir(path: Path) -> Path:
    """Return the path if it is a run folder.

    Raises:
        UsageError: it is not; the message names run folders close to it.
    """
    if (path / "run.yaml").exists():
        return path
    if not path.exists():
        siblings = [str(p.parent) for p in sorted(path.parent.glob("*/run.yaml"))][-9:]
        hint = did_you_mean(str(path), siblings) if siblings else ""
        raise UsageError(f"{path}: does not exist{hint}")
    inside = [str(p.parent) for p in sorted(path.glob("*/run.yaml"))]
    hint = f"; there are runs in it: {', '.join(inside[-3:])}" if inside else ""
    raise UsageError(f"{path}: is no run folder (it has no run.yaml){hint}")
