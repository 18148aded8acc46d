"""Process every image of a data set on all cores, in order and with little memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from PIL import Image

from paragan.data.decode import DecodeFailure, catch_decode_error, decompression_bombs_as_errors

T = TypeVar("T")

ProgressFn = Callable[[int, int], object]  # how many images are done, of how many

_CHUNK_IMAGES = 8  # per task
_REMOTE_THREADS = 32


def ordered_parallel_map(
    count: int, work: Callable[[int], T], *, is_local: bool = True, progress: ProgressFn | None = None
) -> Generator[T | DecodeFailure]:
    """Yield work(0), ..., work(count - 1), computed a few dozen ahead; a `DecodeFailure` where it raises `DecodeError`.

    Args:
        count: number of calls.
        work: is called from many threads.
        is_local: use a thread per core; else more, because the work mostly waits.
        progress: is called with the number of results taken, and of all.
    """

    def run_chunk(start: int) -> list[T | DecodeFailure]:
        return [catch_decode_error(work, index) for index in range(start, min(start + _CHUNK_IMAGES, count))]

    threads = (os.cpu_count() or 1) if is_local else _REMOTE_THREADS
    starts = iter(range(0, count, _CHUNK_IMAGES))
    done = 0
    Image.init()  # imports Pillow's plugins now, not in several threads at once
    with decompression_bombs_as_errors(), ThreadPoolExecutor(threads) as pool:
        tasks = deque(pool.submit(run_chunk, start) for start in islice(starts, 2 * threads))
        try:
            while tasks:
                results = tasks.popleft().result()
                tasks.extend(pool.submit(run_chunk, start) for start in islice(starts, 1))
                yield from results
                done += len(results)
                if progress:
                    progress(done, count)
        finally:
            for task in tasks:
                task.cancel()
