"""JPEGs in tar shards, for benchmarks: written from an npz of small images, and read by position or by name."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import urllib3
from PIL import Image

from paragan.data.tools.reindex import reindex

QUALITY = 90


@dataclass(frozen=True)
class Shards:
    """Where the images lie: KEY.jpg and KEY.cls in tar files, as webdataset has it.

    names : of the shards;  shard, start, size, labels : [N] of the JPEGs in them
    """

    names: tuple[str, ...]
    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray
    labels: np.ndarray
    resolution: int

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> dict[str, float]:
        return {
            "images": len(self),
            "resolution": self.resolution,
            "quality": QUALITY,
            "mean_bytes": round(float(self.size.mean()), 1),
            "shards": len(self.names),
        }


def write_shards(
    images: Path, folder: Path, resolution: int, count: int | None = None, shard_mb: float = 4.0
) -> Shards:
    """The first `count` images of an npz (uint8 [N, H, W, 3], and labels), resized bicubic, as shards in `folder`, with
    the index that `paragan data index` makes."""
    with np.load(images) as data:
        pixels, labels = data["images"][:count], data["labels"][:count].astype(np.int64)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        encoded = pool.map(lambda image: _encode_jpeg(image, resolution), pixels)
        names, rows = _write_shards(encoded, labels, folder, shard_mb * 1e6)
    shard, start, size = np.array(rows, np.int64).T
    reindex(str(folder))
    return Shards(tuple(names), shard, start, size, labels, resolution)


def _write_shards(
    encoded: Iterable[bytes], labels: np.ndarray, folder: Path, most: float
) -> tuple[list[str], list[tuple[int, int, int]]]:
    names: list[str] = []
    rows: list[tuple[int, int, int]] = []  # shard, start, size
    tar = None
    for i, data in enumerate(encoded):
        if tar is None or tar.offset >= most:
            if tar is not None:
                tar.close()
            names.append(f"{len(names):06d}.tar")
            tar = tarfile.open(folder / names[-1], "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        rows.append((len(names) - 1, tar.offset + tarfile.BLOCKSIZE, len(data)))
        _add_file(tar, f"{i:08d}.jpg", data)
        _add_file(tar, f"{i:08d}.cls", str(labels[i]).encode())
    if tar is not None:
        tar.close()
    return names, rows


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _encode_jpeg(image: np.ndarray, resolution: int) -> bytes:
    out = io.BytesIO()
    resized = Image.fromarray(image).resize((resolution, resolution), Image.Resampling.BICUBIC)
    resized.save(out, format="JPEG", quality=QUALITY)
    return out.getvalue()


class ShardReader:
    """The shards under a path or an http address. Connects when first read: in the worker that reads."""

    def __init__(self, where: str, shards: Shards, connections: int = 1):
        self.where, self.shards, self.far, self._connections = where, shards, where.startswith("http"), connections
        self._http: urllib3.PoolManager | None = None
        self._open: dict[int, int] = {}  # shard: descriptor

    def read_jpeg(self, index: int) -> bytes:
        shards = self.shards
        shard, start, size = int(shards.shard[index]), int(shards.start[index]), int(shards.size[index])
        if self.far:
            return self._read_range(shard, start, size)
        if shard not in self._open:
            self._open[shard] = os.open(f"{self.where}/{shards.names[shard]}", os.O_RDONLY)
        return os.pread(self._open[shard], size, start)

    def _read_range(self, shard: int, start: int, size: int) -> bytes:
        if self._http is None:
            self._http = urllib3.PoolManager(maxsize=self._connections)
        url = f"{self.where}/{self.shards.names[shard]}"
        data = self._http.request("GET", url, headers={"Range": f"bytes={start}-{start + size - 1}"}).data
        assert len(data) == size
        return data
