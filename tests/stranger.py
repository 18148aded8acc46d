"""A process that knows nothing about a run, and speaks to every port that the run opens.

`python tests/stranger.py PID` speaks to the ports of PID and of its descendants, again and again, until it is killed.
It prints a JSON line for each conversation: port, words, and the error that ended it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SILENT_CONNECTIONS = 200  # more than a server of members lets in
LONG_BYTES = 100 << 20
TIMEOUT_S = 2.0
STORE_MAGIC = 0x3C85F7CE  # with which a connection to torch's key-value store begins
LARGE_VALUES = 5
LARGE_VALUE_BYTES = 4 << 20
STORE_VALUES = {  # which ranks read
    "job": "another",
    "world_size": "77",
    "paragan/0/gather/1/1": "nonsense",
    "paragan/0/stop/reason": "asked SIGTERM 1",
    "paragan/0/bye/0": "",
}

Address = tuple[str, int]


def process_tree(root: int) -> list[int]:
    """Return the process and its descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def listening_addresses(pids: list[int]) -> set[Address]:
    """Return the addresses at which these processes accept connections."""
    inodes = set[str]()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(str(entry.readlink()))
    found = set[Address]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                packed = bytes.fromhex(host)[::-1]
                is_any = not any(packed)
                address = "127.0.0.1" if is_any or name == "tcp6" else socket.inet_ntop(socket.AF_INET, packed)
                found.add((address, int(port, 16)))
    return found


def send(address: Address, words: bytes | Iterator[bytes], listen: bool = True) -> None:
    """Connect, and send the words as far as they are taken."""
    with socket.create_connection(address, TIMEOUT_S) as connection, contextlib.suppress(OSError):
        for part in [words] if isinstance(words, bytes) else words:
            connection.sendall(part)
        if listen:
            connection.recv(1 << 16)


def say_nothing(address: Address) -> None:
    """Hold many connections without a word."""
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT_CONNECTIONS):
            stack.enter_context(socket.create_connection(address, TIMEOUT_S))
        time.sleep(TIMEOUT_S)


def send_random_bytes(address: Address) -> None:
    send(address, os.urandom(1 << 20))


def send_long_line(address: Address) -> None:
    send(address, (b"x" * (1 << 20) for _ in range(LONG_BYTES >> 20)))


def send_half_a_message(address: Address) -> None:
    """Begin to write a value of a terabyte in the words of torch's store, and a request of HTTP."""
    begin = struct.pack("<BI", 0, STORE_MAGIC)
    send(address, begin + struct.pack("<BQ", 1, 3) + b"job" + struct.pack("<Q", 1 << 40) + b"x" * 1000)
    send(address, begin + struct.pack("<BQ", 1, 1 << 20))
    send(address, b"POST / HTTP/1.1\r\nContent-Length: 1000000000000\r\n")


def send_numbers(address: Address) -> None:
    """Send what a rank says to gloo: the number of a connection, which counts from 0."""
    for number in range(64):
        send(address, struct.pack("<Q", number), listen=False)


def send_requests(address: Address) -> None:
    """Ask in whole requests, with a secret that is wrong."""
    send(address, b"0" * 32 + b'\n["members", "1"]\n')
    send(address, b"GET / HTTP/1.1\r\n\r\n")


def write_store(address: Address) -> None:
    """Write keys that ranks read, and large ones, through a client of torch's store."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(address[0], address[1], None, False, timeout, wait_for_workers=False)
    for key, value in STORE_VALUES.items():
        store.set(key, value)
    for number in range(LARGE_VALUES):
        store.set(f"{time.monotonic()}/{number}", "x" * LARGE_VALUE_BYTES)


CONVERSATIONS: list[Callable[[Address], None]] = [
    send_requests,
    send_half_a_message,
    send_random_bytes,
    send_numbers,
    say_nothing,
    send_long_line,
    write_store,
]


def converse(address: Address, speak: Callable[[Address], None]) -> None:
    error = ""
    try:
        speak(address)
    except (OSError, RuntimeError) as failure:
        error = type(failure).__name__
    sys.stdout.write(json.dumps({"port": address[1], "words": speak.__name__, "error": error}) + "\n")
    sys.stdout.flush()


def repeat(address: Address, speak: Callable[[Address], None]) -> None:
    while True:
        converse(address, speak)
        time.sleep(0.2)


def main() -> None:
    root, names = int(sys.argv[1]), sys.argv[2:]
    spoken_to = set[Address]()
    while True:
        addresses = listening_addresses(process_tree(root))
        for address in addresses - spoken_to:
            for speak in CONVERSATIONS:
                if not names or speak.__name__ in names:
                    threading.Thread(target=repeat, args=(address, speak), daemon=True).start()
        spoken_to |= addresses
        time.sleep(0.02)


if __name__ == "__main__":
    main()
