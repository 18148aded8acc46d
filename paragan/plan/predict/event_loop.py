"""Time that is counted and not spent: processes that sleep and wait for what happens.

A process is a generator: it yields seconds to sleep, or a `Happening` to wait for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any


class SimEvent:
    """Something that happens once."""

    __slots__ = ("_callbacks", "triggered")

    def __init__(self) -> None:
        self.triggered = False
        self._callbacks: list[Callable[[], None]] = []

    def trigger(self) -> None:
        self.triggered = True
        then, self._callbacks = self._callbacks, []
        for action in then:
            action()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Do it when that has happened."""
        if self.triggered:
            callback()
        else:
            self._callbacks.append(callback)


Process = Generator[float | SimEvent, None, Any]


class SimClock:
    """Everything that will be done, and when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def schedule(self, time_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (time_s, self._sequence, action))

    def start_process(self, process: Process) -> SimEvent:
        """Let it run; what is returned happens when it has ended."""
        ended = SimEvent()
        self._resume(process, ended)
        return ended

    def _resume(self, process: Process, done: SimEvent) -> None:
        for awaited in process:
            if isinstance(awaited, SimEvent):
                if awaited.triggered:
                    continue
                awaited.add_callback(lambda: self._resume(process, done))
                return
            if awaited > 0:
                self.schedule(self.now_s + awaited, lambda: self._resume(process, done))
                return
        done.trigger()

    def run(self) -> None:
        """Until nothing is left to be done."""
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()


class SimThreads:
    """So many processes at a time; the others wait their turn."""

    def __init__(self, clock: SimClock, num_threads: int):
        self.clock, self.num_idle = clock, num_threads
        self._queue = deque[tuple[Process, SimEvent]]()

    def submit(self, process: Process) -> SimEvent:
        """What is returned happens when it has ended."""
        ended = SimEvent()
        if self.num_idle:
            self._start(process, ended)
        else:
            self._queue.append((process, ended))
        return ended

    def _start(self, process: Process, done: SimEvent) -> None:
        self.num_idle -= 1
        self.clock.start_process(process).add_callback(lambda: self._on_finished(done))

    def _on_finished(self, done: SimEvent) -> None:
        self.num_idle += 1
        if self._queue:
            self._start(*self._queue.popleft())
        done.trigger()
