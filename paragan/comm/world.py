"""The ranks of a run: where the launcher put each, how they find each other, form groups, and report failures.

An exchange that fails raises CommunicationError. The ranks then tell each other through the key-value store which of
them failed first and why (`World.report_failure`), so that all end with the same message, which names rank and step.

Rank 0, which usually holds the store, has to leave last, both in good order (`close`) and after a failure (`abandon`).
The sockets of torch's store and groups are found by comparing the open sockets before and after torch opens them;
shutting them down is how a failing rank makes the others notice at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch

from paragan.comm.blocking_calls import call_with_timeout
from paragan.comm.lost_ranks import lost_rank_message
from paragan.comm.process_group import (
    POLL_S,
    CommunicationError,
    Group,
    SingleRankGroup,
    Store,
    TorchGroup,
    WaitThread,
    as_comm_error,
    c10d,
    new_gloo_group,
)
from paragan.comm.sockets import (
    SocketId,
    is_closed,
    is_connected,
    local_address_towards,
    open_sockets,
    set_recv_timeout,
    shutdown_sockets,
)
from paragan.core.devices import backend_of
from paragan.core.errors import Interrupted, RunError, UsageError

FAULT_WINDOW_S = 4.0  # how long ranks wait for the report of the rank that failed first
WAIT_NOTICE_S = 10.0  # after which a process says for whom it waits
LOST = "lost "  # prefix of the report of a rank whose exchange failed because of another rank


# variables of launchers that are not read: (rank, number of ranks)
UNREAD_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI, also on AzureML
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH and Intel MPI
    ("PALS_RANKID", "PALS_SIZE"),  # HPE Cray
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # Flux
)


@dataclass(frozen=True)
class LaunchInfo:
    """Where a launcher put this process: its rank among all, and among those of its host.

    variables : the environment variables that say so, for messages
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variables: str = field(default="", compare=False)

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> LaunchInfo:
        """Read torchrun's variables, else those of srun's tasks; without either it is a single process.

        Raises:
            UsageError: the variables are incomplete or contradict each other, or another launcher started several
                processes, each of which would train the same run.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        elif "RANK" in env or "WORLD_SIZE" in env:
            raise UsageError(
                "RANK, WORLD_SIZE: only one of them is set. Set both, as torchrun does, or neither",
                same_on_all_ranks=False,
            )
        else:
            _require_known_launcher(env, LaunchInfo())
            return LaunchInfo()
        rank = _read_int(env, names[0])
        size = _read_int(env, names[1])
        local_rank = _read_int(env, names[2], 0)
        local_size = _read_int(env, names[3], 1)
        if not 0 <= rank < size:
            raise UsageError(
                f"{names[0]}={rank}: must be from 0 to {size - 1}, since {names[1]}={size}", same_on_all_ranks=False
            )
        variables = f"{names[0]}={rank}, {names[1]}={size}"
        info = LaunchInfo(rank, size, local_rank, max(local_size, local_rank + 1), variables)
        if names[0] == "SLURM_PROCID":
            _require_known_launcher(env, info)  # mpirun starts its daemons with srun
        return info


def _require_known_launcher(env: Mapping[str, str], info: LaunchInfo) -> None:
    """Raise UsageError if a launcher that is not read counts other ranks than `info`."""
    for rank_name, size_name in UNREAD_LAUNCHERS:
        size = env.get(size_name, "")
        rank = env.get(rank_name, "")
        if size.isdigit() and int(size) > 1 and (rank, size) != (str(info.rank), str(info.size)):
            raise UsageError(
                f"{size_name}={size}: its launcher is not read, and each of the {size} processes would train the same "
                "run. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from it, or start with torchrun, srun or "
                "--ranks N",
                same_on_all_ranks=False,
            )


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a number from the environment; without a default it has to be there."""
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise UsageError(f"{name}={text!r}: must be a number, as torchrun and srun set it", same_on_all_ranks=False)
    return int(digits)


def master_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the key-value store of all ranks, which rank 0 serves.

    Raises:
        UsageError: there is no MASTER_ADDR, or MASTER_PORT is no port.
    """
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise UsageError("MASTER_ADDR: is not set. Start with torchrun, srun or --ranks N")
    job = _read_int(env, "SLURM_JOB_ID", 0)
    port = _read_int(env, "MASTER_PORT", 29500 + job % 10000)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port}: must be between 1 and 65535", same_on_all_ranks=False)
    return address, port


def rendezvous(launch_info: LaunchInfo, env: Mapping[str, str], timeout_s: float) -> tuple[Store, set[SocketId]]:
    """Connect to the key-value store that all ranks share; rank 0 serves it, unless torchrun does.

    Args:
        launch_info: this process.
        env: has MASTER_ADDR and MASTER_PORT.
        timeout_s: how long to wait for the server, and for each of its answers. torch's own timeout does not cover a
            server that is frozen.

    Returns:
        The store, and the sockets of its connections.

    Raises:
        CommunicationError: there is no server, or the port is taken.
    """
    address, port = master_address(env)
    has_agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = launch_info.rank == 0 and not has_agent_store
    notice = WaitNotice(launch_info, f"rank 0 at {address}:{port} (MASTER_ADDR:MASTER_PORT)")

    def check() -> None:
        notice.write_if_due()
        if message := lost_rank_message(range(launch_info.size)):
            raise CommunicationError(message)

    try:
        if not is_server:
            _await_server(address, port, timeout_s, check)
        before = open_sockets()
        timeout = timedelta(seconds=timeout_s)
        store = call_with_timeout(
            lambda: c10d.TCPStore(address, port, launch_info.size, is_server, timeout, wait_for_workers=False),
            timeout_s,
            f"a process listens at {address}:{port} (MASTER_ADDR:MASTER_PORT), but does not answer as rank 0 does, "
            f"says rank {launch_info.rank}. Use another MASTER_PORT",
            check,
        )
        connections = set(filter(is_connected, open_sockets() - before))  # leaves out pipes of other threads
        set_recv_timeout(connections, timeout_s)
        if not has_agent_store:
            _claim_rank(store, launch_info, f"{address}:{port}")
        return store, connections
    except CommunicationError:
        raise
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError is a RuntimeError
        reason = str(error).splitlines()[0]
        problem = f"rank 0 cannot serve {address}:{port}" if is_server else f"rank 0 is not at {address}:{port}"
        raise CommunicationError(
            f"{problem} (MASTER_ADDR:MASTER_PORT), says rank {launch_info.rank}: {reason}. "
            f"{'Use another MASTER_PORT' if is_server else 'Use the address and the port of rank 0 on all ranks'}"
        ) from error


def _claim_rank(store: Any, launch_info: LaunchInfo, address: str) -> None:
    """Raise CommunicationError if another process came to this store as the same rank, or counts other ranks."""
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


class WaitNotice:
    """Says once on standard error for whom a process waits, when that takes long.

    launch_info : this process
    awaited     : for whom it waits
    """

    def __init__(self, launch_info: LaunchInfo, awaited: str = ""):
        self._launch_info, self.awaited = launch_info, awaited
        self._due_s = time.monotonic() + WAIT_NOTICE_S

    def write_if_due(self) -> None:
        """Write the line if the wait has lasted for `WAIT_NOTICE_S`."""
        if time.monotonic() > self._due_s:
            self._due_s = float("inf")
            info = self._launch_info
            counted = f", which {info.variables} count" if info.variables else ""
            sys.stderr.write(f"paragan: rank {info.rank} of {info.size} waits for {self.awaited}{counted}\n")


def _await_server(address: str, port: int, timeout_s: float, check: Callable[[], None]) -> None:
    """Return when a process listens there. torch's own attempts would print a stack trace each.

    check: called again and again meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), POLL_S)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            check()
            time.sleep(POLL_S)


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


class World:
    """All ranks of a run, as one of them sees it: its rank, its device, the store and the groups.

    `World.solo()` needs no process group, so every strategy also runs in one process.

    is_elastic   : whether the run continues without a rank that is lost (comm/elastic)
    all_ranks    : the group of all ranks
    initial_size : how many ranks the run was started with
    timeout_s    : of every collective and message
    """

    is_elastic: ClassVar[bool] = False

    def __init__(self, launch_info: LaunchInfo, device: torch.device, store: Store, all_ranks: Group, timeout_s: float):
        self.launch_info, self.device, self.store, self.all_ranks = launch_info, device, store, all_ranks
        self.timeout_s = timeout_s
        self.initial_size = launch_info.size
        self._gather_count = 0
        self._pair_group_count: dict[int, int] = {}  # how many groups this rank has formed with each other rank
        self._silent_ranks = list[int]()  # ranks that reported no reason for their failure
        self._store_sockets = set[SocketId]()  # connections to the store
        self._other_sockets = set[SocketId]()  # all that were open before there was a group
        self._peer_sockets = set[SocketId]()  # connections to other ranks, of the group of all

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> World:
        """Return a world of one rank."""
        return World(LaunchInfo(), torch.device(device), c10d.HashStore(), SingleRankGroup(), 60.0)

    @staticmethod
    def join(
        launch_info: LaunchInfo, device: torch.device, timeout_s: float, env: Mapping[str, str] = os.environ
    ) -> World:
        """Find the other ranks and form the group of all.

        Args:
            launch_info: this process.
            device: decides the backend (gloo, NCCL).
            timeout_s: of the rendezvous, and of every collective: none hangs.
            env: has MASTER_ADDR and MASTER_PORT.

        Raises:
            CommunicationError: a rank is missing; it is named.
        """
        if launch_info.size == 1:
            return World(launch_info, device, c10d.HashStore(), SingleRankGroup(), timeout_s)
        store, connections = rendezvous(launch_info, env, timeout_s)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
        world = World(launch_info, device, c10d.PrefixStore(f"paragan/{attempt}", store), SingleRankGroup(), timeout_s)
        world._store_sockets = connections
        world.all_gather_str("")  # names a missing rank, which torch would not
        world._other_sockets = open_sockets()
        notice = WaitNotice(launch_info, "a connection to every other rank")

        def check() -> None:
            notice.write_if_due()
            world._raise_if_lost(range(launch_info.size))

        call_with_timeout(
            lambda: c10d.init_process_group(
                backend_of(device).dist_backend,
                store=c10d.PrefixStore(f"group/{attempt}", store),
                rank=launch_info.rank,
                world_size=launch_info.size,
                timeout=timedelta(seconds=timeout_s),
            ),
            timeout_s + FAULT_WINDOW_S,  # torch's own message, which comes first, says more
            f"rank {launch_info.rank} could not connect to all other ranks within {timeout_s:g} s. Set "
            "GLOO_SOCKET_IFNAME to the network interface that the hosts share",
            check,
        )
        world.all_ranks = TorchGroup(c10d.group.WORLD)
        world._peer_sockets = set(filter(is_connected, open_sockets() - world._other_sockets))
        return world

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.launch_info.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.launch_info.size

    @property
    def original_ranks(self) -> tuple[int, ...]:
        """The numbers with which the ranks of this world were started, in rank order."""
        return tuple(range(self.size))

    @property
    def membership_epoch(self) -> int:
        """How often its set of ranks has changed."""
        return 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints for all."""
        return self.launch_info.rank == 0

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        """Form a group of some ranks. Every rank of the world calls this, in the same order.

        Returns:
            The group, or None if this rank is not one of `ranks`.
        """
        if self.size == 1 or len(ranks) == 1:
            return SingleRankGroup() if self.rank in ranks else None
        process_group = c10d.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return TorchGroup(process_group) if self.rank in ranks else None

    def pair_group(self, other: int) -> Group:
        """Form a gloo group of this rank and another one, which blocks no third rank.

        Both call this. A rank that forms several pairs does so in ascending order of the other rank.
        """
        pair = sorted((self.rank, other))
        number = self._pair_group_count[other] = self._pair_group_count.get(other, 0) + 1
        return self._new_gloo_group(f"pair/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [other])

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        """Return a thread that waits for the messages of a group, and is cancelled when the group is aborted."""
        return WaitThread(self.timeout_s, group)

    def _new_gloo_group(self, name: str, rank: int, size: int, others: Sequence[int]) -> Group:
        return new_gloo_group(self.store, name, rank, size, self.timeout_s)

    def all_gather_str(self, text: str, timeout_s: float | None = None) -> list[str]:
        """Gather a string of every rank, in rank order. Costs round trips to the store: not for use in a step.

        Raises:
            CommunicationError: a rank did not call this within `timeout_s` (by default the world's); it is named.
        """
        self._gather_count += 1
        name = f"gather/{self._gather_count}"
        timeout_s = timeout_s or self.timeout_s
        return as_comm_error(lambda: self._gather_strings(name, text, timeout_s, self._peer_sockets))

    def _gather_strings(
        self, name: str, text: str, timeout_s: float, peer_sockets: Collection[SocketId] = ()
    ) -> list[str]:
        """peer_sockets: connections that stay open until all ranks have written, unless a rank is lost."""
        self.store.set(f"{name}/{self.rank}", text)
        missing = list(range(self.size))
        texts = dict[int, str]()
        is_broken = False
        deadline = time.monotonic() + timeout_s
        notice = WaitNotice(self.launch_info)
        while True:
            for rank in [r for r in missing if self.store.check([f"{name}/{r}"])]:
                texts[rank] = self.store.get(f"{name}/{rank}").decode()
                missing.remove(rank)
            if not missing:
                return [texts[rank] for rank in range(self.size)]
            self.raise_if_broken()
            self._raise_if_lost(missing)
            notice.awaited = f"rank {', '.join(map(str, missing))}"
            notice.write_if_due()
            problem = f"{notice.awaited} did not arrive"
            if is_broken:
                raise CommunicationError(f"{problem}, and the connection to a rank broke")
            if time.monotonic() > deadline:
                counted = f" ({self.launch_info.variables})" if self.launch_info.variables else ""
                raise CommunicationError(f"{problem} within {timeout_s:g} s{counted}")
            time.sleep(POLL_S)
            # A rank that has all texts may leave and close its connections, so the store is read once more after this.
            is_broken = any(map(is_closed, peer_sockets))

    def _raise_if_lost(self, ranks: Iterable[int]) -> None:
        """Raise CommunicationError if the launcher says that one of these ranks is gone."""
        originals = self.original_ranks
        message = lost_rank_message(originals[rank] if rank < len(originals) else rank for rank in ranks)
        if message:
            raise CommunicationError(message)

    def raise_if_broken(self) -> None:
        """Raise CommunicationError if it is useless to wait for the others any longer."""

    def report_failure(self, error: BaseException, step: int | None = None) -> str:
        """Tell the other ranks why this one stops, and find out which of them failed first.

        Returns:
            One line with the rank that failed first, the step if it is known, and the reason.
        """
        if self.size == 1:
            return str(error) if step is None else f"step {step}: {error}"
        local_message = f"rank {self.rank}: {error}" if step is None else f"rank {self.rank}, step {step}: {error}"
        step_suffix = "" if step is None else f" at step {step}"
        try:
            set_recv_timeout(self._store_sockets, FAULT_WINDOW_S)
            if isinstance(error, CommunicationError):
                self.store.set(f"fault/{self.rank}", LOST + local_message)
                self._shutdown_peer_sockets()  # ranks without a connection to the lost one notice it by this
                message = self._find_first_fault(local_message, step_suffix)
            else:
                self.store.set(f"fault/{self.rank}", local_message)
                message = local_message
            self.store.set(f"fault_read/{self.rank}", "")
            return message
        except RuntimeError:
            return f"rank 0 was lost{step_suffix} (it held the store); rank {self.rank} saw: {error}"

    def _find_first_fault(self, local_message: str, step_suffix: str) -> str:
        """Wait for the others' reports; return the one that names a cause, or which ranks did not report."""
        deadline = time.monotonic() + FAULT_WINDOW_S
        silent = [r for r in range(self.size) if r != self.rank]
        while silent and time.monotonic() < deadline:
            for rank in [r for r in silent if self.store.check([f"fault/{r}"])]:
                fault = self.store.get(f"fault/{rank}").decode()
                if not fault.startswith(LOST):
                    return fault
                silent.remove(rank)
            time.sleep(POLL_S)
        if not silent:
            return local_message
        self._silent_ranks = silent
        ranks = ", ".join(map(str, silent))
        return f"rank {ranks} was lost{step_suffix} (killed, or out of reach); {local_message}"

    def split_off(self, ranks: Sequence[int], env: Mapping[str, str] = os.environ) -> World:
        """Close this world, and return one of this rank and some others that is independent of the rest.

        Every rank calls this.

        Args:
            ranks: those of the new world, this one included.
            env: has MASTER_ADDR.
        """
        if self.size == 1:
            return self
        with socket.socket() as s:
            s.bind(("", 0))
            address = [local_address_towards(master_address(env)), s.getsockname()[1]]
        host, port = json.loads(self.all_gather_str(json.dumps(address))[ranks[0]])
        self.close()
        info = LaunchInfo(ranks.index(self.rank), len(ranks), self.launch_info.local_rank, self.launch_info.local_size)
        return World.join(info, self.device, self.timeout_s, {"MASTER_ADDR": host, "MASTER_PORT": str(port)})

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave: in good order if nothing broke. A CommunicationError that was not reported yet becomes a RunError."""
        if error is None or isinstance(error, UsageError | Interrupted):
            self.close()
        elif isinstance(error, CommunicationError):
            message = self.report_failure(error)
            self.abandon()
            raise RunError(message) from error
        else:
            self.abandon()

    def close(self) -> None:
        """Leave in good order: rank 0, which may hold the store, leaves last."""
        if self.size == 1:
            return
        if self.is_main:
            as_comm_error(lambda: self._gather_strings("bye", "", self.timeout_s))
        else:
            as_comm_error(lambda: self.store.set(f"bye/{self.rank}", ""))
        c10d.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure: close the connections, so that the others notice.

        Rank 0, which may hold the store, then waits until they have read there which rank failed first.
        """
        if isinstance(self.all_ranks, TorchGroup):
            self.all_ranks.process_group.abort()  # no effect with gloo: its connections last as long as the process
            self._shutdown_peer_sockets()
            if self.is_main:
                self._await_fault_readers()

    def interrupt_waits(self, is_store_stuck: bool = False) -> None:
        """End the waits of this rank for others: they raise CommunicationError. Any thread may call this.

        is_store_stuck: whether the store does not answer either.
        """
        if is_store_stuck and not self.is_main:
            shutdown_sockets(self._store_sockets)
        if isinstance(self.all_ranks, TorchGroup):
            self.all_ranks.process_group.abort()  # no effect with gloo
        self._shutdown_peer_sockets()

    def _shutdown_peer_sockets(self) -> None:
        if isinstance(self.all_ranks, TorchGroup):
            shutdown_sockets(open_sockets() - self._other_sockets)

    def _await_fault_readers(self) -> None:
        keys = [f"fault_read/{rank}" for rank in range(self.size) if rank not in self._silent_ranks]
        deadline = time.monotonic() + FAULT_WINDOW_S
        with contextlib.suppress(RuntimeError):  # torchrun's store may have ended already
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)
