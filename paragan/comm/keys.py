"""A few words that ranks leave for each other: a key-value store that a thread serves on a socket.

For worlds whose ranks come and go, where a server may freeze while others ask it: here every question has a timeout,
which torch's TCPStore does not promise. Words are short; the ones who ask are few.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import dataclass

from .world import Lost, Store

Address = tuple[str, int]


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

    def pop(self, key: str) -> str | None:
        return self._words.pop(key, None)

    def close(self) -> None:
        """Take no more calls."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes who waits for one
        self._door.close()

    def _welcome(self) -> None:
        while True:
            try:
                guest, _ = self._door.accept()
            except OSError:
                if self._door.fileno() < 0:
                    return  # closed
                continue
            threading.Thread(target=self._serve, args=(guest,), daemon=True, name="board").start()

    def _serve(self, guest: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), guest, guest.makefile("rw", encoding="utf-8") as lines:
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for line in lines:
                key, value = json.loads(line)
                if value is not None:
                    self._words[key] = value
                lines.write(json.dumps(self._words.get(key)) + "\n")
                lines.flush()


class Remote:
    """Another rank's board. Lost where it does not answer in time."""

    def __init__(self, address: Address, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self._lock = threading.Lock()
        try:
            self._link = socket.create_connection(address, timeout=timeout_s)
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines = self._link.makefile("rw", encoding="utf-8")
        except OSError as error:
            raise Lost(f"{address[0]}:{address[1]} does not answer: {error}") from error

    def set(self, key: str, value: str, /) -> None:
        self._ask(key, value)

    def get(self, key: str, /) -> bytes:
        value = self._ask(key, None)
        if value is None:
            raise Lost(f"{key} is not there")
        return value.encode()

    def check(self, keys: list[str], /) -> bool:
        return all(self._ask(key, None) is not None for key in keys)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._lines.close()
        self._link.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, key: str, value: str | None) -> str | None:
        with self._lock:
            try:
                self._lines.write(json.dumps([key, value]) + "\n")
                self._lines.flush()
                answer = self._lines.readline()
                if not answer.endswith("\n"):
                    raise OSError("it hung up")
                return json.loads(answer)
            except (OSError, ValueError) as error:
                self.close()  # an answer that comes late would be taken for the next one's
                raise Lost(f"{self.address[0]}:{self.address[1]} does not answer: {error}") from error


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
