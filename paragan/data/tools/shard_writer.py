"""Write WebDataset shards: tar files with an image and its label in sequence, `00000007.jpg` and `00000007.cls`."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np

from paragan.data.formats.dataset_json import CLASSES_JSON
from paragan.data.source import Record
from paragan.data.tools.image_info import FORMAT_SUFFIXES, detect_format


class TarShardWriter:
    """Writes `out/shard-000000.tar`, ...; equal data sets become equal bytes.

    Args:
        out: the folder.
        labels: [N] int64, or None.
        classes: [K] names, for classes.json.
        shard_mb: a shard is closed before it would grow beyond this many million bytes.
    """

    def __init__(self, out: Path, labels: np.ndarray | None, classes: tuple[str, ...], shard_mb: float):
        out.mkdir(parents=True)
        self.out = out
        self.labels = labels
        self.max_bytes = shard_mb * 1e6
        self.names: list[str] = []
        self.num_written = 0
        self.tar: tarfile.TarFile | None = None
        if labels is not None:
            (out / CLASSES_JSON).write_text(json.dumps(list(classes)) + "\n")

    def add(self, record: Record) -> None:
        """Write the next image."""
        assert isinstance(record, bytes)
        key = f"{self.num_written:08d}"
        tar = self._shard_for(len(record))
        _add_file(tar, f"{key}{FORMAT_SUFFIXES[detect_format(record)]}", record)
        if self.labels is not None:
            _add_file(tar, f"{key}.cls", str(self.labels[self.num_written]).encode())
        self.num_written += 1

    def close(self) -> None:
        """Close the last shard."""
        if self.tar:
            self.tar.close()
            self.tar = None

    def _shard_for(self, size: int) -> tarfile.TarFile:
        """Return the shard for the next image of `size` bytes; begin a new one if the last is full."""
        if self.tar and self.tar.offset + size > self.max_bytes:
            self.close()
        if not self.tar:
            self.names.append(f"shard-{len(self.names):06d}.tar")
            self.tar = tarfile.open(self.out / self.names[-1], "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        return self.tar


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # without owner, dated 1970: the bytes do not depend on user and time
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
