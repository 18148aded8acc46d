"""Rendezvous of ranks: host names that do not resolve, and key-value stores of other jobs."""

from __future__ import annotations

import datetime
import socket
import threading

import pytest

from advice import advises
from paragan.comm.launch_info import SECRET_ENV, LaunchInfo
from paragan.comm.process_group import CommunicationError, c10d
from paragan.comm.rendezvous import rendezvous
from paragan.comm.store_port import describe_ends
from processes import free_port


def address(host: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def test_a_name_that_does_not_resolve_is_replaced_as_advised():
    port = free_port()
    with advises(
        "no-such-host.invalid (MASTER_ADDR, or the host of rank 0 by srun): its name does not resolve here. Set "
        "MASTER_ADDR to an address that every host knows, such as 10.0.0.1",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(0, 2), address("no-such-host.invalid", port), 1.0)
    assert rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port), 10.0)


def test_the_store_of_another_job_is_left_as_advised():
    port = free_port()
    first, *_ = rendezvous(LaunchInfo(0, 2, job="7.0"), address("127.0.0.1", port), 10.0)
    with advises(
        f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) belongs to job 7.0 of the launcher, and this is rank 1 of job "
        "7.1. Use another MASTER_PORT",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(1, 2, job="7.1"), address("127.0.0.1", port), 10.0)
    other, *_ = rendezvous(LaunchInfo(0, 2, job="7.1"), address("127.0.0.1", free_port()), 10.0)
    assert not other.check(["arrived/1"])
    rendezvous(LaunchInfo(1, 2, job="7.0"), address("127.0.0.1", port), 10.0)
    assert first.check(["arrived/1"])


def connect_stranger(port: int):
    """Return a client of torch's store that is no rank."""
    timeout = datetime.timedelta(seconds=5)
    return c10d.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


def test_the_port_is_closed_to_all_but_the_ranks_that_have_met():
    port = free_port()
    store, connections, store_port = rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port), 10.0)
    stranger = connect_stranger(port)
    other_store, other_connections, other_port = rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 10.0)
    assert other_port is None
    stranger.set("a", "1")
    store_port.close_to_strangers([describe_ends(connections), describe_ends(other_connections)])
    with pytest.raises(RuntimeError):
        stranger.get("a")
    other_store.set("from", "rank 1")
    assert store.get("from") == b"rank 1"
    with advises(
        f"the ranks of the run at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) have met already, and this is one more "
        "with rank 1. Use another MASTER_PORT, or another rank for each process",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 10.0)
    assert rendezvous(LaunchInfo(0, 2), address("127.0.0.1", free_port()), 10.0)
    store_port.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_no_connection_is_cut_where_addresses_are_translated():
    port = free_port()
    store, connections, store_port = rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port), 10.0)
    other_store, *_ = rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 10.0)
    store_port.close_to_strangers([describe_ends(connections), '[["10.0.0.9", 4711]]'])
    other_store.set("a", "1")
    assert store.get("a") == b"1"
    store_port.close()


def test_keys_of_a_stranger_are_not_those_of_ranks_with_a_secret():
    port = free_port()
    secret = {SECRET_ENV: "a secret"}
    store, *_ = rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port) | secret, 10.0)
    stranger = connect_stranger(port)
    for key in ("job", "world_size", "from"):
        stranger.set(key, "77")
    stranger.add("arrived/1", 1)
    other_store, *_ = rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port) | secret, 10.0)
    assert not other_store.check(["from"])
    store.set("from", "rank 0")
    assert other_store.get("from") == b"rank 0"


def test_a_program_that_speaks_first_or_closes_at_once_is_no_store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            for words in (b"220 mail.example ESMTP\r\n", b"", b""):
                connection, _ = listener.accept()
                connection.sendall(words)
                connection.close()

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(CommunicationError, match="does not answer as rank 0 does"):
            rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 0.05)


def test_ranks_with_strategies_of_two_kinds_meet_once_they_have_one_as_advised():
    port = free_port()
    first, *_ = rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port), 10.0)
    with advises(
        "--strategy: is one of the strategies that survive lost ranks on rank 1, and of the lockstep strategies on "
        "another rank. Use one strategy on all ranks"
    ) as refusal:
        rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 10.0, "strategies that survive lost ranks")
    assert not refusal.value.same_on_all_ranks
    assert first.check(["arrived/1"])
    port = free_port()
    store, *_ = rendezvous(LaunchInfo(0, 2), address("127.0.0.1", port), 10.0, "strategies that survive lost ranks")
    assert rendezvous(LaunchInfo(1, 2), address("127.0.0.1", port), 10.0, "strategies that survive lost ranks")
    assert store.check(["arrived/1"])
