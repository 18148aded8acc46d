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

from paragan.comm.process_group import POLL_S, Lost, Store
from paragan.comm.sockets import Address


class Board:
    """The words left at one rank, and the port where others read and write them."""

    def __init__(self, host: str):
        self._words: dict[str, str] = {}
        self._door = socket.create_server((host, 0), backlog=128)
        self.address: Address = (host, self._door.getsockname()[1])
        threading.Thread(target=self._welcome, daemon=True, name="board").start()

    def set(self, key: str, value: str, /) -> None:
        self._words[key] = value

    def get(self, key: str, /) -> bytes:
        return self._words[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._words for key in keys)

    def read(self, key: str) -> str | None:
        return self._words.get(key)

    def close(self) -> None:
        """Take no more calls."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes who waits for one
        self._door.close()

    def _welcome(self) -> None:
        while True:
            try:
                guest, _ = self._door.accept()
                threading.Thread(target=self._serve, args=(guest,), daemon=True, name="board").start()
            except (OSError, RuntimeError):  # out of descriptors, or of threads: perhaps not for long
                if self._door.fileno() < 0:
                    return  # closed
                time.sleep(POLL_S)

    def _serve(self, guest: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), guest, guest.makefile("rw", encoding="utf-8") as lines:
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for line in lines:
                key, value = json.loads(line)
                if value is not None:
                    self._words[key] = value
                lines.write(json.dumps(self._words.get(key)) + "\n")
                lines.flush()


class Remote:
    """Another rank's board. Lost where it does not answer in time; the next question is asked on a new link."""

    def __init__(self, address: Address, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        with self._lock, self._answering():
            self._open()

    def set(self, key: str, value: str, /) -> None:
        self._ask(key, value)

    def get(self, key: str, /) -> bytes:
        value = self._ask(key, None)
        if value is None:
            raise Lost(f"{key} is not there")
        return value.encode()

    def check(self, keys: list[str], /) -> bool:
        return all(self._ask(key, None) is not None for key in keys)

    def read(self, key: str) -> str | None:
        return self._ask(key, None)

    def close(self) -> None:
        if self._link:
            self._link.close()
        self._link = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> socket.socket:
        if not self._link:
            self._link = socket.create_connection(self.address, timeout=self.timeout_s)
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._link

    @contextlib.contextmanager
    def _answering(self) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()  # an answer that comes late would be taken for the next one's
            raise Lost(f"{self.address[0]}:{self.address[1]} does not answer: {error}") from error

    def _ask(self, key: str, value: str | None) -> str | None:
        with self._lock, self._answering():
            link = self._open()
            link.sendall((json.dumps([key, value]) + "\n").encode())
            answer = b""
            while not answer.endswith(b"\n"):
                more = link.recv(65536)
                if not more:
                    raise OSError("it hung up")
                answer += more
            return json.loads(answer)


@dataclass(frozen=True)
class Named:
    """The words on a board, or in another store, under one name."""

    board: Store
    name: str

    def set(self, key: str, value: str, /) -> None:
        self.board.set(f"{self.name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        return self.board.get(f"{self.name}/{key}")

    def check(self, keys: list[str], /) -> bool:
        return self.board.check([f"{self.name}/{key}" for key in keys])


@dataclass
class Leavable:
    """Words that whoever waits for them can be told to wait for no more: `over`."""

    store: Store
    over: bool = False

    def set(self, key: str, value: str, /) -> None:
        self.store.set(key, value)

    def get(self, key: str, /) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str], /) -> bool:
        if self.over:
            raise Lost("nobody waits for this any more")
        return self.store.check(keys)
