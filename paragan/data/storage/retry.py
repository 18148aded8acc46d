"""Asking a server, and asking again for as long as it may still answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from paragan.core.errors import RunError, UsageError
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import DirListing, RemoteOptions, redact

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 10.0  # pauses: the first, and what they grow to
MIN_TIMEOUT_S = 1.0  # even the last request before patience ends has this long

T = TypeVar("T")


@dataclass(frozen=True)
class FileStat:
    """What a server tells about a file. `size` None: it does not; `version`: changes when the file does, or ""."""

    size: int | None
    version: str = ""


@dataclass(frozen=True)
class Response:
    """Bytes of a file, fewer than asked for only where it ends there, and what was told about it besides."""

    data: bytes
    stat: FileStat


class RetryableError(Exception):
    """No answer this time. `after_s`: the server's own wish, when to ask again."""

    def __init__(self, reason: str, retry_after_s: float = 0.0):
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class NotFoundError(Exception):
    """The server is well, and has no such file; the message is the reason, such as 404."""


class PermanentError(Exception):
    """The server will never answer this; the message is the reason and a remedy."""


class StorageBackend(Protocol):
    """A folder on a server, by one protocol. Names are relative to it. Safe to use from many threads.

    All of it raises `Again`, `Gone` or `Refused`, and nothing else, within `timeout_s`.
    """

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        """Bytes `start` to `end`; None: its first bytes, all of them if it is short or the server cannot do less."""
        ...

    def stat(self, name: str, timeout_s: float) -> FileStat: ...

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        """What lies in a folder; and of its files, by name in there, what the listing tells."""
        ...


def retry_delay_s(attempt: int, jitter: float, retry_after_s: float = 0.0) -> float:
    """How long to wait after the n-th request (1, 2, ...) failed: doubling, `luck` in 0..1 making it half to whole.

    What the server wishes, `after_s`, is waited for, and a little more by luck: not all come back at once.
    """
    longest = min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 60), MAX_DELAY_S)
    return retry_after_s + longest * (1 + jitter) / 2


def retry(request: Callable[[float], T], location: str, options: RemoteOptions) -> T:
    """What `request(timeout_s)` returns, asked again until `reach.patience_s` have passed; `at` is its address.

    Raises `DecodeError` for what is gone, `Unusable` for what is refused, and `Failed` where patience ends.
    """
    end, gone = time.monotonic() + options.retry_for_s, False
    for asked in count(1):
        left_s = end - time.monotonic()
        wish_s = 0.0
        try:
            return request(min(options.timeout_s, max(left_s, MIN_TIMEOUT_S)))
        except PermanentError as error:
            raise UsageError(redact(f"data: {location}: {error}")) from None
        except NotFoundError as error:
            if gone:
                raise DecodeError(f"gone ({error})") from None
            gone = True
        except RetryableError as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise RunError(redact(_unreachable_message(location, str(error), asked, options.retry_for_s))) from None
            wish_s = error.retry_after_s
        time.sleep(min(retry_delay_s(asked, random.random(), wish_s), max(left_s, 0.0)))
    raise AssertionError


def _unreachable_message(location: str, last_error: str, attempts: int, retry_for_s: float) -> str:
    return f"data: {location} is out of reach: {last_error} (asked {attempts:,} times within {retry_for_s:g} s)"
