"""Asking a server, and asking again for as long as it may still answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from paragan.core.errors import Failed, Unusable
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Entries, Reach, masked

FIRST_S, LONGEST_S = 0.1, 10.0  # pauses: the first, and what they grow to
LAST_S = 1.0  # even the last request before patience ends has this long

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What a server tells about a file. `size` None: it does not; `version`: changes when the file does, or ""."""

    size: int | None
    version: str = ""


@dataclass(frozen=True)
class Answer:
    """Bytes of a file, fewer than asked for only where it ends there, and what was told about it besides."""

    data: bytes
    facts: Facts


class Again(Exception):
    """No answer this time. `after_s`: the server's own wish, when to ask again."""

    def __init__(self, reason: str, after_s: float = 0.0):
        super().__init__(reason)
        self.after_s = after_s


class Gone(Exception):
    """The server is well, and has no such file; the message is the reason, such as 404."""


class Refused(Exception):
    """The server will never answer this; the message is the reason and a remedy."""


class Server(Protocol):
    """A folder on a server, by one protocol. Names are relative to it. Safe to use from many threads.

    All of it raises `Again`, `Gone` or `Refused`, and nothing else, within `timeout_s`.
    """

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Answer:
        """Bytes `start` to `end`; None: its first bytes, all of them if it is short or the server cannot do less."""
        ...

    def look(self, name: str, timeout_s: float) -> Facts: ...

    def list(self, folder: str, timeout_s: float) -> tuple[Entries, dict[str, Facts]]:
        """What lies in a folder; and of its files, by name in there, what the listing tells."""
        ...


def pause_s(asked: int, luck: float, after_s: float = 0.0) -> float:
    """How long to wait after the n-th request (1, 2, ...) failed: doubling, `luck` in 0..1 making it half to whole.

    What the server wishes, `after_s`, is waited for, and a little more by luck: not all come back at once.
    """
    longest = min(FIRST_S * 2.0 ** min(asked - 1, 60), LONGEST_S)
    return after_s + longest * (1 + luck) / 2


def ask(request: Callable[[float], T], at: str, reach: Reach) -> T:
    """What `request(timeout_s)` returns, asked again until `reach.patience_s` have passed; `at` is its address.

    Raises `DecodeError` for what is gone, `Unusable` for what is refused, and `Failed` where patience ends.
    """
    end, gone = time.monotonic() + reach.patience_s, False
    for asked in count(1):
        left_s = end - time.monotonic()
        wish_s = 0.0
        try:
            return request(min(reach.timeout_s, max(left_s, LAST_S)))
        except Refused as error:
            raise Unusable(masked(f"data: {at}: {error}")) from None
        except Gone as error:
            if gone:
                raise DecodeError(f"gone ({error})") from None
            gone = True
        except Again as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise Failed(masked(_out_of_reach(at, str(error), asked, reach.patience_s))) from None
            wish_s = error.after_s
        time.sleep(min(pause_s(asked, random.random(), wish_s), max(left_s, 0.0)))
    raise AssertionError


def _out_of_reach(at: str, last: str, asked: int, patience_s: float) -> str:
    return f"data: {at} is out of reach: {last} (asked {asked:,} times within {patience_s:g} s)"
