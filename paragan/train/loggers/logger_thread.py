"""Call a logger in a thread of its own: training never waits for it, and goes on if it fails."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paragan.core.errors import UsageError
from paragan.train.loggers.logger import Logger, RunInfo

# method -> what it logs, and how many calls may wait; later ones are dropped
EVENTS = {
    "on_tick": ("tick", 1000),
    "on_images": ("grid", 8),
    "on_scores": ("score", 100),
    "on_finding": ("finding", 100),
    "on_checkpoint": ("checkpoint", 100),
    "on_model": ("model", 100),
    "close": ("end", 1),
}


class LoggerThread:
    """Creates a logger in a new thread, and calls its methods there in the order of `send`.

    Args:
        name: of the logger, for messages.
        create: makes the logger.
        info: the run.
        save_run_id: keeps the id of the run for the next start.
        report: prints a line.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], Logger],
        info: RunInfo,
        save_run_id: Callable[[str], None],
        report: Callable[[str], None],
    ):
        self.name = name
        self._create = create
        self._info = info
        self._save_run_id = save_run_id
        self._report = report
        self._calls = queue.SimpleQueue[tuple[str, tuple[Any, ...]]]()
        self._lock = threading.Lock()
        self._pending = Counter[str]()
        self._dropped = Counter[str]()
        self._method = "on_start"  # that is running
        self._method_since_s = time.monotonic()
        self._has_failed = False
        self._is_abandoned = False  # the run has ended without it
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"logger {name}")
        self._thread.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Have a method called. Does not wait: if too many calls of it wait already, this one is dropped."""
        with self._lock:
            if self._has_failed:
                return
            if self._pending[method] >= EVENTS[method][1]:
                self._dropped[method] += 1
                return
            self._pending[method] += 1
        self._calls.put((method, arguments))

    def join(self, deadline: float) -> None:
        """Wait until `close` was called, at most until a `time.monotonic()`, and report what was not logged."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._has_failed:
            return
        with self._lock:
            pending = self._pending - Counter(["close"])
            self._is_abandoned = self._thread.is_alive()
        if self._dropped:
            self._report(f"logger {self.name}: slower than the run; dropped {_format_counts(self._dropped)}")
        if self._is_abandoned:
            seconds = time.monotonic() - self._method_since_s
            missing = f"; missing: {_format_counts(pending)}" if pending else ""
            self._report(f"logger {self.name}: did not end in time{missing}; in {self._method} for {seconds:.0f} s")

    def _run(self) -> None:
        """Body of the thread."""
        logger: Logger | None = None
        try:
            logger = self._create()
            info = self._info
            if not info.run_id and (run_id := logger.new_run_id(info)):
                self._store_run_id(run_id)
                info = replace(info, run_id=run_id)
            if run_id := logger.on_start(info):
                self._store_run_id(run_id)
            while self._method != "close":
                method, arguments = self._calls.get()
                self._method_since_s = time.monotonic()
                self._method = method
                getattr(logger, method)(*arguments)
                with self._lock:
                    self._pending[method] -= 1
        except BaseException as error:  # the code of a library or of the user may raise anything
            with self._lock:
                self._has_failed = True
            reason = describe_error(error)
            if not self._is_abandoned:
                self._report(f"logger {self.name}: {reason}. It logs nothing more; training goes on")
            if logger and self._method != "close":
                with contextlib.suppress(BaseException):
                    logger.close(reason)

    def _store_run_id(self, run_id: object) -> None:
        if not isinstance(run_id, str):
            raise TypeError(f"the id of the run is {type(run_id).__name__}, not str")
        self._save_run_id(run_id)


def describe_error(error: BaseException) -> str:
    """Return the first line of an error, with its class unless it is written for the user."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # of the user's class of errors
        lines = []
    text = lines[0].rstrip(".") if lines else ""
    if isinstance(error, UsageError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format_counts(counts: Counter[str]) -> str:
    nouns = {method: EVENTS[method][0] + ("" if count == 1 else "s") for method, count in counts.items()}
    return ", ".join(f"{count:,} {nouns[method]}" for method, count in counts.items())
