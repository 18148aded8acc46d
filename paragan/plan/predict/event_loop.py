"""Time that is counted and not spent: processes that sleep and wait for what happens.

A process is a generator: it yields seconds to sleep, or a `Happening` to wait for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any


class Happening:
    """Something that happens once."""

    __slots__ = ("_then", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._then: list[Callable[[], None]] = []

    def happen(self) -> None:
        self.happened = True
        then, self._then = self._then, []
        for action in then:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Do it when that has happened."""
        if self.happened:
            action()
        else:
            self._then.append(action)


Process = Generator[float | Happening, None, Any]


class Clock:
    """Everything that will be done, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, action))

    def start(self, process: Process) -> Happening:
        """Let it run; what is returned happens when it has ended."""
        ended = Happening()
        self._go_on(process, ended)
        return ended

    def _go_on(self, process: Process, ended: Happening) -> None:
        for awaited in process:
            if isinstance(awaited, Happening):
                if awaited.happened:
                    continue
                awaited.then(lambda: self._go_on(process, ended))
                return
            if awaited > 0:
                self.at(self.now + awaited, lambda: self._go_on(process, ended))
                return
        ended.happen()

    def run(self) -> None:
        """Until nothing is left to be done."""
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


class Threads:
    """So many processes at a time; the others wait their turn."""

    def __init__(self, clock: Clock, count: int):
        self.clock, self.free = clock, count
        self._waiting = deque[tuple[Process, Happening]]()

    def give(self, process: Process) -> Happening:
        """What is returned happens when it has ended."""
        ended = Happening()
        if self.free:
            self._start(process, ended)
        else:
            self._waiting.append((process, ended))
        return ended

    def _start(self, process: Process, ended: Happening) -> None:
        self.free -= 1
        self.clock.start(process).then(lambda: self._over(ended))

    def _over(self, ended: Happening) -> None:
        self.free += 1
        if self._waiting:
            self._start(*self._waiting.popleft())
        ended.happen()
