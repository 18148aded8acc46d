"""TODO: docstring of paragan/comm/sockets.py"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from paragan.comm.process_group import Lost

Link = tuple[int, str]  # an open socket: its descriptor, and what tells it from others that get the number later


def open_sockets() -> set[Link]:
    """This process's open sockets (Linux; none where the system does not tell)."""
    found = set[Link]()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            what = str(entry.readlink())
            if what.startswith("socket:"):
                found.add((int(entry.name), what))
    return found


def still_open(link: Link) -> socket.socket | None:
    """A second handle on this socket, or nothing where it was closed."""
    with contextlib.suppress(OSError):
        copy = os.dup(link[0])
        if str(Path(f"/proc/self/fd/{copy}").readlink()) == link[1]:
            return socket.socket(fileno=copy)
        os.close(copy)
    return None


def connects(link: Link) -> bool:
    """Whether this socket is one end of a connection to somebody else."""
    if not (handle := still_open(link)):
        return False
    with handle, contextlib.suppress(OSError):
        return handle.family != socket.AF_UNIX and not listens(handle) and bool(handle.getpeername())
    return False


def listens(handle: socket.socket) -> bool:
    return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def hang_up(links: Iterable[Link]) -> None:
    """Shut these sockets down, so that whoever waits at either end is told; but not those that listen."""
    for handle in filter(None, map(still_open, links)):
        with contextlib.suppress(OSError), handle:
            if not listens(handle):  # gloo minds for its listener
                handle.shutdown(socket.SHUT_RDWR)


def answer_within(links: Iterable[Link], seconds: float) -> None:
    """Who waits for an answer on these sockets, with no timeout of its own, waits no longer: it is an error then."""
    timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for handle in filter(None, map(still_open, links)):
        with contextlib.suppress(OSError), handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def hung_up(link: Link) -> bool:
    """Whether it was closed, here or at the other end."""
    handle = still_open(link)
    if not handle:
        return True
    with handle:
        try:
            return handle.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


Address = tuple[str, int]


LISTEN_S = 2.0  # how long one who may be there has to take a call


def towards(address: Address) -> str:
    """The address of this host on the way to that one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(address)
            return s.getsockname()[0]
    except OSError as error:
        raise Lost(f"{address[0]} cannot be reached: {error}") from error


def answers(address: Address) -> bool:
    """Whether somebody takes calls there."""
    try:
        socket.create_connection(address, timeout=LISTEN_S).close()
        return True
    except OSError:
        return False
