"""Ending at a step all ranks agree on, without a collective in every step.

A signal to any rank is told to all through the store. Every rank then answers with a bound, a step it will
not pass before it knows the decision; the run stops at the largest bound. No rank can have passed it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType, TracebackType

from paragan.comm.process_group import Lost, Store, or_lost
from paragan.comm.world import World

POLL_S = 0.2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def at_once() -> Generator[None]:
    """Outside of training there is nothing to write first: inside, a signal ends the program on the spot. While it
    trains, `Stop` takes over."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"{signal.Signals(number).name} while nothing was being trained")

    former = _caught(leave)
    try:
        yield
    finally:
        _back(former)


def _caught(handler: Handler) -> dict[signal.Signals, object]:
    """Handle the signals so from here on, where this thread may; what did before."""
    mine = threading.current_thread() is threading.main_thread()
    return {s: signal.signal(s, handler) for s in SIGNALS} if mine else {}


def _back(former: dict[signal.Signals, object]) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)  # pyright: ignore


class Stop:
    """Catches the signals that end a run, as a context manager in the main thread."""

    def __init__(self, world: World):
        self.world = world
        self.step = -1  # the round that is being played, or was the last; the loop keeps it true
        self.failed = False  # whether the end is asked for since the data failed
        self.reason = ""
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._bound: int | None = None
        self._asked = math.inf
        self._lock = threading.Lock()
        self._former: dict[signal.Signals, object] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Stop:
        self._former = _caught(self._on_signal)
        self.renew()
        return self

    def renew(self) -> None:
        """Listen in the world as it is now; who asked for the end before still does, or heard of it."""
        with self._lock:
            if self._bound is not None:
                self.request("asked by a rank that left")
            self._over.set()
            self._bound, self._over = None, threading.Event()
        if self.world.size > 1:
            self._watcher = threading.Thread(target=self._watch, args=(self._over,), daemon=True, name="stop")
            self._watcher.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _back(self._former)
        self._over.set()
        if self._watcher:
            self._watcher.join(5)

    def request(self, reason: str, failed: bool = False) -> None:
        """Ask for the end, as a signal would. failed: a rank cannot go on."""
        self.reason, self.failed = (reason, True) if failed else (self.reason or reason, self.failed)
        self._wanted.set()

    def answered(self, step: int) -> bool:
        """Whether all ranks stop before round `step`, which this one cannot play; returns once that is known."""
        deadline = time.monotonic() + self.world.timeout_s
        while self.world.size > 1 and self._bound is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        return self.due(step, begins=False)

    @property
    def asked_s(self) -> float:
        """For how long the end has been asked for, as far as this rank heard; 0 where nobody did."""
        if not self._wanted.is_set() and self._bound is None:
            return 0.0
        self._asked = min(self._asked, time.monotonic())
        return time.monotonic() - self._asked

    @property
    def asked(self) -> bool:
        """Whether this rank will stop before its next round: where others are, as soon as it has answered."""
        return self._wanted.is_set() if self.world.size == 1 else self._bound is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wanted.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.request(signal.Signals(number).name)

    def due(self, step: int, begins: bool = True) -> bool:
        """Whether the run ends before round `step` is played. Costs nothing while nobody asks. begins: if it does not,
        that round begins now; else it is still waited for, and may be the one that is not played."""
        if self.world.size == 1:
            return self._wanted.is_set()
        with self._lock:
            self.step = step if begins else self.step
            bound = self._bound
        return bound is not None and step >= bound and step >= or_lost(self._decision)

    def _decision(self) -> int:
        """The step all ranks stop at: the largest bound."""
        store, names = self.world.store, [f"stop/bound/{rank}" for rank in range(self.world.size)]
        deadline = time.monotonic() + self.world.timeout_s
        while not store.check(names):
            self.world.look()
            if time.monotonic() > deadline:
                raise Lost("a rank did not answer the request to stop")
            time.sleep(0.01)
        kind, _, self.reason = store.get("stop/reason").decode().partition(" ")
        self.failed = kind == "failed"
        return max(int(store.get(name)) for name in names)

    def _watch(self, over: threading.Event) -> None:
        store = self.world.store
        while not over.wait(POLL_S):
            try:
                if self._answered(store, over):
                    return
            except Lost:
                continue  # it did not answer in time
            except RuntimeError:
                return  # the store is gone, and with it its rank: the next exchange says so

    def _answered(self, store: Store, over: threading.Event) -> bool:
        """Pass on what was asked for here, and answer what was asked for anywhere."""
        if self._wanted.is_set() and not store.check(["stop/reason"]):
            here = f"on rank {self.world.rank}"
            store.set("stop/reason", f"failed {self.reason} ({here})" if self.failed else f"asked {self.reason} {here}")
        if not store.check(["stop/reason"]):
            return False
        with self._lock:
            if over.is_set():
                return True
            self._bound = self.step + 1 if self._bound is None else self._bound
        store.set(f"stop/bound/{self.world.rank}", str(self._bound))
        return True
