"""A discrete-event simulator: simulated time, and processes that sleep and wait for events.

A process is a generator. It yields seconds to sleep, or a `SimEvent` to wait for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any


class SimEvent:
    """An event that is triggered once."""

    __slots__ = ("_callbacks", "triggered")

    def __init__(self) -> None:
        self.triggered = False
        self._callbacks: list[Callable[[], None]] = []

    def trigger(self) -> None:
        """Run the callbacks, in the order in which they were added."""
        self.triggered = True
        callbacks = self._callbacks
        self._callbacks = []
        for callback in callbacks:
            callback()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the event is triggered, or now if it was."""
        if self.triggered:
            callback()
        else:
            self._callbacks.append(callback)


Process = Generator[float | SimEvent, None, Any]


class SimClock:
    """The simulated time and the queue of scheduled actions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def schedule(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `time_s`. Actions of one time run in the order in which they were scheduled."""
        self._sequence += 1
        heapq.heappush(self._queue, (time_s, self._sequence, action))

    def start_process(self, process: Process) -> SimEvent:
        """Run a process until it waits. The returned event is triggered when it has ended."""
        done = SimEvent()
        self._resume(process, done)
        return done

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
        """Run scheduled actions until none is left."""
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()


class SimThreads:
    """Runs at most `num_threads` processes at a time, first come first served."""

    def __init__(self, clock: SimClock, num_threads: int):
        self.clock = clock
        self.num_idle = num_threads
        self._queue = deque[tuple[Process, SimEvent]]()

    def submit(self, process: Process) -> SimEvent:
        """Run a process, or queue it. The returned event is triggered when it has ended."""
        done = SimEvent()
        if self.num_idle:
            self._start(process, done)
        else:
            self._queue.append((process, done))
        return done

    def _start(self, process: Process, done: SimEvent) -> None:
        self.num_idle -= 1
        self.clock.start_process(process).add_callback(lambda: self._on_finished(done))

    def _on_finished(self, done: SimEvent) -> None:
        self.num_idle += 1
        if self._queue:
            self._start(*self._queue.popleft())
        done.trigger()
