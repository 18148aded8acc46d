"""fsspec's event loop, which runs in a thread of its own, from any other thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from paragan.data.ask import Again

T = TypeVar("T")


def on_loop(request: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """What a coroutine returns; `Again`, and its end, where that takes longer."""
    return _within(asyncio.run_coroutine_threadsafe(request, get_loop()), timeout_s)


def in_thread(request: Callable[[], T], timeout_s: float) -> T:
    """The same of a function that waits. One that never ends is left behind in its thread."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return _within(future, timeout_s)


def _within(future: Future[T], timeout_s: float) -> T:
    try:
        return future.result(timeout_s)
    except TimeoutError:
        raise Again(f"no full answer within {timeout_s:.3g} s") from None
    finally:
        future.cancel()
