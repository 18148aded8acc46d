"""Links that are closed: whoever waits at either end is told."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from paragan.comm.sockets import hang_up, hung_up, open_sockets


@pytest.mark.parametrize("kind", ["swap", "sum"])
def test_who_waits_for_half_a_message_is_told(pool, kind):
    """Gloo forgets a message that was half sent, or half here, when its link is closed."""

    def job(world):
        import threading
        import time

        import torch

        from paragan.comm.process_group import Lost, Waiter, meet
        from paragan.comm.sockets import hang_up, open_sockets

        before, waiter = open_sockets(), Waiter(60)
        group = meet(world.store, kind, world.rank, 2, 60, waiter)
        links, x = open_sockets() - before, torch.zeros(1 << 26)
        world.agree("here")
        threading.Timer(0.02, lambda: (hang_up(links), waiter.give_up())).start()
        start = time.monotonic()
        try:
            if kind == "sum":
                group.sum(x).wait()
            else:
                group.swap(*(({1: x}, {}) if world.rank == 0 else ({}, {0: x}))).wait()
        except Lost as lost:
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
        assert not hung_up(links[mine.fileno()])
        theirs.send(b"unread")
        assert not hung_up(links[mine.fileno()])
        hang_up(links.values())
        mine.recv(6)
        assert hung_up(links[mine.fileno()])
        assert hung_up(links[theirs.fileno()])
        socket.create_connection(door.getsockname()).close()  # the door is open still


def test_a_number_that_another_socket_got_is_not_hung_up():
    with contextlib.ExitStack() as stack:
        one, _, left, right = (stack.enter_context(s) for _ in range(2) for s in socket.socketpair())
        (link,) = (link for link in open_sockets() if link[0] == one.fileno())
        os.dup2(left.fileno(), one.fileno())
        hang_up([link])
        assert hung_up(link)
        left.send(b"x")
        assert right.recv(1) == b"x"
