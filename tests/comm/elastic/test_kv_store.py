"""The key-value store that every rank of an elastic world serves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from paragan.comm.elastic.kv_store import (
    MAX_LINE_CHARS,
    MAX_UNAUTHENTICATED,
    KVClient,
    KVServer,
    PrefixStore,
    ServerAddress,
)
from paragan.comm.process_group import CommunicationError


@pytest.fixture
def server():
    server = KVServer("127.0.0.1")
    yield server
    server.close()


def test_clients_and_server_share_values(server):
    with KVClient(server.address, 5) as one, KVClient(server.address, 5) as other:
        assert not other.check(["a"])
        one.set("a", "ä, \n and more")
        assert other.check(["a"])
        assert not other.check(["a", "b"])
        assert other.get("a").decode() == server.get("a").decode() == "ä, \n and more"
        PrefixStore(one, "prefix").set("a", "1")
        assert PrefixStore(server, "prefix").get("a") == b"1"
        assert server.get_or_none("a")
        assert one.get_or_none("b") is None


def test_frozen_or_closed_server_fails_in_time():
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # connections succeed, as with a frozen process
        start = time.monotonic()
        with (
            pytest.raises(CommunicationError, match="does not answer"),
            KVClient(ServerAddress(*frozen.getsockname(), "secret"), 0.3) as client,
        ):
            client.check(["a"])
        assert 0.2 < time.monotonic() - start < 2
        address = ServerAddress(*frozen.getsockname(), "secret")
    with pytest.raises(CommunicationError) as error:
        KVClient(address, 5)
    assert isinstance(error.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'["a", "2"]\n',
        b'["a", null]\n["a", null]\n',
        os.urandom(1000) + b"\n",
        b"x" * (1 << 20),  # without a newline
        b"0" * 32 + b"\n" + b'["a", "2"]\n',
    ],
    ids=["http", "write", "read", "bytes", "long", "other secret"],
)
def test_connections_without_the_secret_are_closed_without_an_answer(words, server):
    server.set("a", "1")
    with socket.create_connection(server.address[:2]) as connection:
        connection.settimeout(5)
        with contextlib.suppress(ConnectionError):  # the server may close it while this writes
            connection.sendall(words)
            assert connection.recv(100) == b""
    assert server.get("a") == b"1"
    with KVClient(server.address, 5) as client:
        assert client.get("a") == b"1"


def test_silent_connections_do_not_keep_others_out(server):
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.address[:2])) for _ in range(100)]
        with KVClient(server.address, 5) as client:
            client.set("a", "1")
        for connection in connections[: 100 - MAX_UNAUTHENTICATED]:  # the oldest
            connection.settimeout(5)
            assert connection.recv(1) == b""


def test_a_request_without_an_end_closes_its_connection(server):
    with socket.create_connection(server.address[:2]) as connection:
        connection.settimeout(5)
        with contextlib.suppress(ConnectionError):
            connection.sendall(f"{server.address.secret}\n".encode() + b"[" * (MAX_LINE_CHARS + 1))
            assert connection.recv(100) == b""


def test_invalid_request_closes_only_its_connection(server):
    with socket.create_connection(server.address[:2]) as connection:
        connection.sendall(f"{server.address.secret}\nGET / HTTP/1.1\r\n\r\n".encode())
        connection.settimeout(5)
        assert connection.recv(100) == b""
    with KVClient(server.address, 5) as client:
        client.set("a", "1")
        assert client.check(["a"])


def test_concurrent_clients(server):
    def count(name):
        with KVClient(server.address, 5) as client:
            for i in range(200):
                client.set(name, str(i))
                assert client.get(name) == str(i).encode()

    threads = [threading.Thread(target=count, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(server.get(str(n)) == b"199" for n in range(8))
