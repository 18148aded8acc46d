"""Ranks that wait on a closed connection fail at once, at either end."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from paragan.comm.sockets import is_closed, open_sockets, shutdown_sockets


@pytest.mark.parametrize("kind", ["send_recv", "sum"])
def test_waiting_for_half_a_message_fails_at_once(pool, kind):
    """Gloo does not notify a rank whose message was half sent or half received when the connection is closed."""

    def job(world):
        import threading
        import time

        import torch

        from paragan.comm.process_group import CommunicationError, WaitThread, new_gloo_group
        from paragan.comm.sockets import open_sockets, shutdown_sockets

        sockets_before = open_sockets()
        wait_thread = WaitThread(60)
        group = new_gloo_group(world.store, kind, world.rank, 2, 60, wait_thread)
        connections = open_sockets() - sockets_before
        x = torch.zeros(1 << 26)
        world.all_gather_str("ready")
        threading.Timer(0.02, lambda: (shutdown_sockets(connections), wait_thread.abandon())).start()
        start = time.monotonic()
        try:
            if kind == "sum":
                group.all_reduce_sum(x).wait()
            else:
                group.send_recv(*(({1: x}, {}) if world.rank == 0 else ({}, {0: x}))).wait()
        except CommunicationError as error:
            return str(error), time.monotonic() - start
        return "arrived", 0.0

    for outcome, waited_s in pool(2, job):
        assert outcome != "arrived"
        assert waited_s < 10


@pytest.mark.parametrize("is_blocked", [False, True], ids=["idle", "blocked"])
def test_an_abandoned_group_ends_its_threads(pool, is_blocked):
    """Its gloo thread would poll a hundred times a second for ever; a rank may lose its group every minute."""

    def job(world):
        import time
        from pathlib import Path

        import torch

        from paragan.comm.process_group import CommunicationError, WaitThread, new_gloo_group

        def count_loops():
            threads = 0
            for path in Path("/proc/self/task").glob("*/comm"):
                with contextlib.suppress(OSError):  # it has just ended
                    threads += "gloo" in path.read_text()
            return threads

        before = count_loops()
        for number in range(3):
            wait_thread = WaitThread(5)
            group = new_gloo_group(world.store, f"{is_blocked}/{number}", world.rank, 2, 5, wait_thread)
            group.all_reduce_sum(torch.ones(1)).wait()
            pending = None
            if is_blocked and world.rank == 0:
                pending = wait_thread.submit(group.all_reduce_sum(torch.ones(1)))  # the other rank does not come
            wait_thread.abandon()
            start = time.monotonic()
            if pending:
                with pytest.raises(CommunicationError):
                    pending.wait()
            waited_s = time.monotonic() - start
            del group, wait_thread, pending
        assert count_loops() > before
        deadline = time.monotonic() + 60
        while count_loops() > before and time.monotonic() < deadline:
            time.sleep(0.1)
        return count_loops() - before, waited_s

    for more, waited_s in pool(2, job):
        assert more <= 0
        assert waited_s < 4


def test_a_collective_that_watches_connections_fails_soon_without_a_thread(pool):
    def job(world):
        import threading
        import time

        import torch

        from paragan.comm.process_group import CommunicationError, TorchGroup, new_gloo_group
        from paragan.comm.sockets import is_closed, open_sockets, shutdown_sockets

        sockets_before = open_sockets()
        gloo = new_gloo_group(world.store, "watched", world.rank, 2, 60)
        connections = open_sockets() - sockets_before
        group = TorchGroup(gloo.process_group, has_lost_peer=lambda: any(map(is_closed, connections)))
        slow = torch.ones(4)
        if world.rank == 1:
            time.sleep(1.5)  # longer than the time between two looks at the connections
        group.all_reduce_sum(slow).wait()
        world.all_gather_str("ready")
        threading.Timer(0.02, lambda: shutdown_sockets(connections)).start()
        start = time.monotonic()
        try:
            group.all_reduce_sum(torch.zeros(1 << 26)).wait()
        except CommunicationError:
            return slow.tolist(), time.monotonic() - start
        return "arrived", 0.0

    for total, waited_s in pool(2, job):
        assert total == [2.0] * 4
        assert 0 < waited_s < 10


def test_shutdown_closes_both_ends_but_not_the_listener():
    sockets_before = open_sockets()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server = stack.enter_context(listener.accept()[0])
        ids = {socket_id[0]: socket_id for socket_id in open_sockets() - sockets_before}
        assert not is_closed(ids[client.fileno()])
        server.send(b"unread")
        assert not is_closed(ids[client.fileno()])
        shutdown_sockets(ids.values())
        client.recv(6)
        assert is_closed(ids[client.fileno()])
        assert is_closed(ids[server.fileno()])
        socket.create_connection(listener.getsockname()).close()


def test_reused_descriptor_is_not_shut_down():
    with contextlib.ExitStack() as stack:
        old, _, new, peer = (stack.enter_context(s) for _ in range(2) for s in socket.socketpair())
        (old_id,) = (socket_id for socket_id in open_sockets() if socket_id[0] == old.fileno())
        os.dup2(new.fileno(), old.fileno())
        shutdown_sockets([old_id])
        assert is_closed(old_id)
        new.send(b"x")
        assert peer.recv(1) == b"x"
