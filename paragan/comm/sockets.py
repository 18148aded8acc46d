"""Sockets of this process: which are open, which are connected, and how to shut them down.

torch does not expose the sockets of its stores and process groups. They are found as the difference of `open_sockets`
before and after torch opens them (Linux: /proc/self/fd). A descriptor may be closed and reused by another thread at any
time, so a socket is identified by descriptor and inode, and is duplicated before it is used (`duplicate_socket`).
Shutting a socket down wakes those who wait at either end, which gloo's own `abort` does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paragan.comm.process_group import CommunicationError

SocketId = tuple[int, str]  # an open socket: its descriptor, and its inode as /proc names it ("socket:[4711]")
Address = tuple[str, int]  # host and port

CONNECT_TIMEOUT_S = 2.0  # how long one attempt to connect may take
SO_ATTACH_FILTER = 26  # of Linux: a filter of the packets to a socket
BPF_RETURN = 6  # the instruction of such a filter that lets through as many bytes as it names


def open_sockets() -> set[SocketId]:
    """Return the open sockets of this process (Linux; empty on other systems)."""
    sockets = set[SocketId]()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                sockets.add((int(entry.name), target))
    return sockets


def socket_id_of(descriptor: int) -> SocketId:
    """Return what identifies the open socket of this descriptor."""
    with contextlib.suppress(OSError):
        return descriptor, str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return descriptor, ""


def duplicate_socket(socket_id: SocketId) -> socket.socket | None:
    """Return a second handle on this socket, or None if it was closed."""
    with contextlib.suppress(OSError):
        copy = os.dup(socket_id[0])
        if str(Path(f"/proc/self/fd/{copy}").readlink()) == socket_id[1]:
            return socket.socket(fileno=copy)
        os.close(copy)
    return None


def is_connected(socket_id: SocketId) -> bool:
    """Return whether this socket is one end of a network connection."""
    handle = duplicate_socket(socket_id)
    if not handle:
        return False
    with handle, contextlib.suppress(OSError):
        return handle.family != socket.AF_UNIX and not is_listener(handle) and bool(handle.getpeername())
    return False


def local_ends(socket_ids: Iterable[SocketId]) -> list[Address]:
    """Return the addresses of this process's ends of these connections."""
    ends: list[Address] = []
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            ends.append(plain_address(handle.getsockname()))
    return ends


def plain_address(name: Sequence[Any]) -> Address:
    """Return host and port of a socket's name; IPv4 addresses also where they are written as IPv6."""
    return name[0].removeprefix("::ffff:"), name[1]


def is_listener(handle: socket.socket) -> bool:
    """Return whether this socket accepts connections."""
    return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def shutdown_sockets(socket_ids: Iterable[SocketId]) -> None:
    """Shut down these connections, which wakes those who wait at either end. Listeners are left open."""
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            if not is_listener(handle):  # gloo fails without its listener
                handle.shutdown(socket.SHUT_RDWR)


def block_new_connections(socket_ids: Iterable[SocketId]) -> None:
    """Let the listeners among these sockets drop every new connection (Linux). gloo still fails without a listener."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            if is_listener(handle) and handle.family != socket.AF_UNIX:
                handle.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def replace_sockets(socket_ids: Iterable[SocketId]) -> None:
    """Put an end of no connection in the place of these sockets, whose descriptors stay in use by torch."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, _ in socket_ids:
        os.dup2(null, descriptor)
    os.close(null)


def set_recv_timeout(socket_ids: Iterable[SocketId], timeout_s: float) -> None:
    """Make every blocking receive on these sockets fail after `timeout_s`, also those of torch's own code."""
    timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for handle in filter(None, map(duplicate_socket, socket_ids)):
        with contextlib.suppress(OSError), handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def is_closed(socket_id: SocketId) -> bool:
    """Return whether this connection was closed, at this end or at the other."""
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


def local_address_towards(address: Address) -> str:
    """Return the address of this host on the route to `address`.

    Raises:
        CommunicationError: there is no route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # connecting a UDP socket sends nothing
            s.connect(address)
            return s.getsockname()[0]
    except OSError as error:
        raise CommunicationError(f"{address[0]} cannot be reached: {error}") from error


def is_listening(host: str, port: int) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        return True
    except OSError:
        return False
