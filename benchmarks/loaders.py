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
from shards import Files, Shards
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from paragan.data.bad import Bad
from paragan.data.lanes import Lanes
from paragan.data.streamed import Streamed

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


def ours(where: str, shards: Shards) -> Feed:
    """TODO a stand-in: today's Lanes over Streamed, which read nothing ahead. The one place to plug the pipeline in:
    `load(where, resolution=shards.resolution, hold="stream")`, and its depth and workers as `ready` and `workers`."""
    images: Any = _streamed(where, shards)
    owned = tuple(range(LANES))
    lanes = Lanes(images, shards.labels, owned=owned, lanes=LANES, batch=BATCH, seed=0, channels_last=False)

    def batches() -> Batches:
        while True:
            for hand in lanes.next():
                assert hand.labels is not None
                yield hand.images, hand.labels

    return Feed(batches())


def ours_uint8(where: str, shards: Shards) -> Feed:
    """TODO a stand-in: what goes to a device, uint8 [64, R, R, 3], from the same pipeline as `ours`."""
    images = _streamed(where, shards)

    def batches() -> Batches:
        for index in _epochs(len(shards)):
            yield torch.from_numpy(images[index]), torch.from_numpy(shards.labels[index])

    return Feed(batches())


class _Source:
    """The part of `paragan.data.source.Source` that `Streamed` needs; goes when shards are read by paragan itself."""

    def __init__(self, where: str, shards: Shards):
        self.files, self.labels, self.near = Files(where, shards, connections=16), shards.labels, False

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        return self.files.jpeg(index)


def _streamed(where: str, shards: Shards) -> Streamed:
    return Streamed(cast(Any, _Source(where, shards)), Bad(shards.labels, len(shards), str, 0.01), shards.resolution, 3)


def _epochs(count: int) -> Iterator[np.ndarray]:
    """[64] indices, shuffled anew every time round."""
    chance = np.random.default_rng(0)
    while True:
        order = chance.permutation(count)
        yield from order[: count // BATCH * BATCH].reshape(-1, BATCH)


# torch's DataLoader ---------------------------------------------------------------------------------------


class _Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, where: str, shards: Shards):
        self.files, self.labels = Files(where, shards), shards.labels.tolist()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(self.files.jpeg(index))).convert("RGB")
        return _tensor(image), self.labels[index]


class _Endless(Sampler[int]):
    """Shuffled epochs without an end: what DataLoader does at an epoch's end is not what is measured."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


def dataloader(where: str, shards: Shards, workers: int = 2, prefetch: int = 2) -> Feed:
    data = _Images(where, shards)
    loader = DataLoader(
        data, batch_size=BATCH, sampler=_Endless(len(shards)), num_workers=workers, prefetch_factor=prefetch
    )
    return _by_processes(loader, workers)


def _tensor(image: Image.Image) -> Tensor:
    """As ToTensor and Normalize make it."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(127.5).sub_(1)


def _by_processes(loader: Iterable[Any], workers: int) -> Feed:
    """torch's iterator knows what has arrived: in its queue, and out of turn in `_task_info`."""
    batches: Any = iter(loader)

    def ready() -> float:
        early = sum(len(task) == 2 for task in list(batches._task_info.values()))
        return early + batches._worker_result_queue.qsize()

    return Feed(batches, ready, lambda: workers, batches._shutdown_workers)


# webdataset -----------------------------------------------------------------------------------------------


def web(where: str, shards: Shards, workers: int = 2, prefetch: int = 2) -> Feed:
    urls = [f"{where}/{name}" for name in shards.names]
    data = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000).decode("pil").to_tuple("jpg", "cls")
    batched = data.map_tuple(_tensor, int).batched(BATCH, collation_fn=_stacked, partial=False).repeat()
    loader = webdataset.WebLoader(batched, batch_size=None, num_workers=workers, prefetch_factor=prefetch)
    return _by_processes(cast(Any, loader).pipeline[0], workers)


def _stacked(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


CONTESTANTS: dict[str, Callable[..., Feed]] = {"ours": ours, "dataloader": dataloader, "webdataset": web}


def checked(batch: tuple[Tensor, Tensor], resolution: int) -> None:
    """That everybody delivers the same."""
    images, labels = batch
    assert images.shape == (BATCH, 3, resolution, resolution), images.shape
    assert images.dtype == torch.float32
    assert -1 <= images.min() < -0.5 < 0.5 < images.max() <= 1
    assert labels.shape == (BATCH,)
    assert labels.dtype == torch.int64
