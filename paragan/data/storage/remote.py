"""Files behind an address: https://, s3://, whatever fsspec reaches."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO, TypeVar, cast
from urllib.parse import unquote

from fsspec.caching import BlockCache

from paragan.core.errors import Failed, Unusable
from paragan.data.source import FORMATS, DecodeError
from paragan.data.storage.disk_cache import Cache
from paragan.data.storage.filesystem import Entries, Place, Reach, masked, shown
from paragan.data.storage.fsspec_backend import Other
from paragan.data.storage.http import PART, Http
from paragan.data.storage.retry import Facts, Refused, Server, ask

UNKNOWN_S = 20.0  # patience with a server that never answered
BLOCK = 2**20  # bytes that an open file asks for at once
_FILES = (
    *(".npz", ".npy", ".zip", ".h5", ".hdf5", ".tar", ".gz", ".tgz", ".parquet", ".arrow"),
    *(".json", ".jsonl", ".csv", ".txt", ".idx", *FORMATS),
)
T = TypeVar("T")

_PATTERN = re.compile(r"\*|\{.*\}")


def far_place(where: str, reach: Reach) -> tuple[Place, str]:
    """The folder that an address names, or lies in, and the name of a file in it ("" for the folder itself).

    A name that ends as files of sets do (.tar, .npz, ...), or is a pattern (a*.tar, a{00..17}.tar), is a file.
    """
    http = where.lower().startswith(("http://", "https://"))
    address, _, query = where.partition("#")[0].partition("?") if http else (where, "", "")
    folder, _, last = address.rpartition("/")
    name = unquote(last, errors="surrogateescape") if http else last
    if not folder.endswith("/") and (_PATTERN.search(name) or posixpath.splitext(name)[1].lower() in _FILES):
        return Far(folder, reach, query), name
    return Far(address, reach, query), ""


class Far:
    """A folder of a server. What was read comes from `cache` afterwards, if there is one.

    A file stays what it was when it was first met: where an answer is of another version, `DecodeError` is raised if it
    is read whole, and `Failed` if ranges of it are, which would not fit together.

    base : its address;  query : what stands behind each address there, such as a signature
    """

    remote = True

    def __init__(self, base: str, reach: Reach, query: str = ""):
        self.base, self.reach = base.rstrip("/") if not base.endswith("://") else base, reach
        self.where = masked(shown(self.base))
        self.facts: dict[str, Facts] = {}  # by name, as far as asked
        self._first: dict[str, Facts] = {}  # by name, of what was fetched: when it was first met
        http = base.lower().startswith(("http://", "https://"))
        try:
            self.server: Server = Http(self.base, query) if http else Other(self.base, reach.timeout_s)
        except Refused as error:
            raise Unusable(masked(f"data: {self.where}: {error}")) from None
        self._met = False
        self.cache = Cache(reach.folder, self.where, reach.cache_gb) if reach.folder else None

    def at(self, name: str) -> str:
        return f"{self.where}/{shown(name)}"

    def entries(self, folder: str = "") -> Entries:
        at = self.at(folder) if folder else self.where
        try:
            entries, facts = self._ask(lambda s: self.server.list(folder, s), at)
        except DecodeError as error:
            raise Unusable(f"data: {at} is {error}: check the address") from None
        self.facts.update({f"{folder}/{name}" if folder else name: told for name, told in facts.items()})
        return entries

    def size(self, name: str) -> int:
        size = self._look(name).size
        if size is None:
            raise Unusable(f"data: {self.at(name)}: the server does not tell how long it is: copy it here first")
        return size

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        if size == 0:
            return b""
        told = Facts(None) if self.cache is None else self._look(name)
        if self.cache is None or told.size is None:
            return self._fetch(name, start, size)
        end = told.size if size is None else start + size
        if end > told.size:
            raise _short(told.size, end)
        key = self.cache.key(name, told.version, told.size, start, end)
        data = self.cache.get(key)
        if data is None:
            data = self._fetch(name, start, end - start, whole=size is None)
            self.cache.put(key, data)
        return data

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_File(self, name)))

    def _ask(self, request: Callable[[float], T], at: str) -> T:
        """Asked with patience once the server has answered at all: until then it may be a wrong address."""
        known = self.reach if self._met else replace(self.reach, patience_s=min(UNKNOWN_S, self.reach.patience_s))
        answer = ask(request, at, known)
        self._met = True
        return answer

    def _look(self, name: str) -> Facts:
        if name not in self.facts:
            self.facts[name] = self._ask(lambda s: self.server.look(name, s), self.at(name))
        return self.facts[name]

    def _fetch(self, name: str, start: int, size: int | None, whole: bool = False) -> bytes:
        """From the server, in parts that can come in time, all of the version that was first met."""
        parts, whole = list[bytes](), whole or size is None
        if size is None:
            if start:
                return self._fetch(name, start, self.size(name) - start, whole)
            first = self._ask(lambda s: self.server.fetch(name, 0, None, s), self.at(name))
            self._check(name, first.facts, whole)
            parts = [first.data]
            total = first.facts.size if first.facts.size is not None else len(first.data)
            if len(first.data) == PART and first.facts.size is None:
                total = self.size(name)
            start, size = len(first.data), total - len(first.data)
        for begin in range(start, start + size, PART):
            end = min(begin + PART, start + size)
            answer = self._ask(lambda s, b=begin, e=end: self.server.fetch(name, b, e, s), self.at(name))
            self._check(name, answer.facts, whole)
            if len(answer.data) != end - begin:
                raise _short(begin + len(answer.data) if answer.facts.size is None else answer.facts.size, start + size)
            parts.append(answer.data)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _check(self, name: str, now: Facts, whole: bool) -> None:
        """Raise where an answer is of another version of a file than the first."""
        first = self._first.setdefault(name, self.facts.get(name, now))
        for was, new in ((first.version or None, now.version or None), (first.size, now.size)):
            if None not in (was, new) and was != new:
                what = f"was replaced on its server while it was used (version or size was {was}, now {new})"
                raise DecodeError(what) if whole else Failed(masked(f"data: {self.at(name)} {what}"))
        if (not first.version and now.version) or (first.size is None and now.size is not None):
            self._first[name] = Facts(now.size if first.size is None else first.size, first.version or now.version)


def _short(there: int, wanted: int) -> DecodeError:
    return DecodeError(f"ends after {there:,} bytes, {wanted:,} were expected")


class _File(io.RawIOBase):
    """A file of a place, read in blocks, of which some are kept."""

    def __init__(self, far: Far, name: str):
        self._size, self._at = far.size(name), 0

        def fetch(start: int, end: int) -> bytes:
            return far.read(name, start, min(end, self._size) - start)

        self._blocks = BlockCache(BLOCK, fetch, self._size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._blocks._fetch(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
