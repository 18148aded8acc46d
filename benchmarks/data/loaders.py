"""The contestants of pipeline.py: each gives batches of 64 JPEGs as float32 [64, 3, R, R] in [-1, 1], with labels.

dataloader   torch's, over a map-style dataset: a byte range an image, Pillow, shuffled; 2 workers, prefetch 2
webdataset   its WebLoader, streaming the shards with curl: 2 workers, a shuffle buffer of 1000
ours         paragan's lanes
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.data.make_shards import ShardReader, Shards
from paragan.data.dataset import load_data
from paragan.data.lanes import LaneLoader
from paragan.data.loader.prefetch import PrefetchOptions as Ahead
from paragan.data.loader.prefetch import PrefetchPipeline
from paragan.data.storage.filesystem import RemoteOptions

BATCH, LANES = 64, 8
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Feed:
    """Endless batches, and for the plot: how many are ready, and how many threads or processes work for them."""

    batches: Batches
    ready: Callable[[], float | None] = lambda: None
    workers: Callable[[], float | None] = lambda: None
    close: Callable[[], object] = lambda: None


# Ours -----------------------------------------------------------------------------------------------------


def make_paragan(where: str, shards: Shards, **feed: int) -> Feed:
    """As `paragan train --data WHERE` reads them, with nothing set by hand; without the cache on disk, which no other
    has: every image comes from the server."""
    lanes = _make_lanes(where, shards, feed)

    def batches() -> Batches:
        while True:
            for worker in lanes.next_micro_batches():
                assert worker.labels is not None
                yield worker.images, worker.labels

    def reported(name: str) -> Callable[[], float | None]:
        return lambda: lanes.stats().get(f"Data/{name}")

    return Feed(batches(), reported("ready"), reported("workers"), lanes.close)


def make_paragan_uint8(where: str, shards: Shards, **feed: Any) -> Feed:
    """What goes to a device, uint8 [64, R, R, 3], from the same pipeline."""
    lanes = _make_lanes(where, shards, feed)
    pipeline = PrefetchPipeline(cast(Any, lanes.images), lanes.iter_batch_indices(0), Ahead(**feed))

    def batches() -> Batches:
        nothing = torch.zeros(BATCH, dtype=torch.int64)
        while True:
            yield torch.from_numpy(pipeline.next_batch()), nothing

    return Feed(batches(), close=pipeline.close)


def _make_lanes(where: str, shards: Shards, feed: dict[str, Any]) -> LaneLoader:
    images = load_data(
        where, resolution=shards.resolution, channels=3, cache="stream", remote=RemoteOptions(cache_dir="")
    )
    owned = tuple(range(LANES))
    return LaneLoader(
        images.images,
        images.labels,
        local_lanes=owned,
        num_lanes=LANES,
        batch_size=BATCH,
        seed=0,
        prefetch=Ahead(**feed),
    )


# torch's DataLoader ---------------------------------------------------------------------------------------


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, where: str, shards: Shards):
        self.files, self.labels = ShardReader(where, shards), shards.labels.tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(self.files.read_jpeg(index))).convert("RGB")
        return _to_tensor(image), self.labels[index]


class _Endless(Sampler[int]):
    """Shuffled epochs without an end: what DataLoader does at an epoch's end is not what is measured."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


def make_dataloader(where: str, shards: Shards, workers: int = 2, prefetch: int = 2) -> Feed:
    data = _Images(where, shards)
    loader = DataLoader(
        data, batch_size=BATCH, sampler=_Endless(len(shards)), num_workers=workers, prefetch_factor=prefetch
    )
    return _count_ready(loader, workers)


def _to_tensor(image: Image.Image) -> Tensor:
    """As ToTensor and Normalize make it."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(127.5).sub_(1)


def _count_ready(loader: Iterable[Any], workers: int) -> Feed:
    """torch's iterator knows what has arrived: in its queue, and out of turn in `_task_info`."""
    batches: Any = iter(loader)

    def ready() -> float:
        early = sum(len(task) == 2 for task in list(batches._task_info.values()))
        return early + batches._worker_result_queue.qsize()

    return Feed(batches, ready, lambda: workers, batches._shutdown_workers)


# webdataset -----------------------------------------------------------------------------------------------


def make_webdataset(where: str, shards: Shards, workers: int = 2, prefetch: int = 2) -> Feed:
    urls = [f"{where}/{name}" for name in shards.names]
    data = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000).decode("pil").to_tuple("jpg", "cls")
    batched = data.map_tuple(_to_tensor, int).batched(BATCH, collation_fn=_collate, partial=False).repeat()
    loader = webdataset.WebLoader(batched, batch_size=None, num_workers=workers, prefetch_factor=prefetch)
    return _count_ready(cast(Any, loader).pipeline[0], workers)


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


CONTESTANTS: dict[str, Callable[..., Feed]] = {
    "ours": make_paragan,
    "dataloader": make_dataloader,
    "webdataset": make_webdataset,
}


def check_batch(batch: tuple[Tensor, Tensor], resolution: int) -> None:
    """That everybody delivers the same."""
    images, labels = batch
    assert images.shape == (BATCH, 3, resolution, resolution), images.shape
    assert images.dtype == torch.float32
    assert -1 <= images.min() < -0.5 < 0.5 < images.max() <= 1
    assert labels.shape == (BATCH,)
    assert labels.dtype == torch.int64
