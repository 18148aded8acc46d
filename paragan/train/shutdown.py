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

from paragan.comm.process_group import CommunicationError, Store, as_comm_error
from paragan.comm.world import World

POLL_S = 0.2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SignalHandler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def exit_on_signal() -> Generator[None]:
    """Outside of training there is nothing to write first: inside, a signal ends the program on the spot. While it
    trains, `Stop` takes over."""

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"{signal.Signals(signum).name} while nothing was being trained")

    former = _install_handlers(raise_interrupt)
    try:
        yield
    finally:
        _restore_handlers(former)


def _install_handlers(handler: SignalHandler) -> dict[signal.Signals, object]:
    """Handle the signals so from here on, where this thread may; what did before."""
    mine = threading.current_thread() is threading.main_thread()
    return {s: signal.signal(s, handler) for s in SIGNALS} if mine else {}


def _restore_handlers(previous_handlers: dict[signal.Signals, object]) -> None:
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)  # pyright: ignore


class StopCoordinator:
    """Catches the signals that end a run, as a context manager in the main thread."""

    def __init__(self, world: World):
        self.world = world
        self.step = -1  # the round that is being played, or was the last; the loop keeps it true
        self.failed = False  # whether the end is asked for since the data failed
        self.reason = ""
        self._requested = threading.Event()
        self._closed = threading.Event()
        self._bound: int | None = None
        self._requested_since_s = math.inf
        self._lock = threading.Lock()
        self._previous_handlers: dict[signal.Signals, object] = {}
        self._poll_thread: threading.Thread | None = None

    def __enter__(self) -> StopCoordinator:
        self._previous_handlers = _install_handlers(self._on_signal)
        self.attach_to_world()
        return self

    def attach_to_world(self) -> None:
        """Listen in the world as it is now; who asked for the end before still does, or heard of it."""
        with self._lock:
            if self._bound is not None:
                self.request("asked by a rank that left")
            self._closed.set()
            self._bound, self._closed = None, threading.Event()
        if self.world.size > 1:
            self._poll_thread = threading.Thread(target=self._poll, args=(self._closed,), daemon=True, name="stop")
            self._poll_thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore_handlers(self._previous_handlers)
        self._closed.set()
        if self._poll_thread:
            self._poll_thread.join(5)

    def request(self, reason: str, failed: bool = False) -> None:
        """Ask for the end, as a signal would. failed: a rank cannot go on."""
        self.reason, self.failed = (reason, True) if failed else (self.reason or reason, self.failed)
        self._requested.set()

    def acknowledged(self, step: int) -> bool:
        """Whether all ranks stop before round `step`, which this one cannot play; returns once that is known."""
        deadline = time.monotonic() + self.world.timeout_s
        while self.world.size > 1 and self._bound is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        return self.is_due(step, is_starting=False)

    @property
    def requested_for_s(self) -> float:
        """For how long the end has been asked for, as far as this rank heard; 0 where nobody did."""
        if not self._requested.is_set() and self._bound is None:
            return 0.0
        self._requested_since_s = min(self._requested_since_s, time.monotonic())
        return time.monotonic() - self._requested_since_s

    @property
    def is_stopping(self) -> bool:
        """Whether this rank will stop before its next round: where others are, as soon as it has answered."""
        return self._requested.is_set() if self.world.size == 1 else self._bound is not None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._requested.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.request(signal.Signals(signum).name)

    def is_due(self, step: int, is_starting: bool = True) -> bool:
        """Whether the run ends before round `step` is played. Costs nothing while nobody asks. begins: if it does not,
        that round begins now; else it is still waited for, and may be the one that is not played."""
        if self.world.size == 1:
            return self._requested.is_set()
        with self._lock:
            self.step = step if is_starting else self.step
            bound = self._bound
        return bound is not None and step >= bound and step >= as_comm_error(self._agreed_step)

    def _agreed_step(self) -> int:
        """The step all ranks stop at: the largest bound."""
        store, names = self.world.store, [f"stop/bound/{rank}" for rank in range(self.world.size)]
        deadline = time.monotonic() + self.world.timeout_s
        while not store.check(names):
            self.world.raise_if_broken()
            if time.monotonic() > deadline:
                raise CommunicationError("a rank did not answer the request to stop")
            time.sleep(0.01)
        kind, _, self.reason = store.get("stop/reason").decode().partition(" ")
        self.failed = kind == "failed"
        return max(int(store.get(name)) for name in names)

    def _poll(self, closed: threading.Event) -> None:
        store = self.world.store
        while not closed.wait(POLL_S):
            try:
                if self._acknowledge(store, closed):
                    return
            except CommunicationError:
                continue  # it did not answer in time
            except RuntimeError:
                return  # the store is gone, and with it its rank: the next exchange says so

    def _acknowledge(self, store: Store, closed: threading.Event) -> bool:
        """Pass on what was asked for here, and answer what was asked for anywhere."""
        if self._requested.is_set() and not store.check(["stop/reason"]):
            here = f"on rank {self.world.rank}"
            store.set("stop/reason", f"failed {self.reason} ({here})" if self.failed else f"asked {self.reason} {here}")
        if not store.check(["stop/reason"]):
            return False
        with self._lock:
            if closed.is_set():
                return True
            self._bound = self.step + 1 if self._bound is None else self._bound
        store.set(f"stop/bound/{self.world.rank}", str(self._bound))
        return True
