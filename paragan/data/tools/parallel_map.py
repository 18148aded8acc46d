"""Work on every image of a set, on all cores, in the order of the set and in little memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from PIL import Image

from paragan.data.decode import Fault, attempt, bombs_are_errors

T = TypeVar("T")

Tell = Callable[[int, int], object]  # how many images are done, of how many

_STRETCH = 8  # images a task
_FAR = 32  # threads that wait for what lies far away


def flow(count: int, work: Callable[[int], T], *, near: bool = True, tell: Tell | None = None) -> Generator[T | Fault]:
    """work(0), ..., work(count - 1), a few dozen ahead of whoever takes them; a `Fault` where `DecodeError` is raised.

    near : the work is computing, a thread a core; else waiting, and there are more
    """

    def stretch(start: int) -> list[T | Fault]:
        return [attempt(work, index) for index in range(start, min(start + _STRETCH, count))]

    threads = (os.cpu_count() or 1) if near else _FAR
    starts = iter(range(0, count, _STRETCH))
    done = 0
    Image.init()  # the plugins are imported here, not by several threads at once
    with bombs_are_errors(), ThreadPoolExecutor(threads) as pool:
        ahead = deque(pool.submit(stretch, start) for start in islice(starts, 2 * threads))
        try:
            while ahead:
                results = ahead.popleft().result()
                ahead.extend(pool.submit(stretch, start) for start in islice(starts, 1))
                yield from results
                done += len(results)
                if tell:
                    tell(done, count)
        finally:
            for task in ahead:
                task.cancel()
