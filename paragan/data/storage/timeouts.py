"""Requests that wait at most so long: on fsspec's event loop, which runs in a thread of its own, or in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from paragan.data.storage.retry import RetryableError

T = TypeVar("T")


def run_on_loop(request: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """What a coroutine returns; `Again`, and its end, where that takes longer.

    As asyncio.run_coroutine_threadsafe, at half of its price, which is that of a request.
    """
    loop, over, started = get_loop(), threading.Lock(), list[asyncio.Task[T]]()
    over.acquire()

    def start() -> None:
        started.append(loop.create_task(request))
        started[0].add_done_callback(lambda _: over.release())

    def stop() -> None:
        started[0].cancel()

    loop.call_soon_threadsafe(start)
    ended = False
    try:
        ended = over.acquire(timeout=timeout_s)
    finally:
        if not ended:
            loop.call_soon_threadsafe(stop)
    if not ended:
        raise _timeout_error(timeout_s)
    if started[0].cancelled():  # whose error is no `Exception`, and would end the thread that asks
        raise RetryableError("its connection was closed here")
    return started[0].result()


def run_in_thread(request: Callable[[], T], timeout_s: float) -> T:
    """The same of a function that waits. One that never ends is left behind in its thread."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done, _ = wait([future], timeout_s)
    if not done:
        raise _timeout_error(timeout_s)
    return future.result()


def _timeout_error(timeout_s: float) -> RetryableError:
    return RetryableError(f"no full answer within {timeout_s:.3g} s")
