"""Retry requests to remote storage.

`retry` is the only loop that repeats a request. Every backend reports a failure as one of three errors: retryable, not
found, or permanent; those that wait do so in `timeouts`, with a timeout.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

from paragan.core.errors import RunError, UsageError
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import DirListing, RemoteOptions, redact

PART_BYTES = 2 * 2**20  # of a large file, per request
FIRST_DELAY_S = 0.1  # after the first failure; doubles with every other one
MAX_DELAY_S = 10.0
MIN_TIMEOUT_S = 1.0  # of the last request, however little time is left for retries

T = TypeVar("T")


@dataclass(frozen=True)
class FileStat:
    """What a server says about a file.

    size    : in bytes; None if unknown
    version : a text that changes when the file does; "" if unknown
    """

    size: int | None
    version: str = ""


@dataclass(frozen=True)
class Response:
    """Bytes of a file (fewer than requested only at its end), and what the server said about it."""

    data: bytes
    stat: FileStat


@dataclass(frozen=True)
class StoredObject:
    """A whole object of a store, and what tells it from another one that replaced it."""

    data: bytes
    version: dict[str, Any]


class RetryableError(Exception):
    """This request failed, another may succeed.

    Args:
        reason: for messages.
        retry_after_s: the pause that the server asks for.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0):
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class NotFoundError(Exception):
    """The server answers, and has no such file. The message is the reason, such as 404."""


class PermanentError(Exception):
    """The server will never answer this request. The message is the reason and what to do."""


def short_response_error(received: int, requested: int) -> RetryableError:
    """Return the error for a response with too few bytes."""
    return RetryableError(f"it sent {received:,} of the requested {requested:,} bytes")


class StorageBackend(Protocol):
    """A folder of a server, by one protocol. Names are relative to it. Safe to use from many threads.

    Every method returns within `timeout_s`, or raises RetryableError, NotFoundError or PermanentError and nothing else.
    """

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        """Read bytes `start` to `end` of a file.

        With `end` None read its first bytes: all of them if it is short, or if the server cannot send less.
        """
        ...

    def stat(self, name: str, timeout_s: float) -> FileStat:
        """Return the size and version of a file."""
        ...

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        """List a folder. Also returns what the listing says about its files, by name in the folder."""
        ...


def retry_delay_s(attempt: int, jitter: float, retry_after_s: float = 0.0) -> float:
    """Return the pause after the n-th failed attempt: exponential backoff with jitter.

    Args:
        attempt: 1, 2, ...
        jitter: uniform in 0..1; scales the backoff by 0.5 to 1, so that many clients do not return at once.
        retry_after_s: the pause that the server asked for; the backoff is added to it.
    """
    backoff_s = min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 60), MAX_DELAY_S)
    return retry_after_s + backoff_s * (1 + jitter) / 2


def retry(request: Callable[[float], T], location: str, options: RemoteOptions, field: str = "data") -> T:
    """Call `request(timeout_s)` until it succeeds, for at most `options.retry_for_s`, and return its result.

    Args:
        request: the request; takes its timeout.
        location: the address, for messages.
        options: timeout and time for retries.
        field: what the address was set by, for messages.

    Raises:
        DecodeError: the file was not found, twice.
        UsageError: the error is permanent.
        RunError: no attempt succeeded in time.
    """
    end = time.monotonic() + options.retry_for_s
    was_not_found = False
    for attempt in count(1):
        left_s = end - time.monotonic()
        retry_after_s = 0.0
        try:
            return request(min(options.timeout_s, max(left_s, MIN_TIMEOUT_S)))
        except PermanentError as error:
            raise UsageError(redact(f"{field}: {location}: {error}")) from None
        except NotFoundError as error:
            if was_not_found:
                raise DecodeError(f"not found ({error})") from None
            was_not_found = True
        except RetryableError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise RunError(
                    redact(
                        f"{field}: {location} cannot be reached: {error} "
                        f"({attempt:,} attempts within {options.retry_for_s:g} s)"
                    )
                ) from None
            retry_after_s = error.retry_after_s
        time.sleep(min(retry_delay_s(attempt, random.random(), retry_after_s), max(left_s, 0.0)))
    raise AssertionError
