"""The words that ranks leave for each other."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from paragan.comm.elastic.kv_store import KVClient, KVServer, PrefixStore
from paragan.comm.process_group import CommunicationError


@pytest.fixture
def board():
    board = KVServer("127.0.0.1")
    yield board
    board.close()


def test_words_are_there_for_all(board):
    with KVClient(board.address, 5) as one, KVClient(board.address, 5) as other:
        share(board, one, other)


def share(board, one, other):
    assert not other.check(["a"])
    one.set("a", "ä, \n and more")
    assert other.check(["a"])
    assert not other.check(["a", "b"])
    assert other.get("a").decode() == board.get("a").decode() == "ä, \n and more"
    PrefixStore(one, "room").set("a", "1")
    assert PrefixStore(board, "room").get("a") == b"1"
    assert board.get_or_none("a")
    assert one.get_or_none("b") is None


def test_a_board_that_hangs_or_is_gone_is_lost_in_time():
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes calls, as a frozen process does, and never answers
        began = time.monotonic()
        with pytest.raises(CommunicationError, match="does not answer"), KVClient(frozen.getsockname(), 0.3) as board:
            board.check(["a"])
        assert 0.2 < time.monotonic() - began < 2
        address = frozen.getsockname()
    with pytest.raises(CommunicationError) as refused:
        KVClient(address, 5)
    assert isinstance(refused.value.__cause__, ConnectionRefusedError)


def test_nonsense_ends_the_call_and_not_the_board(board):
    with socket.create_connection(board.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(5)
        assert stranger.recv(100) == b""
    with KVClient(board.address, 5) as remote:
        remote.set("a", "1")
        assert remote.check(["a"])


def test_many_at_once(board):
    def count(name):
        with KVClient(board.address, 5) as remote:
            for i in range(200):
                remote.set(name, str(i))
                assert remote.get(name) == str(i).encode()

    threads = [threading.Thread(target=count, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(board.get(str(n)) == b"199" for n in range(8))
