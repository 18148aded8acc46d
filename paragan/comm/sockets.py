"""TODO: docstring of paragan/comm/sockets.py"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from paragan.comm.process_group import CommunicationError

SocketId = tuple[int, str]  # an open socket: its descriptor, and what tells it from others that get the number later


def open_sockets() -> set[SocketId]:
    """This process's open sockets (Linux; none where the system does not tell)."""
    found = set[SocketId]()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            what = str(entry.readlink())
            if what.startswith("socket:"):
                found.add((int(entry.name), what))
    return found


def duplicate_socket(socket_id: SocketId) -> socket.socket | None:
    """A second handle on this socket, or nothing where it was closed."""
    with contextlib.suppress(OSError):
        copy = os.dup(socket_id[0])
        if str(Path(f"/proc/self/fd/{copy}").readlink()) == socket_id[1]:
            return socket.socket(fileno=copy)
        os.close(copy)
    return None


def is_connected(socket_id: SocketId) -> bool:
    """Whether this socket is one end of a connection to somebody else."""
    if not (handle := duplicate_socket(socket_id)):
        return False
    with handle, contextlib.suppress(OSError):
        return handle.family != socket.AF_UNIX and not is_listener(handle) and bool(handle.getpeername())
    return False


def is_listener(handle: socket.socket) -> bool:
    return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def shutdown_sockets(socket_ids: Iterable[SocketId]) -> None:
    """Shut these sockets down, so that whoever waits at either end is told; but not those that listen."""
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            if not is_listener(handle):  # gloo minds for its listener
                handle.shutdown(socket.SHUT_RDWR)


def set_recv_timeout(socket_ids: Iterable[SocketId], timeout_s: float) -> None:
    """Who waits for an answer on these sockets, with no timeout of its own, waits no longer: it is an error then."""
    timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def is_closed(socket_id: SocketId) -> bool:
    """Whether it was closed, here or at the other end."""
    handle = duplicate_socket(socket_id)
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


CONNECT_TIMEOUT_S = 2.0  # how long one who may be there has to take a call


def local_address_towards(address: Address) -> str:
    """The address of this host on the way to that one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(address)
            return s.getsockname()[0]
    except OSError as error:
        raise CommunicationError(f"{address[0]} cannot be reached: {error}") from error


def is_listening(address: Address) -> bool:
    """Whether somebody takes calls there."""
    try:
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
        return True
    except OSError:
        return False
