"""Links that are closed: whoever waits at either end is told."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from paragan.comm.sockets import is_closed, open_sockets, shutdown_sockets


@pytest.mark.parametrize("kind", ["swap", "sum"])
def test_who_waits_for_half_a_message_is_told(pool, kind):
    """Gloo forgets a message that was half sent, or half here, when its link is closed."""

    def job(world):
        import threading
        import time

        import torch

        from paragan.comm.process_group import CommunicationError, WaitThread, new_gloo_group
        from paragan.comm.sockets import open_sockets, shutdown_sockets

        before, waiter = open_sockets(), WaitThread(60)
        group = new_gloo_group(world.store, kind, world.rank, 2, 60, waiter)
        links, x = open_sockets() - before, torch.zeros(1 << 26)
        world.all_gather_str("here")
        threading.Timer(0.02, lambda: (shutdown_sockets(links), waiter.abandon())).start()
        start = time.monotonic()
        try:
            if kind == "sum":
                group.all_reduce_sum(x).wait()
            else:
                group.send_recv(*(({1: x}, {}) if world.rank == 0 else ({}, {0: x}))).wait()
        except CommunicationError as lost:
            return str(lost), time.monotonic() - start
        return "arrived", 0.0

    for why, took in pool(2, job):
        assert why != "arrived"
        assert took < 10


def test_a_link_is_hung_up_from_either_end():
    before = open_sockets()
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mine = stack.enter_context(socket.create_connection(door.getsockname()))
        theirs = stack.enter_context(door.accept()[0])
        links = {link[0]: link for link in open_sockets() - before}
        assert not is_closed(links[mine.fileno()])
        theirs.send(b"unread")
        assert not is_closed(links[mine.fileno()])
        shutdown_sockets(links.values())
        mine.recv(6)
        assert is_closed(links[mine.fileno()])
        assert is_closed(links[theirs.fileno()])
        socket.create_connection(door.getsockname()).close()  # the door is open still


def test_a_number_that_another_socket_got_is_not_hung_up():
    with contextlib.ExitStack() as stack:
        one, _, left, right = (stack.enter_context(s) for _ in range(2) for s in socket.socketpair())
        (link,) = (link for link in open_sockets() if link[0] == one.fileno())
        os.dup2(left.fileno(), one.fileno())
        shutdown_sockets([link])
        assert is_closed(link)
        left.send(b"x")
        assert right.recv(1) == b"x"
