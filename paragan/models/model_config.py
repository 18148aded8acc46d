"""config.json of a model folder: what the model is, and the checksums of its weights. Reading it needs no torch."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError

FORMAT_VERSION = 2


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. UsageError if it cannot be read, or has another format version."""
    try:
        return parse_model_config(folder, read_config_bytes(folder))
    except OSError as error:
        raise UsageError(f"{folder}/config.json cannot be read: {error.strerror}") from error


def read_config_bytes(folder: Path) -> bytes:
    """Read config.json. OSError if it is missing, or not a regular file: reading a pipe would never end."""
    path = folder / "config.json"
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return path.read_bytes()


def parse_model_config(folder: Path, data: bytes) -> dict[str, Any]:
    """Return the content of config.json of a model folder. UsageError as of `read_model_config`."""
    try:
        config = json.loads(data)
        version = int(config["format"])
        kimg = float(config.get("kimg", 0))
        if not all(isinstance(checksum, int) for checksum in dict(config.get("crc32", {})).values()):
            raise TypeError("crc32 must hold integers")
        if not 0 <= kimg < math.inf:
            raise ValueError("kimg must be 0 or more")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UsageError(f"{folder}/config.json cannot be read: {error!r}") from error
    if version != FORMAT_VERSION:
        raise UsageError(f"{folder}: model format {version}; this version of paragan reads format {FORMAT_VERSION}")
    return {**config, "kimg": kimg}
