"""Connections of a group are told from those that other threads opened while it formed."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from torch.distributed import HashStore

from paragan.comm.elastic.group_connections import connections_of_group, connections_since
from paragan.comm.sockets import open_sockets, socket_id_of


@pytest.fixture
def connect():
    """A function that opens a connection to a new server and returns both ends."""
    with contextlib.ExitStack() as stack:

        def open_connection() -> tuple[socket.socket, socket.socket]:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(server.getsockname()))
            return client, stack.enter_context(server.accept()[0])

        yield open_connection


def test_only_connections_between_the_ranks_are_those_of_the_group(connect):
    before = open_sockets()
    between, logger, download, of_a_store = connect(), connect(), connect(), connect()
    candidates = connections_since(before, [of_a_store[1].getsockname()[1]])
    ids = [[socket_id_of(end.fileno()) for end in ends] for ends in (between, logger, download, of_a_store)]
    assert set(candidates) == {*ids[0], *ids[1], *ids[2]}  # neither listeners nor the store's
    store, found = HashStore(), [set(), set()]
    own = [[ids[0][0], ids[1][0]], [ids[0][1], ids[2][0]]]  # of each rank; the other ends of two are at servers

    def find(rank: int) -> None:
        found[rank] = connections_of_group(store, "group", rank, 2, {i: candidates[i] for i in own[rank]})

    ranks = [threading.Thread(target=find, args=[rank]) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert found == [{ids[0][0]}, {ids[0][1]}]
