"""A few words that ranks leave for each other: a key-value store that a thread serves on a socket.

For worlds whose ranks come and go, where a server may freeze while others ask it: here every question has a timeout,
which torch's TCPStore does not promise. Words are short; the ones who ask are few.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

from paragan.comm.process_group import POLL_S, CommunicationError, Store
from paragan.comm.sockets import Address


class KVServer:
    """The words left at one rank, and the port where others read and write them."""

    def __init__(self, host: str):
        self._values: dict[str, str] = {}
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: Address = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept_loop, daemon=True, name="board").start()

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value

    def get(self, key: str, /) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def get_or_none(self, key: str) -> str | None:
        return self._values.get(key)

    def close(self) -> None:
        """Take no more calls."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for one
        self._listener.close()

    def _accept_loop(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(guest,), daemon=True, name="board").start()
            except (OSError, RuntimeError):  # out of descriptors, or of threads: perhaps not for long
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(POLL_S)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rw", encoding="utf-8") as lines:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for line in lines:
                key, value = json.loads(line)
                if value is not None:
                    self._values[key] = value
                lines.write(json.dumps(self._values.get(key)) + "\n")
                lines.flush()


class KVClient:
    """Another rank's board. Lost where it does not answer in time; the next question is asked on a new link."""

    def __init__(self, address: Address, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        with self._lock, self._connection_errors():
            self._connect()

    def set(self, key: str, value: str, /) -> None:
        self._request(key, value)

    def get(self, key: str, /) -> bytes:
        value = self._request(key, None)
        if value is None:
            raise CommunicationError(f"{key} is not there")
        return value.encode()

    def check(self, keys: list[str], /) -> bool:
        return all(self._request(key, None) is not None for key in keys)

    def get_or_none(self, key: str) -> str | None:
        return self._request(key, None)

    def close(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket = None

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        if not self._socket:
            self._socket = socket.create_connection(self.address, timeout=self.timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    @contextlib.contextmanager
    def _connection_errors(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()  # an answer that comes late would be taken for the next one's
            raise CommunicationError(f"{self.address[0]}:{self.address[1]} does not answer: {error}") from error

    def _request(self, key: str, value: str | None) -> str | None:
        with self._lock, self._connection_errors():
            link = self._connect()
            link.sendall((json.dumps([key, value]) + "\n").encode())
            answer = b""
            while not answer.endswith(b"\n"):
                more = link.recv(65536)
                if not more:
                    raise OSError("it hung up")
                answer += more
            return json.loads(answer)


@dataclass(frozen=True)
class PrefixStore:
    """The words on a board, or in another store, under one name."""

    store: Store
    prefix: str

    def set(self, key: str, value: str, /) -> None:
        self.store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self.store.get(f"{self.prefix}/{key}")

    def check(self, keys: list[str], /) -> bool:
        return self.store.check([f"{self.prefix}/{key}" for key in keys])


@dataclass
class CancellableStore:
    """Words that whoever waits for them can be told to wait for no more: `over`."""

    store: Store
    cancelled: bool = False

    def set(self, key: str, value: str, /) -> None:
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        if self.cancelled:
            raise CommunicationError("nobody waits for this any more")
        return self.store.check(keys)
