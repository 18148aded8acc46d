"""Rendezvous of ranks: host names that do not resolve, and key-value stores of other jobs."""

from __future__ import annotations

from advice import advises
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import CommunicationError
from paragan.comm.rendezvous import rendezvous
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
    first, _ = rendezvous(LaunchInfo(0, 2, job="7.0"), address("127.0.0.1", port), 10.0)
    with advises(
        f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT) belongs to job 7.0 of the launcher, and this is rank 1 of job "
        "7.1. Use another MASTER_PORT",
        CommunicationError,
    ):
        rendezvous(LaunchInfo(1, 2, job="7.1"), address("127.0.0.1", port), 10.0)
    other, _ = rendezvous(LaunchInfo(0, 2, job="7.1"), address("127.0.0.1", free_port()), 10.0)
    assert not other.check(["arrived/1"])
    rendezvous(LaunchInfo(1, 2, job="7.0"), address("127.0.0.1", port), 10.0)
    assert first.check(["arrived/1"])
