"""All loggers of a run as one: what happens is passed on to each of them, in a thread of its own.

RUN/loggers.json      the ids by which loggers continue their runs after a resume: {"wandb": "x3k9c2ab"}
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.atomic_write import atomic_write_bytes
from paragan.train.loggers.create_logger import LoggerEntry, create_logger, logger_name
from paragan.train.loggers.logger import Logger, RunInfo
from paragan.train.loggers.logger_thread import LoggerThread

RUN_IDS_FILE = "loggers.json"
INTERRUPTED_TIMEOUT_S = 10.0  # for loggers, at the end of a run that is not complete: its launcher may not wait long


class LoggerSet(Logger):
    """Passes events on to several loggers, which start with the first one: only the rank that logs starts them.

    Args:
        entries: names as in `output.loggers`, or loggers.
        info: the run.
        report: prints a line.
        upload_s: how long the end of a complete run waits for them.
    """

    def __init__(
        self, entries: Sequence[LoggerEntry], info: RunInfo, report: Callable[[str], None], upload_s: float = 120.0
    ):
        self._entries = entries
        self._info = info
        self._report = report
        self._upload_s = upload_s
        self._lock = threading.Lock()
        self._threads: list[LoggerThread] | None = None
        self._released: list[LoggerThread] = []

    def on_tick(self, stats: Mapping[str, float], images: int) -> None:
        self._send("on_tick", dict(stats), images)

    def on_images(self, path: Path, pictures: np.ndarray, images: int) -> None:
        self._send("on_images", path, pictures, images)

    def on_scores(self, scores: Mapping[str, float], images: int) -> None:
        self._send("on_scores", dict(scores), images)

    def on_finding(self, text: str, images: int) -> None:
        self._send("on_finding", text, images)

    def on_checkpoint(self, path: Path, images: int) -> None:
        self._send("on_checkpoint", path, images)

    def on_model(self, folder: Path, images: int) -> None:
        self._send("on_model", folder, images)

    def release(self) -> None:
        """End the loggers without waiting, as another rank logs from now on. A later event starts them again."""
        for thread in self._threads or []:
            thread.send("close", "another rank logs now")
            self._released.append(thread)
        self._threads = None

    def close(self, error: str = "") -> None:
        """End the loggers, wait for all of them together, and report what they could not log."""
        deadline = time.monotonic() + (INTERRUPTED_TIMEOUT_S if error else self._upload_s)
        for thread in self._threads or []:
            thread.send("close", error)
        for thread in (*self._released, *(self._threads or [])):
            thread.join(deadline)
        self._threads = None
        self._released = []

    def _send(self, method: str, *arguments: Any) -> None:
        if self._threads is None:
            self._threads = [self._start(entry) for entry in self._entries]
        for thread in self._threads:
            thread.send(method, *arguments)

    def _start(self, entry: LoggerEntry) -> LoggerThread:
        name = logger_name(entry)
        info = replace(self._info, run_id=self._read_run_ids().get(name, ""))
        save_run_id = functools.partial(self._save_run_id, name)
        return LoggerThread(name, functools.partial(create_logger, entry), info, save_run_id, self._report)

    def _read_run_ids(self) -> dict[str, str]:
        """Return the ids by name of the logger; {} if there are none, or none that can be read."""
        if not self._info.folder:
            return {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            ids = json.loads((self._info.folder / RUN_IDS_FILE).read_text("utf-8"))
            return {str(name): str(run_id) for name, run_id in ids.items()}
        return {}

    def _save_run_id(self, name: str, run_id: str) -> None:
        """Called in the thread of the logger."""
        if not self._info.folder:
            return
        with self._lock:
            ids = self._read_run_ids()
            if ids.get(name) != run_id:
                data = json.dumps(ids | {name: run_id}, indent=1).encode()
                atomic_write_bytes(self._info.folder / RUN_IDS_FILE, data)


@contextlib.contextmanager
def open_loggers(
    entries: Sequence[LoggerEntry], info: RunInfo, report: Callable[[str], None], upload_s: float
) -> Iterator[LoggerSet]:
    """Yield the loggers of a run, and end them afterwards. See `LoggerSet`."""
    loggers = LoggerSet(entries, info, report, upload_s)
    try:
        yield loggers
    except BaseException as error:
        loggers.close(str(error) or type(error).__name__)
        raise
    loggers.close()
