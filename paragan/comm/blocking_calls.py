"""Calls into torch that block, made so that they end and that signals are answered.

While a thread waits in C++, no Python signal handler runs, and some of torch's waits have no timeout (a store's first
answer). Such a call runs in a thread of its own, and the calling thread polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from paragan.comm.process_group import POLL_S, CommunicationError

T = TypeVar("T")


def call_with_timeout(
    action: Callable[[], T], timeout_s: float, on_timeout: str, check: Callable[[], None] = lambda: None
) -> T:
    """Run a blocking call in a thread, and return its result.

    A call that does not return is left behind in its thread; the thread does not keep the process alive.

    Args:
        timeout_s: how long the call may take.
        on_timeout: what is wrong if it takes longer.
        check: called again and again meanwhile; what it raises ends the wait.

    Raises:
        CommunicationError: it took longer.
        BaseException: whatever the call or `check` raises, or a signal handler of the calling thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # is raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="blocking-call")
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive():
        thread.join(POLL_S)
        if thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise CommunicationError(on_timeout)
    if errors:
        raise errors[0]
    return results[0]
