"""A key-value store that a thread of each rank serves on a socket.

For worlds whose ranks come and go, where a server may freeze while others read from it: here every request has a
timeout, which torch's TCPStore does not promise. Values are short and clients are few.

A connection has to begin with the secret of the server, which is part of its address. Without it, the connection is
closed after at most MAX_SECRET_CHARS characters or SECRET_TIMEOUT_S seconds.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from paragan.comm.process_group import POLL_S, CommunicationError, Store

MAX_SECRET_CHARS = 64
SECRET_TIMEOUT_S = 10.0
MAX_UNAUTHENTICATED = 64  # connections that have not sent the secret yet; the oldest is closed for a further one
MAX_LINE_CHARS = 1 << 20  # of a request


class ServerAddress(NamedTuple):
    """Address of a `KVServer`, and the secret with which a connection to it has to begin."""

    host: str
    port: int
    secret: str


class KVServer:
    """The values of one rank, and the port where the others read and write them."""

    def __init__(self, host: str):
        self._values: dict[str, str] = {}
        self._listener = socket.create_server((host, 0), backlog=128)
        self._unauthenticated: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        self.address = ServerAddress(host, self._listener.getsockname()[1], secrets.token_hex(16))
        threading.Thread(target=self._accept_loop, daemon=True, name="kv-server").start()

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self._values[key] = value

    def get(self, key: str, /) -> bytes:
        """Read a value, which must exist."""
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        return all(key in self._values for key in keys)

    def get_or_none(self, key: str) -> str | None:
        """Read a value, if it exists."""
        return self._values.get(key)

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self._admit(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="kv-server").start()
            except (OSError, RuntimeError):  # out of descriptors or threads, perhaps only for a moment
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(POLL_S)

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection as one without the secret, and shut down the oldest of them if they are too many."""
        with self._lock:
            if len(self._unauthenticated) == MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._unauthenticated[connection] = None

    def _serve(self, connection: socket.socket) -> None:
        """Answer requests, one JSON line each: [key, value to write or null] -> the value."""
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rw", encoding="utf-8") as lines:
            try:
                if not self._authenticate(connection, lines):
                    return
            finally:
                with self._lock:
                    self._unauthenticated.pop(connection, None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while (line := lines.readline(MAX_LINE_CHARS)).endswith("\n"):
                key, value = json.loads(line)
                if value is not None:
                    self._values[key] = value
                lines.write(json.dumps(self._values.get(key)) + "\n")
                lines.flush()

    def _authenticate(self, connection: socket.socket, lines: TextIO) -> bool:
        """Return whether the first line of a connection is the secret."""
        connection.settimeout(SECRET_TIMEOUT_S)
        first_line = lines.readline(MAX_SECRET_CHARS).strip()
        connection.settimeout(None)
        return hmac.compare_digest(first_line.encode(), self.address.secret.encode())


class KVClient:
    """A connection to another rank's `KVServer`.

    Every method raises CommunicationError if there is no answer within `timeout_s`. The next request then opens a new
    connection.
    """

    def __init__(self, address: ServerAddress, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        with self._lock, self._connection_errors():
            self._connect()

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self._request(key, value)

    def get(self, key: str, /) -> bytes:
        """Read a value, which must exist."""
        value = self._request(key, None)
        if value is None:
            raise CommunicationError(f"{self.address[0]}:{self.address[1]} has no value for {key}")
        return value.encode()

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        return all(self._request(key, None) is not None for key in keys)

    def get_or_none(self, key: str) -> str | None:
        """Read a value, if it exists."""
        return self._request(key, None)

    def close(self) -> None:
        """Close the connection."""
        if self._socket:
            self._socket.close()
        self._socket = None

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        if not self._socket:
            self._socket = socket.create_connection(self.address[:2], timeout=self.timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(f"{self.address.secret}\n".encode())
        return self._socket

    @contextlib.contextmanager
    def _connection_errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()  # a late answer would be taken for that to the next request
            raise CommunicationError(f"{self.address[0]}:{self.address[1]} does not answer: {error}") from error

    def _request(self, key: str, value: str | None) -> str | None:
        with self._lock, self._connection_errors():
            connection = self._connect()
            connection.sendall((json.dumps([key, value]) + "\n").encode())
            answer = b""
            while not answer.endswith(b"\n"):
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError("the connection was closed")
                answer += data
            return json.loads(answer)


@dataclass(frozen=True)
class PrefixStore:
    """The keys of another store that start with a prefix."""

    store: Store
    prefix: str

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self.store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str, /) -> bytes:
        """Read a value, which must exist."""
        return self.store.get(f"{self.prefix}/{key}")

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        return self.store.check([f"{self.prefix}/{key}" for key in keys])


@dataclass
class CancellableStore:
    """Another store, until it is cancelled: then `check` fails, and with it a thread that polls."""

    store: Store
    cancelled: bool = False

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        """Read a value, which must exist."""
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist; raise CommunicationError if the store is cancelled."""
        if self.cancelled:
            raise CommunicationError("forming the process group was cancelled")
        return self.store.check(keys)
