"""The web application of `paragan watch`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from werkzeug.exceptions import SecurityError
from werkzeug.wrappers import Request, Response

from paragan.watch.pages import READ_ERRORS, LivePages

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def create_watch_app(pages: LivePages, allowed_hosts: Sequence[str] | None = None) -> WSGIApplication:
    """Return the WSGI application that answers with pages.

    allowed_hosts: the only host names that requests may use (None: any).
    """

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = Request(environ)
        request.trusted_hosts = list(allowed_hosts) if allowed_hosts is not None else None
        return _answer(request, pages)(environ, start_response)

    return app


def _answer(request: Request, pages: LivePages) -> Any:
    try:
        _ = request.host  # raises SecurityError unless it is trusted
    except SecurityError:
        return Response("this name is not the server's\n", 400)
    if request.method not in ("GET", "HEAD"):
        return Response("only GET\n", 405, {"Allow": "GET, HEAD"})
    if request.path == "/" and pages.start != "/":
        return Response("", 302, {"Location": pages.start})
    if request.path.startswith("/runs/") and not request.path.endswith("/"):
        return Response("", 302, {"Location": f"{quote(os.fsencode(request.path))}/"})  # for links relative to it
    try:
        page = pages.get(request.path)
    except READ_ERRORS as error:
        return Response(f"{error}\n".encode(errors="replace"), 503)
    if page is None:
        return Response(f"there is no page {request.path}; the runs are at /\n", 404)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    response = Response(page.html, 200, headers, mimetype="text/html")
    response.set_etag(page.tag)
    return response.make_conditional(request)
