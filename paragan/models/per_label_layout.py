"""Where the models and runs of single labels are."""

from __future__ import annotations

from pathlib import Path


def label_dir(folder: Path, label: int) -> Path:
    """Return the folder of a label in the folder of all labels."""
    return folder / f"{label:04d}"
