"""The port of the key-value store that rank 0 serves: open to all until the ranks have met, then to nobody else.

torch's store believes everybody who connects. So when the ranks have met, the port is closed, and connections that are
not of a rank are cut. From then on a late process gets `GREETING` and no more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable

from paragan.comm.process_group import POLL_S
from paragan.comm.sockets import (
    Address,
    SocketId,
    duplicate_socket,
    local_ends,
    open_sockets,
    plain_address,
    replace_sockets,
    shutdown_sockets,
    socket_id_of,
)

GREETING = b"paragan: the ranks of this run have met\n"
LOOPBACK_ADDRESSES = ("127.0.0.1", "localhost")


class StorePort:
    """The port of a store on this rank.

    descriptor : of the socket that accepts connections; torch's store takes it over
    """

    def __init__(self, address: str, port: int):
        """Listen at a loopback address alone if `address` is one, else at all addresses of this host.

        Raises:
            OSError: the port is taken.
        """
        self.port = port
        self._host = address if address in LOOPBACK_ADDRESSES else ""
        self.descriptor = self._listen().detach()
        self._listener_id = socket_id_of(self.descriptor)
        self._late_listener: socket.socket | None = None

    def _listen(self) -> socket.socket:
        if self._host or not socket.has_dualstack_ipv6():
            return socket.create_server((self._host, self.port), backlog=2048)
        return socket.create_server(("", self.port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)

    def close_to_strangers(self, client_ends: Iterable[str]) -> None:
        """Accept no more connections, and cut those that are of no rank.

        Args:
            client_ends: what `describe_ends` returned on every rank. If one of these addresses is not seen here, since
                addresses are translated on the way, no connection is cut.
        """
        ends = [(host, port) for text in client_ends for host, port in json.loads(text)]
        clients = {end for end in ends if end[1] != self.port}  # not the ends here, which the same process has
        replace_sockets({self._listener_id} & open_sockets())
        peers = self._accepted_connections()
        if clients <= set(peers.values()):
            shutdown_sockets(socket_id for socket_id, peer in peers.items() if peer not in clients)
        with contextlib.suppress(OSError):  # another process may have got the port
            self._late_listener = self._listen()
            threading.Thread(target=self._greet, args=(self._late_listener,), daemon=True, name="store-port").start()

    def _accepted_connections(self) -> dict[SocketId, Address]:
        peers: dict[SocketId, Address] = {}
        for socket_id in open_sockets():
            handle = duplicate_socket(socket_id)
            with contextlib.suppress(OSError), handle or contextlib.nullcontext():
                if handle and handle.family != socket.AF_UNIX and handle.getsockname()[1] == self.port:
                    peers[socket_id] = plain_address(handle.getpeername())
        return peers

    def _greet(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or out of descriptors for a moment
                time.sleep(POLL_S)
                continue
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(GREETING)

    def close(self) -> None:
        """Free the port, if it was closed to strangers."""
        if self._late_listener:
            with contextlib.suppress(OSError):
                self._late_listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            self._late_listener.close()


def describe_ends(connections: Iterable[SocketId]) -> str:
    """Return this rank's own ends of its connections to the store, as text."""
    return json.dumps(local_ends(connections))
