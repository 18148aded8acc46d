"""Files of an HTTP server: byte ranges, and the folder listings that nginx, Apache and similar servers make."""

from __future__ import annotations

import email.utils
import os
import re
import time
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from typing import Any, TypeVar
from urllib.parse import quote, unquote
from urllib.request import getproxies, proxy_bypass

import aiohttp
import fsspec
from yarl import URL

from paragan.data.storage.filesystem import DirListing, is_litter
from paragan.data.storage.http_ranges import HttpRangeReader
from paragan.data.storage.retry import (
    PART_BYTES,
    FileStat,
    NotFoundError,
    PermanentError,
    Response,
    RetryableError,
    short_response_error,
)
from paragan.data.storage.timeouts import run_on_loop, timeout_error

MAX_RESPONSE_BYTES = 2**28  # limit of a response whose length the server chose

_URL_SAFE = "/!$&'()*+,;=:@~"  # not escaped in the path of an address
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_AUTH_HINT = (
    "check the user and password in the address, or make the files public "
    "(a server that lists no folders: name shard-{000000..000012}.tar)"
)
_NO_RANGES_HINT = (
    "it ignores byte ranges and sends whole files: serve them by nginx or similar, or copy them to this machine first"
)

T = TypeVar("T")


class HttpBackend:
    """A `StorageBackend` for http:// and https://. Connections stay open and are shared by all threads.

    Ranges come from obstore where that can read them (http_ranges.py); everything else from aiohttp, which tells why
    there was no answer, and how long to wait.

    Args:
        base_url: address of the folder, without a trailing /.
        query: is appended to every address, such as a signature.
        timeout_s: of most requests.
    """

    def __init__(self, base_url: str, query: str = "", timeout_s: float = 10.0):
        self.query = f"?{query}" if query else ""
        try:
            url = URL(base_url)
            self.base_url = str(url).rstrip("/")
            host = url.host or ""
        except ValueError as error:
            raise PermanentError(f"not an address ({error}): check it") from None
        if not host:
            raise PermanentError("the address has no host: check it")
        proxy = None if proxy_bypass(host) else getproxies().get(url.scheme)
        self._settings = {"proxy": proxy, "headers": {"Accept-Encoding": "identity", "User-Agent": "paragan"}}
        self._connect()
        self._range_reader = HttpRangeReader.make(self.base_url, self.query, timeout_s)

    def _connect(self) -> None:
        self._pid = os.getpid()
        self.fsspec_fs = fsspec.filesystem(  # closes the session at exit
            "http", get_client=_make_session, client_kwargs=self._settings, skip_instance_cache=True
        )

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        """Read bytes `start` to `end`; None: the first PART_BYTES, or all if the server ignores ranges."""
        reader = self._range_reader
        if reader and end is not None and timeout_s >= reader.timeout_s:
            begin = time.monotonic()
            if response := reader.fetch(name, start, end):
                return response
            timeout_s -= time.monotonic() - begin
            if timeout_s <= 0:
                raise timeout_error(reader.timeout_s)

        async def handle_response(response: aiohttp.ClientResponse) -> Response:
            if response.status == 416:
                total = _parse_content_range(response)[2]
                return Response(b"", FileStat(total, _file_version(response)))
            if response.status == 206:
                return await _read_range(response, start, start + PART_BYTES if end is None else end)
            if start or (end is not None and (response.content_length is None or response.content_length > end)):
                raise PermanentError(_NO_RANGES_HINT)
            data = await _read_body(response, MAX_RESPONSE_BYTES if end is None else end)
            return Response(data, FileStat(len(data), _file_version(response)))

        last = (start + PART_BYTES if end is None else end) - 1
        return self._request(self._url(name), handle_response, timeout_s, Range=f"bytes={start}-{last}")

    def stat(self, name: str, timeout_s: float) -> FileStat:
        """Return size and version from a request of the first byte. Signed addresses do not allow HEAD as well."""

        async def handle_response(response: aiohttp.ClientResponse) -> FileStat:
            size = response.content_length if response.status == 200 else _parse_content_range(response)[2]
            if response.status == 206:
                await _read_body(response, 1)  # so that the connection can be used again
            return FileStat(size, _file_version(response))

        return self._request(self._url(name), handle_response, timeout_s, Range="bytes=0-0")

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        """List a folder from the links of its page, which tells nothing about the files."""

        async def handle_response(response: aiohttp.ClientResponse) -> tuple[str, str]:
            if response.content_type != "text/html":
                raise PermanentError(
                    f"the server sent {response.content_type}, not a page that lists the folder: turn its listing on"
                )
            return str(response.url), (await _read_body(response, MAX_RESPONSE_BYTES)).decode(errors="surrogateescape")

        address = self._url(f"{folder}/" if folder else "")
        return parse_listing(*self._request(address, handle_response, timeout_s)), {}

    def _url(self, name: str) -> str:
        return f"{self.base_url}/{quote(name, safe=_URL_SAFE, errors='surrogateescape')}{self.query}"

    def _request(
        self,
        url: str,
        handle_response: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        timeout_s: float,
        **headers: str,
    ) -> T:
        if self._pid != os.getpid():  # forked: the connections are those of the other process
            self._connect()

        async def send() -> T:
            session: Any = await self.fsspec_fs.set_session()
            async with session.get(URL(url, encoded=True), headers=headers) as response:
                _check_status(response)
                return await handle_response(response)

        try:
            return run_on_loop(send(), timeout_s)
        except (RetryableError, NotFoundError, PermanentError):
            raise
        except aiohttp.TooManyRedirects:
            raise PermanentError("it is redirected in circles: check the address") from None
        except (aiohttp.InvalidURL, aiohttp.RedirectClientError):
            raise PermanentError("not an address, or redirected to something that is not: check it") from None
        except aiohttp.ClientResponseError:
            raise RetryableError("its response is not HTTP") from None
        except aiohttp.ClientConnectorCertificateError:
            raise PermanentError("its certificate is not trusted: check the address, or set SSL_CERT_FILE") from None
        except aiohttp.ClientConnectorDNSError:
            raise RetryableError("its host was not found") from None
        except aiohttp.ServerDisconnectedError:
            raise RetryableError("the connection was closed") from None
        except aiohttp.ClientPayloadError:
            raise RetryableError("the response was cut off") from None
        except OSError as error:
            raise RetryableError(f"{error.strerror or type(error).__name__}") from None
        except Exception as error:  # aiohttp may raise anything on the data of a broken server
            raise RetryableError(" ".join(f"{type(error).__name__} {error}".split())) from None


async def _make_session(**settings: Any) -> aiohttp.ClientSession:
    """Make a session without timeouts: `run_on_loop` has one."""
    no_timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
    settings = {key: value for key, value in settings.items() if key != "loop"}
    return aiohttp.ClientSession(timeout=no_timeout, cookie_jar=aiohttp.DummyCookieJar(), **settings)


def parse_listing(base_url: str, page: str) -> DirListing:
    """Return the links of a folder's page that lead directly into it: no parents, no queries, no hidden names."""
    parser = _LinkParser()
    parser.feed(page)
    base = URL(base_url).with_query(None).with_fragment(None)
    files = set[str]()
    folders = set[str]()
    for link in parser.hrefs:
        try:
            url = base.join(URL(link))
            is_other_host = url.origin() != base.origin()
        except ValueError:  # not an address, or one without a host
            continue
        relative = url.raw_path.removeprefix(base.raw_path)
        if is_other_host or relative == url.raw_path or url.raw_query_string or not relative:
            continue
        name = unquote(relative.rstrip("/"), errors="surrogateescape")
        if name and "/" not in name and not is_litter(name):
            (folders if relative.endswith("/") else files).add(name)
    return DirListing(dict.fromkeys(sorted(files)), sorted(folders))


class _LinkParser(HTMLParser):
    """Collects the targets of the links of a page."""

    def __init__(self):
        super().__init__()
        self.hrefs = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for key, value in attrs if key == "href" and value]


def _check_status(response: aiohttp.ClientResponse) -> None:
    """Raise for every status but 200, 206 and 416."""
    status = response.status
    if status in (200, 206, 416):
        return
    if status in (404, 410):
        raise NotFoundError(str(status))
    message = f"it answers {status} {response.reason or ''}".rstrip()
    if status in (408, 425, 429) or status >= 500:
        raise RetryableError(message, _parse_retry_after_s(response.headers.get("Retry-After", "")))
    raise PermanentError(f"{message}: {_AUTH_HINT if status in (401, 403, 407) else 'check the address'}")


def _parse_retry_after_s(value: str) -> float:
    """Return the seconds of a Retry-After header, which has seconds or a date."""
    if value.isdigit():
        return float(value[:9])
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


def _file_version(response: aiohttp.ClientResponse) -> str:
    """Return the ETag, or the date in the form that obstore gives it: both ways have to agree on a version."""
    if etag := response.headers.get("ETag", "").removeprefix("W/"):
        return etag
    date = response.headers.get("Last-Modified", "")
    try:
        return email.utils.parsedate_to_datetime(date).isoformat()
    except ValueError:
        return date


def _parse_content_range(response: aiohttp.ClientResponse) -> tuple[int | None, int | None, int | None]:
    """Return the first byte, the end and the size of the whole file from Content-Range; None for what it lacks."""
    match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    first, last, total = match.groups() if match else (None, None, None)
    end = None if last is None else int(last) + 1
    return None if first is None else int(first), end, int(total) if total and total != "*" else None


async def _read_range(response: aiohttp.ClientResponse, start: int, end: int) -> Response:
    """Read bytes `start` to `end`, or to the end of the file, from a response with status 206."""
    first, stop, total = _parse_content_range(response)
    data = await _read_body(response, end - start)
    if first not in (None, start) or (stop is not None and stop - start != len(data)):
        raise RetryableError(f"it sent another range than bytes {start:,} to {end:,}")
    if len(data) < (end if total is None else min(end, total)) - start:
        raise short_response_error(len(data), end - start)
    return Response(data, FileStat(total, _file_version(response)))


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read a response of at most `max_bytes`. A longer one is not read to its end."""
    length = response.content_length
    if length is not None and length <= max_bytes:
        return await response.read()
    data = bytearray()
    while len(data) <= max_bytes and (length is None or length <= max_bytes):
        chunk = await response.content.read(2**16)
        if not chunk:
            return bytes(data)
        data += chunk
    raise RetryableError(f"it sent more than the requested {max_bytes:,} bytes")
