"""Recognise a model by its weights, wherever its folder lies."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_fingerprint(folder: Path) -> str:
    """Return 16 hex digits of the sha256 over the weights in a model folder, those of a per-label model included.

    Returns "" if there are none, or they cannot be read.
    """
    digest = hashlib.sha256()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("[0-9]*/model.safetensors")])
    try:
        for file in files:
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError:
        return ""
    return digest.hexdigest()[:16] if files else ""
