"""Work on every image of a set, on all cores, in the order of the set and in little memory."""

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

_CHUNK_IMAGES = 8  # images a task
_REMOTE_THREADS = 32  # threads that wait for what lies far away


def ordered_parallel_map(
    count: int, work: Callable[[int], T], *, is_local: bool = True, progress: ProgressFn | None = None
) -> Generator[T | DecodeFailure]:
    """work(0), ..., work(count - 1), a few dozen ahead of whoever takes them; a `Fault` where `DecodeError` is raised.

    near : the work is computing, a thread a core; else waiting, and there are more
    """

    def run_chunk(start: int) -> list[T | DecodeFailure]:
        return [catch_decode_error(work, index) for index in range(start, min(start + _CHUNK_IMAGES, count))]

    threads = (os.cpu_count() or 1) if is_local else _REMOTE_THREADS
    starts = iter(range(0, count, _CHUNK_IMAGES))
    done = 0
    Image.init()  # the plugins are imported here, not by several threads at once
    with decompression_bombs_as_errors(), ThreadPoolExecutor(threads) as pool:
        ahead = deque(pool.submit(run_chunk, start) for start in islice(starts, 2 * threads))
        try:
            while ahead:
                results = ahead.popleft().result()
                ahead.extend(pool.submit(run_chunk, start) for start in islice(starts, 1))
                yield from results
                done += len(results)
                if progress:
                    progress(done, count)
        finally:
            for task in ahead:
                task.cancel()
