"""Find the connections of a process group that was just formed, which torch does not expose.

While it forms, other threads may open connections too, such as those of a logger or a download. A connection between
two ranks has one end at each of them. So every rank writes the ports of its new connections to the store; those that no
other rank has written do not belong to the group.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Collection

from paragan.comm.process_group import POLL_S, Store
from paragan.comm.sockets import SocketId, duplicate_socket, is_listener, open_sockets

Ports = tuple[int, int]  # of a connection: at this end, and at the other


def connections_since(before: set[SocketId], store_ports: Collection[int]) -> dict[SocketId, Ports]:
    """Return the network connections that were not open `before`, without those of the stores of ranks."""
    connections: dict[SocketId, Ports] = {}
    for socket_id in open_sockets() - before:
        if handle := duplicate_socket(socket_id):
            with handle, contextlib.suppress(OSError):  # not connected, or closed meanwhile
                if handle.family != socket.AF_UNIX and not is_listener(handle):
                    ports = handle.getsockname()[1], handle.getpeername()[1]
                    if not set(ports) & set(store_ports):
                        connections[socket_id] = ports
    return connections


def connections_of_group(
    store: Store, name: str, rank: int, size: int, candidates: dict[SocketId, Ports]
) -> set[SocketId]:
    """Return the candidates that have their other end at another rank of the group. All its ranks call this.

    One matching port suffices: network address translation may change the port of the end that connected.

    Args:
        store: of the group.
        name: of the group in the store.
        rank: this rank's number in the group.
        size: its number of ranks.
        candidates: `connections_since` before it was formed.
    """
    store.set(f"{name}/ports/{rank}", json.dumps(list(candidates.values())))
    keys = [f"{name}/ports/{other}" for other in range(size) if other != rank]
    while not store.check(keys):
        time.sleep(POLL_S)
    others = [ports for key in keys for ports in json.loads(store.get(key))]
    local_ports = {local for local, _ in others}
    remote_ports = {remote for _, remote in others}
    return {
        socket_id for socket_id, (local, remote) in candidates.items() if remote in local_ports or local in remote_ports
    }
