"""Translate errors of obstore, and refuse requests in forked processes.

obstore sends requests from threads of its own. They do not exist in a forked process, where a request would never end,
so it is refused there. Its errors have a class, and a text with the HTTP status or with Rust's debug output.
"""

from __future__ import annotations

import os
import re
from typing import Any

from paragan.data.storage.retry import FileStat, PermanentError

_STATUS = re.compile(r"non-2xx status code: (\d{3}) ?([\w -]*)")
_NO_DATE_YEAR = 1970  # of an object whose server tells no date
_pid_of_threads = 0


def require_not_forked() -> None:
    """Raise PermanentError in a process that was forked from one that has sent requests: the threads are there."""
    global _pid_of_threads
    if _pid_of_threads not in (0, os.getpid()):
        raise PermanentError(
            "this process was forked from one that has read from there, and cannot read on: start it by spawn "
            "(DataLoader: multiprocessing_context='spawn')"
        )
    _pid_of_threads = os.getpid()


def file_stat(meta: Any) -> FileStat:
    """Return size and version from the metadata of an object."""
    modified = meta["last_modified"]
    date = "" if modified.year == _NO_DATE_YEAR else modified.isoformat()
    return FileStat(int(meta["size"]), str(meta["e_tag"] or date).removeprefix("W/"))


def describe_status(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error of obstore and its reason; 0 if there was no response."""
    match = _STATUS.search(str(error))
    return (int(match[1]), match[2].strip()) if match else (0, "")


def is_temporary(status: int) -> bool:
    """Return whether a request that got this status may succeed later."""
    return status in (408, 425, 429) or status >= 500


def describe_failure(error: Exception) -> str:
    """Return why a request got no full response, of what obstore says in its debug output."""
    text = str(error)
    for sign, reason in (
        ("dns error", "its host was not found"),
        ("TimedOut", "no full response in time"),
        ("kind: Timeout", "no full response in time"),
        ("ConnectionRefused", "Connection refused"),
        ("kind: Connect", "Cannot connect"),
        ("IncompleteMessage", "the connection was closed"),
        ("kind: Interrupted", "the response was cut off"),
    ):
        if sign in text:
            return reason
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0][:200] or type(error).__name__
