"""Files of an HTTP server: byte ranges, and the folder pages that nginx, Apache and the like make."""

from __future__ import annotations

import email.utils
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

from paragan.data.storage.filesystem import Entries
from paragan.data.storage.retry import Again, Answer, Facts, Gone, Refused
from paragan.data.storage.timeouts import on_loop

PART = 2 * 2**20  # bytes of a file whose length is not known, to begin with
LARGEST = 2**28  # bytes that are accepted in one answer where its length was not ours to choose

_SAFE = "/!$&'()*+,;=:@~"  # stand in the path of an address as they are
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_SIGN_IN = (
    "check the user and password in the address, or make the files public "
    "(a server that lists no folders: name shard-{000000..000012}.tar)"
)
_NO_RANGES = "it ignores byte ranges and sends whole files: serve them by nginx or the like, or copy them here first"

T = TypeVar("T")


class Http:
    """A folder below http:// or https://. Connections are kept and shared by all threads.

    base  : its address, as it was given, without a trailing /
    query : what stands behind every address, such as a signature; "" for nothing
    """

    def __init__(self, base: str, query: str = ""):
        self.query = f"?{query}" if query else ""
        try:
            url = URL(base)
            self.base, host = str(url).rstrip("/"), url.host or ""
        except ValueError as error:
            raise Refused(f"no address ({error}): check it") from None
        if not host:
            raise Refused("the address has no host: check it")
        proxy = None if proxy_bypass(host) else getproxies().get(url.scheme)
        settings = {"proxy": proxy, "headers": {"Accept-Encoding": "identity", "User-Agent": "paragan"}}
        self.files = fsspec.filesystem(  # which closes the session in the end
            "http", get_client=_session, client_kwargs=settings, skip_instance_cache=True
        )

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Answer:
        async def take(answer: aiohttp.ClientResponse) -> Answer:
            if answer.status == 416:
                total = _extent(answer)[2]
                return Answer(b"", Facts(total, _version(answer)))
            if answer.status == 206:
                return await _part(answer, start, start + PART if end is None else end)
            if start or (end is not None and (answer.content_length is None or answer.content_length > end)):
                raise Refused(_NO_RANGES)
            data = await _body(answer, LARGEST if end is None else end)
            return Answer(data, Facts(len(data), _version(answer)))

        last = (start + PART if end is None else end) - 1
        return self._ask(self._address(name), take, timeout_s, Range=f"bytes={start}-{last}")

    def look(self, name: str, timeout_s: float) -> Facts:
        """By its first byte, and not by HEAD: signed addresses allow but one method."""

        async def take(answer: aiohttp.ClientResponse) -> Facts:
            size = answer.content_length if answer.status == 200 else _extent(answer)[2]
            if answer.status == 206:
                await _body(answer, 1)  # then the connection can be used again
            return Facts(size, _version(answer))

        return self._ask(self._address(name), take, timeout_s, Range="bytes=0-0")

    def list(self, folder: str, timeout_s: float) -> tuple[Entries, dict[str, Facts]]:
        async def take(answer: aiohttp.ClientResponse) -> tuple[str, str]:
            if answer.content_type != "text/html":
                raise Refused(f"no page that lists a folder, but {answer.content_type}: turn the server's listing on")
            return str(answer.url), (await _body(answer, LARGEST)).decode(errors="surrogateescape")

        address = self._address(f"{folder}/" if folder else "")
        return listed(*self._ask(address, take, timeout_s)), {}

    def _address(self, name: str) -> str:
        return f"{self.base}/{quote(name, safe=_SAFE, errors='surrogateescape')}{self.query}"

    def _ask(
        self, address: str, take: Callable[[aiohttp.ClientResponse], Awaitable[T]], timeout_s: float, **headers: str
    ) -> T:
        async def request() -> T:
            session: Any = await self.files.set_session()
            async with session.get(URL(address, encoded=True), headers=headers) as answer:
                _check(answer)
                return await take(answer)

        try:
            return on_loop(request(), timeout_s)
        except (Again, Gone, Refused):
            raise
        except aiohttp.TooManyRedirects:
            raise Refused("it is redirected in circles: check the address") from None
        except (aiohttp.InvalidURL, aiohttp.RedirectClientError):
            raise Refused("no address, or redirected to none: check it") from None
        except aiohttp.ClientResponseError:
            raise Again("its answer is no HTTP") from None
        except aiohttp.ClientConnectorCertificateError:
            raise Refused("its certificate is not trusted: check the address, or set SSL_CERT_FILE") from None
        except aiohttp.ClientConnectorDNSError:
            raise Again("its host is not found") from None
        except aiohttp.ServerDisconnectedError:
            raise Again("the connection was closed") from None
        except aiohttp.ClientPayloadError:
            raise Again("the answer broke off") from None
        except OSError as error:
            raise Again(f"{error.strerror or type(error).__name__}") from None
        except Exception as error:  # whatever a broken server makes of aiohttp
            raise Again(" ".join(f"{type(error).__name__} {error}".split())) from None


async def _session(**settings: Any) -> aiohttp.ClientSession:
    """Without timeouts: whoever waits for an answer gives up in time."""
    never = aiohttp.ClientTimeout(total=None, sock_connect=None)
    settings = {key: value for key, value in settings.items() if key != "loop"}
    return aiohttp.ClientSession(timeout=never, cookie_jar=aiohttp.DummyCookieJar(), **settings)


def listed(address: str, page: str) -> Entries:
    """The links of a folder's page that lead directly into it: no parents, no queries, no hidden ones."""
    links = _Links()
    links.feed(page)
    base, files, folders = URL(address).with_query(None).with_fragment(None), set[str](), set[str]()
    for link in links.found:
        try:
            url = base.join(URL(link))
            elsewhere = url.origin() != base.origin()
        except ValueError:  # no address, or one without a host
            continue
        inside = url.raw_path.removeprefix(base.raw_path)
        if elsewhere or inside == url.raw_path or url.raw_query_string or not inside:
            continue
        name = unquote(inside.rstrip("/"), errors="surrogateescape")
        if name and "/" not in name and not name.startswith("."):
            (folders if inside.endswith("/") else files).add(name)
    return Entries(dict.fromkeys(sorted(files)), sorted(folders))


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise for every status that does not bring bytes."""
    status = answer.status
    if status in (200, 206, 416):
        return
    if status in (404, 410):
        raise Gone(str(status))
    told = f"it answers {status} {answer.reason or ''}".rstrip()
    if status in (408, 425, 429) or status >= 500:
        raise Again(told, _after_s(answer.headers.get("Retry-After", "")))
    raise Refused(f"{told}: {_SIGN_IN if status in (401, 403, 407) else 'check the address'}")


def _after_s(wish: str) -> float:
    """Retry-After: seconds, or a date."""
    if wish.isdigit():
        return float(wish[:9])
    try:
        return max(email.utils.parsedate_to_datetime(wish).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


def _version(answer: aiohttp.ClientResponse) -> str:
    return answer.headers.get("ETag", "").removeprefix("W/") or answer.headers.get("Last-Modified") or ""


def _extent(answer: aiohttp.ClientResponse) -> tuple[int | None, int | None, int | None]:
    """First byte, end, and the whole file's size, as Content-Range tells them."""
    told = _RANGE.match(answer.headers.get("Content-Range", ""))
    first, last, total = told.groups() if told else (None, None, None)
    end = None if last is None else int(last) + 1
    return None if first is None else int(first), end, int(total) if total and total != "*" else None


async def _part(answer: aiohttp.ClientResponse, start: int, end: int) -> Answer:
    """Bytes `start` to `end` of an answer that says it has them, all there are of these."""
    first, stop, total = _extent(answer)
    data = await _body(answer, end - start)
    if first not in (None, start) or (stop is not None and stop - start != len(data)):
        raise Again(f"another range came than bytes {start:,} to {end:,}")
    if len(data) < (end if total is None else min(end, total)) - start:
        raise Again(f"{len(data):,} bytes came of the {end - start:,} that were asked for")
    return Answer(data, Facts(total, _version(answer)))


async def _body(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """All of an answer, of at most so many bytes. An answer that has more is not read to its end."""
    length = answer.content_length
    if length is not None and length <= most:
        return await answer.read()
    came = bytearray()
    while len(came) <= most and (length is None or length <= most):
        chunk = await answer.content.read(2**16)
        if not chunk:
            return bytes(came)
        came += chunk
    raise Again(f"more came than the {most:,} bytes that were asked for")
