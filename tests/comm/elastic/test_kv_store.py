"""The key-value store that every rank of an elastic world serves."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from paragan.comm.elastic.kv_store import KVClient, KVServer, PrefixStore
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
        with pytest.raises(CommunicationError, match="does not answer"), KVClient(frozen.getsockname(), 0.3) as client:
            client.check(["a"])
        assert 0.2 < time.monotonic() - start < 2
        address = frozen.getsockname()
    with pytest.raises(CommunicationError) as error:
        KVClient(address, 5)
    assert isinstance(error.value.__cause__, ConnectionRefusedError)


def test_invalid_request_closes_only_its_connection(server):
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
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
