"""Stop all ranks at the same step, without a collective in every step.

A signal to any rank is announced through the store. Every rank then answers with a bound: a step it will not pass
before it knows the decision. The run stops at the largest bound, which no rank can have passed.

A rank that waits for another one in torch's code cannot run its signal handler. Therefore a thread notices signals too
(`signal.set_wakeup_fd`), says which ranks do not answer, and ends the wait if they never do, or at a second signal.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType, TracebackType

from paragan.comm.process_group import CommunicationError, Store, as_comm_error
from paragan.comm.world import World

POLL_S = 0.2
ANSWER_NOTICE_S = 4.0  # after a signal: the ranks that have not answered are named
ROUND_NOTICE_S = 2.0  # after a signal: a line says that the round is finished first
ANSWER_TIMEOUT_S = 20.0  # after a signal: waits for ranks that have not answered are ended
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SignalHandler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def exit_on_signal() -> Generator[None]:
    """End the program at once on a signal: outside of training there is nothing to write first.

    During training `StopCoordinator` takes over.
    """

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"{signal.Signals(signum).name} while nothing was being trained")

    previous_handlers = _install_handlers(raise_interrupt)
    try:
        yield
    finally:
        _restore_handlers(previous_handlers)


def _install_handlers(handler: SignalHandler) -> dict[signal.Signals, object]:
    """Install a handler for SIGNALS and return the previous ones; {} outside the main thread, where none can be."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in SIGNALS}


def _restore_handlers(previous_handlers: dict[signal.Signals, object]) -> None:
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)  # pyright: ignore


class StopCoordinator:
    """Catches the signals that end a run, and agrees with the other ranks on the step to stop at.

    A context manager, used in the main thread.

    step   : the round being played, or the last one
    failed : whether the stop was requested because data failed
    reason : the signal or the failure, "" as long as nobody asks
    """

    def __init__(self, world: World):
        self.world = world
        self.step = -1
        self.failed = False
        self.reason = ""
        self._requested = threading.Event()
        self._closed = threading.Event()
        self._bound: int | None = None
        self._requested_since_s = math.inf
        self._lock = threading.Lock()
        self._previous_handlers: dict[signal.Signals, object] = {}
        self._poll_thread: threading.Thread | None = None
        self._noticed_signal = ""  # by the thread that notices signals
        self._store_busy_since_s = math.inf  # since when the poll thread waits for the store
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._round_notice: threading.Timer | None = None

    def __enter__(self) -> StopCoordinator:
        self._previous_handlers = _install_handlers(self._on_signal)
        self.attach_to_world()
        if self._previous_handlers and self.world.size > 1 and not self.world.is_elastic:
            self._wakeup = socket.socketpair()
            self._wakeup[1].setblocking(False)
            signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch_signals, args=(self._wakeup[0],), daemon=True, name="signals").start()
        return self

    def attach_to_world(self) -> None:
        """Listen in the world as it is now. A stop that was requested before its ranks changed stays requested."""
        with self._lock:
            if self._bound is not None:
                self.request("asked by a rank that left")
            self._closed.set()
            self._closed = threading.Event()
            self._bound = None
        if self.world.size > 1:
            self._poll_thread = threading.Thread(target=self._poll, args=(self._closed,), daemon=True, name="stop")
            self._poll_thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wakeup:
            signal.set_wakeup_fd(-1)
            self._wakeup[1].close()  # ends the thread
        _restore_handlers(self._previous_handlers)
        if self._round_notice:
            self._round_notice.cancel()
        self._closed.set()
        if self._poll_thread:
            self._poll_thread.join(5)

    def request(self, reason: str, failed: bool = False) -> None:
        """Request a stop, as a signal does. With `failed`, because a rank cannot go on."""
        if failed:
            self.reason = reason
            self.failed = True
        else:
            self.reason = self.reason or reason
        self._requested.set()

    def acknowledged(self, step: int) -> bool:
        """Block until the ranks have answered. Returns True if all stop before round `step`, which this rank lacks."""
        deadline = time.monotonic() + self.world.timeout_s
        while self.world.size > 1 and self._bound is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        return self.is_due(step, is_starting=False)

    @property
    def requested_for_s(self) -> float:
        """Seconds since this rank knows of a requested stop; 0 if there is none."""
        if not self._requested.is_set() and self._bound is None:
            return 0.0
        self._requested_since_s = min(self._requested_since_s, time.monotonic())
        return time.monotonic() - self._requested_since_s

    @property
    def is_stopping(self) -> bool:
        """Whether this rank has answered a requested stop, or, alone, knows of one."""
        if self.world.size == 1:
            return self._requested.is_set()
        return self._bound is not None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._requested.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C stops at once
        name = signal.Signals(signum).name
        self.request(name)
        if self.world.is_main and not self._round_notice:
            text = f"paragan: {name}: this round ends first, then a checkpoint is written; Ctrl-C stops at once\n"
            self._round_notice = threading.Timer(ROUND_NOTICE_S, sys.stderr.write, [text])
            self._round_notice.daemon = True
            self._round_notice.start()

    def _watch_signals(self, wakeup: socket.socket) -> None:
        """Body of the thread that notices signals while the main thread waits in torch's code."""
        with wakeup:
            while data := wakeup.recv(1):
                if data[0] in SIGNALS:
                    break
            else:
                return
            self._noticed_signal = signal.Signals(data[0]).name
            start = time.monotonic()
            for seconds in (ANSWER_NOTICE_S, ANSWER_TIMEOUT_S):
                while (left := start + seconds - time.monotonic()) > 0:
                    wakeup.settimeout(left)
                    with contextlib.suppress(TimeoutError):
                        data = wakeup.recv(1)
                        if not data:
                            return  # the run has ended
                        if data[0] in SIGNALS:
                            self.world.interrupt_waits(self._is_store_stuck)
                            return
                silent = self._silent_ranks()
                if not silent:
                    return
                if seconds == ANSWER_NOTICE_S:
                    sys.stderr.write(
                        f"paragan: rank {self.world.rank}: {self._noticed_signal}, and {silent} does not answer; "
                        "a second signal stops at once\n"
                    )
            self.world.interrupt_waits(self._is_store_stuck)

    @property
    def _is_store_stuck(self) -> bool:
        return time.monotonic() > self._store_busy_since_s + ANSWER_NOTICE_S / 2

    def _silent_ranks(self) -> str:
        """Name the ranks that have not answered the request to stop; empty if all have."""
        if self._is_store_stuck:
            return "rank 0"
        try:
            ranks = range(self.world.size)
            silent = [str(rank) for rank in ranks if not self.world.store.check([f"stop/bound/{rank}"])]
        except RuntimeError:
            return "rank 0"
        return f"rank {', '.join(silent)}" if silent else ""

    def is_due(self, step: int, is_starting: bool = True) -> bool:
        """Return True if the run ends before round `step`. Costs nothing as long as no stop is requested.

        Args:
            is_starting: the round starts now unless the run ends. False while its data are waited for: it may still be
                the round that is not played.
        """
        if self.world.size == 1:
            return self._requested.is_set()
        with self._lock:
            if is_starting:
                self.step = step
            bound = self._bound
        return bound is not None and step >= bound and step >= as_comm_error(self._agreed_step)

    def _agreed_step(self) -> int:
        """Return the step all ranks stop at: the largest bound."""
        store = self.world.store
        names = [f"stop/bound/{rank}" for rank in range(self.world.size)]
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
        """Body of the polling thread."""
        store = self.world.store
        while not closed.wait(POLL_S):
            try:
                self._store_busy_since_s = time.monotonic()
                if self._acknowledge(store, closed):
                    return
            except CommunicationError:
                continue  # the store did not answer in time
            except RuntimeError:
                return  # the store is gone, and with it its rank: the next exchange reports that
            finally:
                self._store_busy_since_s = math.inf

    def _acknowledge(self, store: Store, closed: threading.Event) -> bool:
        """Announce a stop requested on this rank, and answer one requested on any. Returns True once answered."""
        is_requested = self._requested.is_set() or bool(self._noticed_signal)
        if is_requested and not store.check(["stop/reason"]):
            rank = f"on rank {self.world.rank}"
            if self.failed:
                store.set("stop/reason", f"failed {self.reason} ({rank})")
            else:
                store.set("stop/reason", f"asked {self.reason or self._noticed_signal} {rank}")
        if not store.check(["stop/reason"]):
            return False
        reason = store.get("stop/reason").decode().partition(" ")[2]
        with self._lock:
            if closed.is_set():
                return True
            self.reason = self.reason or reason
            if self._bound is None:
                self._bound = self.step + 1
        store.set(f"stop/bound/{self.world.rank}", str(self._bound))
        return True
