"""How the ranks of a run find each other: at the key-value store that rank 0 or torchrun serves.

Every wait has a timeout, answers signals, and after `WAIT_NOTICE_S` says for whom it waits. A process at that address
that is not of this run is recognised: it does not answer, counts other ranks, is of another job of the launcher, or has
this rank already.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from paragan.comm.blocking_calls import call_with_timeout
from paragan.comm.launch_info import SECRET_ENV, LaunchInfo, master_address
from paragan.comm.lost_ranks import raise_if_lost
from paragan.comm.process_group import POLL_S, CommunicationError, Store, c10d
from paragan.comm.sockets import CONNECT_TIMEOUT_S, SocketId, is_connected, open_sockets, set_recv_timeout
from paragan.comm.store_port import GREETING, StorePort
from paragan.core.errors import InterruptedBeforeStart, UsageError

WAIT_NOTICE_S = 10.0  # after which a process says for whom it waits
GREETING_TIMEOUT_S = 0.1  # how long to listen for words of a process at the port: torch's store does not speak first
PORT_ADVICE = "Use another MASTER_PORT"


def has_agent_store(env: Mapping[str, str]) -> bool:
    """Return whether torchrun serves the store, which then outlives a group of ranks."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous(
    launch_info: LaunchInfo, env: Mapping[str, str], timeout_s: float, strategies: str = "lockstep strategies"
) -> tuple[Store, set[SocketId], StorePort | None]:
    """Connect to the key-value store that all ranks share; rank 0 serves it, unless torchrun does.

    Args:
        launch_info: this process.
        env: has MASTER_ADDR and MASTER_PORT.
        timeout_s: how long to wait for the server, and for each of its answers. torch's own timeout does not cover a
            server that is frozen.
        strategies: the kind that this rank forms a world for; the same on all ranks.

    Returns:
        The store, the sockets of its connections, and the port on the rank that serves it.

    Raises:
        CommunicationError: there is no server, or the port is taken.
        InterruptedBeforeStart: a signal ended the wait.
    """
    address, port = master_address(env)
    is_server = launch_info.rank == 0 and not has_agent_store(env)
    notice = WaitNotice(launch_info)

    def check() -> None:
        notice.write_if_due()
        raise_if_lost(range(launch_info.size))

    try:
        notice.text = f"waits for {address} (MASTER_ADDR) to resolve"
        _await_name(address, timeout_s, check)
        notice.set_awaited(f"rank 0 at {address}:{port} (MASTER_ADDR:MASTER_PORT)")
        if not is_server:
            _await_server(address, port, launch_info.rank, timeout_s, notice, check)
            notice.text = f"waits: {_not_a_store(address, port)}. {PORT_ADVICE}"
        store_port = StorePort(address, port) if is_server else None
        before = open_sockets()
        store = call_with_timeout(
            lambda: _open_store(address, port, launch_info.size, store_port, timeout_s),
            timeout_s,
            f"{_not_a_store(address, port)}, says rank {launch_info.rank}. {PORT_ADVICE}",
            check,
        )
        if SECRET_ENV in env:
            store = c10d.PrefixStore(env[SECRET_ENV], store)
        connections = set(filter(is_connected, open_sockets() - before))  # leaves out pipes of other threads
        set_recv_timeout(connections, timeout_s)
        if not has_agent_store(env):
            _claim_rank(store, launch_info, f"{address}:{port}")
        _check_strategies(store, launch_info, strategies, env)
        return store, connections, store_port
    except CommunicationError:
        raise
    except KeyboardInterrupt as error:
        if SECRET_ENV in env:  # the launcher says it for all ranks
            raise
        raise InterruptedBeforeStart(*error.args) from error
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError is a RuntimeError
        where = f"{address}:{port} (MASTER_ADDR:MASTER_PORT)"
        raise CommunicationError(_describe_failure(error, where, launch_info.rank, is_server)) from error


def _describe_failure(error: Exception, where: str, rank: int, is_server: bool) -> str:
    reason = str(error).splitlines()[0]
    if is_server:
        return f"rank 0 cannot serve {where}: {reason}. Use another MASTER_PORT"
    return f"rank 0 is not at {where}, says rank {rank}: {reason}. Use the address and the port of rank 0 on all ranks"


def _open_store(address: str, port: int, size: int, store_port: StorePort | None, timeout_s: float) -> Any:
    """Return torch's store, which this rank serves if it has the port."""
    timeout = timedelta(seconds=timeout_s)
    listener = store_port.descriptor if store_port else None
    options = (address, port, size, store_port is not None, timeout)
    return c10d.TCPStore(*options, wait_for_workers=False, master_listen_fd=listener)


def _not_a_store(address: str, port: int) -> str:
    return f"a process listens at {address}:{port} (MASTER_ADDR:MASTER_PORT), but does not answer as rank 0 does"


def _claim_rank(store: Any, launch_info: LaunchInfo, address: str) -> None:
    """Raise CommunicationError if another process came to this store as the same rank, or counts other ranks."""
    job = store.compare_set("job", "", launch_info.job or "-").decode()
    if launch_info.job and job not in (launch_info.job, "-"):
        raise CommunicationError(
            f"{address} (MASTER_ADDR:MASTER_PORT) belongs to job {job} of the launcher, and this is rank "
            f"{launch_info.rank} of job {launch_info.job}. Use another MASTER_PORT"
        )
    size = store.compare_set("world_size", "", str(launch_info.size)).decode()
    if size != str(launch_info.size):
        raise CommunicationError(
            f"{address} (MASTER_ADDR:MASTER_PORT) belongs to a run of {size} ranks, and this is rank "
            f"{launch_info.rank} of {launch_info.size}. Use another MASTER_PORT"
        )
    if store.add(f"arrived/{launch_info.rank}", 1) > 1:
        raise CommunicationError(
            f"rank {launch_info.rank} is at {address} (MASTER_ADDR:MASTER_PORT) already: another run, or an earlier "
            "start of this one. End it, or use another MASTER_PORT"
        )


def _check_strategies(store: Any, launch_info: LaunchInfo, strategies: str, env: Mapping[str, str]) -> None:
    """Raise UsageError on ranks that form another kind of world than the first one that came."""
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
    first = store.compare_set(f"strategies/{attempt}", "", strategies).decode()
    if first != strategies:
        raise UsageError(
            f"--strategy: is one of the {strategies} on rank {launch_info.rank}, and of the {first} on another rank. "
            "Use one strategy on all ranks",
            same_on_all_ranks=False,
        )


def _await_name(host: str, timeout_s: float, check: Callable[[], None]) -> None:
    """Return when the name of a host resolves: one of Kubernetes does so when its pod has started.

    check: called again and again meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    problem = (
        f"{host} (MASTER_ADDR, or the host of rank 0 by srun): its name does not resolve here. Set MASTER_ADDR to an "
        "address that every host knows, such as 10.0.0.1"
    )
    while True:
        left_s = max(deadline - time.monotonic(), POLL_S)
        try:
            call_with_timeout(lambda: socket.getaddrinfo(host, None), left_s, problem, check)
            return
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise CommunicationError(f"{problem} ({error})") from error
            check()
            time.sleep(POLL_S)


def _await_server(
    address: str, port: int, rank: int, timeout_s: float, notice: WaitNotice, check: Callable[[], None]
) -> None:
    """Return when a process listens there as a store does. torch's own attempts would print a stack trace each.

    notice: says what is wrong, as soon as that is known.
    check: called again and again meanwhile.

    Raises:
        CommunicationError: the ranks of that run have met already, or the process there is another program.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), POLL_S)
        try:
            with socket.create_connection((address, port), timeout=min(left_s, CONNECT_TIMEOUT_S)) as probe:
                words = _first_words(probe)
        except OSError:
            if time.monotonic() > deadline:
                raise
        else:
            if words is None:
                return
            if words == GREETING:
                raise CommunicationError(
                    f"the ranks of the run at {address}:{port} (MASTER_ADDR:MASTER_PORT) have met already, and this is "
                    f"one more with rank {rank}. Use another MASTER_PORT, or another rank for each process"
                )
            if time.monotonic() > deadline:
                raise CommunicationError(f"{_not_a_store(address, port)}, says rank {rank}. {PORT_ADVICE}")
            notice.text = f"waits: {_not_a_store(address, port)}. {PORT_ADVICE}"
        check()
        time.sleep(POLL_S)


def _first_words(connection: socket.socket) -> bytes | None:
    """Return what the other end says without being asked, empty if it closes the connection; None if it listens."""
    connection.settimeout(GREETING_TIMEOUT_S)
    try:
        return connection.recv(len(GREETING))
    except TimeoutError:
        return None


class WaitNotice:
    """Says once on standard error for whom a process waits, when that takes long.

    text : what it does, such as `waits for rank 0`
    """

    def __init__(self, launch_info: LaunchInfo, text: str = ""):
        self._launch_info, self.text = launch_info, text
        self._due_s = time.monotonic() + WAIT_NOTICE_S

    def set_awaited(self, ranks: str) -> None:
        """Wait for these ranks, which the variables of the launcher count."""
        variables = self._launch_info.variables
        self.text = (f"({variables}) " if variables else "") + f"waits for {ranks}"

    def write_if_due(self) -> None:
        """Write the line if the wait has lasted for `WAIT_NOTICE_S`."""
        if time.monotonic() > self._due_s:
            self._due_s = float("inf")
            info = self._launch_info
            sys.stderr.write(f"paragan: rank {info.rank} of {info.size} {self.text}\n")
