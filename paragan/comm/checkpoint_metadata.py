"""List the checkpoints in a folder, and read their checkpoint.json, without torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError

FORMAT_VERSION = 2


class CorruptCheckpoint(Exception):
    """Raised for a checkpoint that cannot be read; the message says why."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdigit() and p.is_dir()), reverse=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's checkpoint.json.

    Raises:
        CorruptCheckpoint: it is absent or broken.
        UsageError: another version of paragan wrote it.
    """
    try:
        metadata = json.loads((path / "checkpoint.json").read_text())
        version = int(metadata["format"])
        checksum = metadata.pop("crc32", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"checkpoint.json: {error}") from error
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path}: checkpoint format {version}, and this version of paragan reads format {FORMAT_VERSION}. "
            "Use the version that wrote it, or another run folder"
        )
    if checksum != metadata_checksum(metadata):
        raise CorruptCheckpoint("checkpoint.json does not match its checksum")
    return metadata


def metadata_checksum(metadata: Mapping[str, Any]) -> int:
    """Return the checksum that checkpoint.json has of its other entries."""
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
