"""What the tests of sources share: images, files of every format, and a place that is far away."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paragan.core.errors import UsageError
from paragan.data.decode import decode_into
from paragan.data.open_source import open_source
from paragan.data.storage.local import LocalFileSystem


def random_images(count: int, side: int = 8, seed: int = 0) -> np.ndarray:  # [N, R, R, 3] uint8
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def encode_image(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


class FakeRemoteFileSystem(LocalFileSystem):
    """A folder that behaves as if it lay far away, and counts what is asked of it."""

    is_remote = True
    local_root = None

    def __init__(self, root: Path):
        super().__init__(root)
        self.location = f"far://{root.name}"
        self.requests: list[tuple[str, int, int | None]] = []

    def display_path(self, name: str) -> str:
        return f"{self.location}/{name}"

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        self.requests.append((name, start, size))
        return super().read(name, start, size)

    def open(self, name: str):
        return io.BytesIO((self.root / name).read_bytes())


def read_all_pixels(source) -> np.ndarray:
    """All records of a source, from many threads in a mixed order: [N, R, R, 3]."""
    first = source.read(0)
    side = first.shape[0] if isinstance(first, np.ndarray) else Image.open(io.BytesIO(first)).height
    out = np.empty((len(source), side, side, 3), np.uint8)
    with ThreadPoolExecutor(8) as pool:
        order = np.random.default_rng(1).permutation(len(source))
        list(pool.map(lambda index: decode_into(source.read(int(index)), out[index]), order))
    return out


def fingerprint(source) -> bytes:
    return b"".join(source.fingerprint_parts())


def open_error(where, **options) -> str:
    with pytest.raises(UsageError) as caught:
        open_source(str(where), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data: ")
    return message


def dataset_json(names, labels) -> str:
    return json.dumps({"labels": [[name, int(label)] for name, label in zip(names, labels, strict=True)]})
