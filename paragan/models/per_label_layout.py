"""Name the folders of single labels, of their models and of their runs."""

from __future__ import annotations

from pathlib import Path


def label_dir(folder: Path, label: int) -> Path:
    """Return the folder of a label in the folder of all labels."""
    return folder / f"{label:04d}"
