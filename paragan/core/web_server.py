"""Serve a web application until interrupted: of `paragan serve` and `paragan watch`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import TYPE_CHECKING, Any, TextIO

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

CONNECTION_TIMEOUT_S = 30.0  # an idle connection is closed after this
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
MAX_PORT = 65535


def trusted_hosts(host: str) -> list[str] | None:
    """Return the host names that requests to a server on `host` may use; None: any.

    On a loopback address only loopback names are allowed. Otherwise any page in the user's browser could reach the
    server under a name of its own (DNS rebinding).
    """
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None  # `open_listener` refuses it
    is_loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    return [*LOOPBACK_HOSTS, host] if is_loopback else None


def check_port(port: int) -> None:
    """Raise UsageError if --port is no port."""
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"--port {port}: out of range. Use 0 to {MAX_PORT} (0: any free port)")


def serve_until_interrupted(app: WSGIApplication, host: str, port: int, what: str, out: TextIO) -> None:
    """Serve a web application, each request in a thread of its own, until SIGINT.

    Args:
        host, port: of the listener; port 0 is any free one.
        what: it does, for the line that is written to `out` when it listens: "serves runs/a".

    Raises:
        UsageError: the port is taken, or the host is no address of this machine.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class TimeoutRequestHandler(WSGIRequestHandler):
        timeout = CONNECTION_TIMEOUT_S  # browsers open connections before they need them

        def log_request(self, *_: Any) -> None:
            """Write no line for each request."""

    with open_listener(host, port) as listener:
        options: dict[str, Any] = {"threaded": True, "request_handler": TimeoutRequestHandler}
        with make_server(host, port, app, fd=listener.fileno(), **options) as server:
            name = f"[{host}]" if ":" in host else host
            out.write(f"http://{name}:{listener.getsockname()[1]} {what}; Ctrl-C stops it\n")
            out.flush()
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raises UsageError if it cannot."""
    if not host:
        raise UsageError("--host: is empty. Use 127.0.0.1, or 0.0.0.0 for all")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise UsageError(f"--port {port}: not available on {host} ({reason}). Use 0 for a free port") from error
        raise UsageError(
            f"--host {host}: is no address of this machine ({reason}). Use 127.0.0.1, or 0.0.0.0 for all"
        ) from error
