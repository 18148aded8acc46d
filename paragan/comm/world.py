"""The ranks of a run: they form groups, gather text, and report failures.

An exchange that fails raises CommunicationError. The ranks then tell each other through the key-value store which of
them failed first and why (`World.report_failure`), so that all end with the same message, which names rank and step.

Rank 0, which usually holds the store, has to leave last, both in good order (`close`) and after a failure (`abandon`).
The sockets of torch's store and groups are found by comparing the open sockets before and after torch opens them;
shutting them down, and no others, is how a failing rank makes the others notice at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from paragan.comm.blocking_calls import call_with_timeout
from paragan.comm.host_staging import staged_on_host
from paragan.comm.launch_info import SECRET_ENV, LaunchInfo, master_address
from paragan.comm.lost_ranks import raise_if_lost
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
    describe_torch_error,
    new_gloo_group,
)
from paragan.comm.rendezvous import WaitNotice, has_agent_store, rendezvous
from paragan.comm.sockets import (
    SocketId,
    block_new_connections,
    is_closed,
    is_connected,
    local_address_towards,
    open_sockets,
    replace_sockets,
    set_recv_timeout,
    shutdown_sockets,
)
from paragan.comm.store_port import StorePort, describe_ends
from paragan.core.devices import backend_of
from paragan.core.errors import Interrupted, RunError, UsageError

FAULT_WINDOW_S = 4.0  # how long ranks wait for the report of the rank that failed first
LOST = "lost "  # prefix of the report of a rank whose exchange failed because of another rank


def _check_store_lasts(env: Mapping[str, str]) -> None:
    """Raise UsageError if the store of a former world of these processes is gone."""
    if not has_agent_store(env):
        raise UsageError(
            "world: a script can form one group of ranks without torchrun, whose store lasts. Use torchrun, or a "
            "script for each ScalingManager"
        )


class World:
    """All ranks of a run, as one of them sees it: its rank, its device, the store and the groups.

    `World.solo()` needs no process group, so every strategy also runs in one process.

    is_elastic   : whether the run continues without a rank that is lost (comm/elastic)
    all_ranks    : the group of all ranks
    initial_size : how many ranks the run was started with
    timeout_s    : of every collective and message
    """

    is_elastic: ClassVar[bool] = False
    _formed_default_group: ClassVar[bool] = False  # whether a world did

    def __init__(self, launch_info: LaunchInfo, device: torch.device, store: Store, all_ranks: Group, timeout_s: float):
        self.launch_info, self.device, self.store, self.all_ranks = launch_info, device, store, all_ranks
        self.timeout_s = timeout_s
        self.initial_size = launch_info.size
        self._gather_count = 0
        self._pair_group_count: dict[int, int] = {}  # how many groups this rank has formed with each other rank
        self._adopted_group: Any = None  # the group of this world, where the default one is not ours
        self._silent_ranks = list[int]()  # ranks that reported no reason for their failure
        self._store_sockets = set[SocketId]()  # connections to the store
        self._store_port: StorePort | None = None  # of the store, if this rank serves it
        self._peer_sockets = set[SocketId]()  # connections to other ranks, of the group of all
        self._group_sockets = set[SocketId]()  # the same, of every group

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> World:
        """Return a world of one rank."""
        return World(LaunchInfo(), torch.device(device), c10d.HashStore(), SingleRankGroup(), 60.0)

    @staticmethod
    def join(
        launch_info: LaunchInfo,
        device: torch.device,
        timeout_s: float,
        env: Mapping[str, str] = os.environ,
        number: int = 0,
    ) -> World:
        """Find the other ranks and form the group of all.

        Args:
            launch_info: this process.
            device: decides the backend (gloo, NCCL).
            timeout_s: of the rendezvous, and of every collective: none hangs.
            env: has MASTER_ADDR and MASTER_PORT.
            number: how many worlds these processes have formed before, whose keys the store may still hold.

        Raises:
            CommunicationError: a rank is missing; it is named.
            UsageError: this process has not left its last world, the store does not outlive a world, or ranks share a
                device.
        """
        if World.can_adopt():
            return World.adopt(launch_info, device, timeout_s)
        if launch_info.size == 1:
            return World(launch_info, device, c10d.HashStore(), SingleRankGroup(), timeout_s)
        if c10d.is_initialized():
            raise UsageError("world: its ranks are in a group already. Call close of the ScalingManager that formed it")
        if number:
            _check_store_lasts(env)
        store, connections, store_port = rendezvous(launch_info, env, timeout_s)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
        attempt = f"{attempt}/{number}" if number else attempt
        world = World(launch_info, device, c10d.PrefixStore(f"paragan/{attempt}", store), SingleRankGroup(), timeout_s)
        world._store_sockets = connections
        world._store_port = store_port
        world._check_devices()  # also names a missing rank, which torch would not
        with world._recording_sockets():
            world._init_process_group(c10d.PrefixStore(f"group/{attempt}", store))
        World._formed_default_group = True
        world.all_ranks = TorchGroup(c10d.group.WORLD, has_lost_peer=world._has_lost_peer)
        world._peer_sockets = world._group_sockets
        if backend_of(device).dist_backend == "gloo":  # NCCL opens connections to the store whenever it forms a group
            client_ends = world.all_gather_str(describe_ends(connections))
            if store_port:
                store_port.close_to_strangers(client_ends)
        return world

    def _init_process_group(self, store: Store) -> None:
        """Connect to all other ranks.

        Raises:
            CommunicationError: a rank cannot be reached.
        """
        info = self.launch_info
        notice = WaitNotice(info, "waits for a connection to every other rank")
        problem = f"rank {info.rank} could not connect to all other ranks"
        advice = "Set GLOO_SOCKET_IFNAME to the network interface that the hosts share"

        def check() -> None:
            notice.write_if_due()
            raise_if_lost(range(info.size))

        try:
            call_with_timeout(
                lambda: c10d.init_process_group(
                    backend_of(self.device).dist_backend,
                    store=store,
                    rank=info.rank,
                    world_size=info.size,
                    timeout=timedelta(seconds=self.timeout_s),
                ),
                self.timeout_s + FAULT_WINDOW_S,  # torch's own message, which comes first, says more
                f"{problem} within {self.timeout_s:g} s. {advice}",
                check,
            )
        except CommunicationError:
            raise
        except (RuntimeError, ValueError) as error:  # of torch's store, of gloo or of NCCL
            reason = describe_torch_error(error)
            raise CommunicationError(f"{problem}: {reason}. {advice}") from error

    @staticmethod
    def can_adopt() -> bool:
        """Return whether a process group exists that no world has formed."""
        return c10d.is_initialized() and not World._formed_default_group

    @staticmethod
    def adopt(launch_info: LaunchInfo, device: torch.device, timeout_s: float) -> World:
        """Return a world of the ranks of a process group that exists (of Ray Train, Lightning, accelerate, a script).

        The world forms a group of its own among them, so that its messages and timeouts are apart from theirs. The
        group that exists stays as it is, also when the world is closed. All its ranks call this.

        Args:
            launch_info: this process; used if it has the rank and the number of ranks of the group.
            device: decides the backend.
            timeout_s: of every collective.

        Raises:
            UsageError: ranks share a device.
        """
        rank, size = c10d.get_rank(), c10d.get_world_size()
        if (launch_info.rank, launch_info.size) != (rank, size):
            launch_info = LaunchInfo(rank, size, rank, size)
        if size == 1:
            return World(launch_info, device, c10d.HashStore(), SingleRankGroup(), timeout_s)
        shared_store = c10d.distributed_c10d._get_default_store()
        number = shared_store.add(f"paragan/adoptions/{rank}", 1)  # of this rank's worlds in this group
        store = c10d.PrefixStore(f"paragan/adopted/{number}", shared_store)
        world = World(launch_info, device, store, SingleRankGroup(), timeout_s)
        world._check_devices()  # also names a missing rank, which torch would not
        with world._recording_sockets():
            own_group = c10d.new_group(backend=backend_of(device).dist_backend, timeout=timedelta(seconds=timeout_s))
        world._adopted_group = own_group
        world.all_ranks = TorchGroup(own_group, has_lost_peer=world._has_lost_peer)
        world._peer_sockets = world._group_sockets
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
        with self._recording_sockets():
            process_group = c10d.new_group(
                list(ranks), timedelta(seconds=self.timeout_s), backend_of(self.device).dist_backend
            )
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
        with self._recording_sockets():
            return staged_on_host(new_gloo_group(self.store, name, rank, size, self.timeout_s), self.device)

    @contextlib.contextmanager
    def _recording_sockets(self) -> Generator[None]:
        """Record the connections that are opened inside the block as connections of groups."""
        before = open_sockets()
        try:
            yield
        finally:
            if backend_of(self.device).dist_backend == "gloo":
                block_new_connections(open_sockets() - before)
            new_sockets = set(filter(is_connected, open_sockets() - before))
            self._group_sockets = self._group_sockets | new_sockets  # not in place: another thread may iterate over it

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
        deadline = time.monotonic() + timeout_s
        notice = WaitNotice(self.launch_info)
        originals = self.original_ranks or range(self.size)  # an elastic world has none before it has formed
        while True:
            # Before the store is read: a rank that has all texts may leave and close its connections.
            reason = self._find_break(peer_sockets)
            for rank in [r for r in missing if self.store.check([f"{name}/{r}"])]:
                texts[rank] = self.store.get(f"{name}/{rank}").decode()
                missing.remove(rank)
            if not missing:
                return [texts[rank] for rank in range(self.size)]
            awaited = f"rank {', '.join(map(str, missing))}"
            raise_if_lost(originals[rank] for rank in missing)
            if reason:
                raise CommunicationError(f"{awaited} did not arrive, and {reason}")
            notice.set_awaited(awaited)
            notice.write_if_due()
            if time.monotonic() > deadline:
                counted = f" ({self.launch_info.variables})" if self.launch_info.variables else ""
                raise CommunicationError(f"{awaited} did not arrive within {timeout_s:g} s{counted}")
            time.sleep(POLL_S)

    def _find_break(self, peer_sockets: Collection[SocketId]) -> str:
        """Return why it is useless to wait for the others any longer; empty if it is not."""
        try:
            self.raise_if_broken()
        except CommunicationError as error:
            return str(error)
        return "the connection to a rank broke" if any(map(is_closed, peer_sockets)) else ""

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
        shutdown_sockets(self._group_sockets | self._store_sockets)  # torch would leave them open
        info = LaunchInfo(ranks.index(self.rank), len(ranks), self.launch_info.local_rank, self.launch_info.local_size)
        secret = {name: value for name, value in env.items() if name == SECRET_ENV}
        return World.join(info, self.device, self.timeout_s, {"MASTER_ADDR": host, "MASTER_PORT": str(port)} | secret)

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

    def _check_devices(self) -> None:
        """Raise UsageError on all ranks if two of them use the same device, which libraries such as NCCL refuse."""
        backend = backend_of(self.device)
        device_id = backend.device_id(self.device)
        ids = self.all_gather_str(f"{socket.gethostname()}/{device_id}" if device_id else "")
        if backend.dist_backend == "gloo":
            return
        for rank, device_id in enumerate(ids):
            first = ids.index(device_id)
            if device_id and first < rank:
                self._leave_store()
                raise UsageError(
                    f"--device.kind={self.device.type}: ranks {first} and {rank} use the same device ({device_id}). "
                    f"Use one rank for each device, or set {backend.visible_with[0]} to another device in each rank"
                )

    def _leave_store(self) -> None:
        """Wait, on rank 0, which may hold the store, until all ranks have come here."""
        if self.is_main:
            as_comm_error(lambda: self._gather_strings("bye", "", self.timeout_s))
        else:
            as_comm_error(lambda: self.store.set(f"bye/{self.rank}", ""))

    def close(self) -> None:
        """Leave in good order: rank 0, which may hold the store, leaves last."""
        if self.size == 1:
            return
        self._leave_store()
        if self._store_port:
            self._store_port.close()
        if c10d.is_initialized():  # a script may have destroyed all groups at its end
            c10d.destroy_process_group(self._adopted_group)  # None: the default one
        if self._adopted_group is None:
            World._formed_default_group = False

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

    def close_inherited_sockets(self) -> None:
        """Close the connections to the other ranks in a forked process. Those of the process itself stay open."""
        replace_sockets(open_sockets() & (self._peer_sockets | self._store_sockets))

    def _has_lost_peer(self) -> bool:
        """Return whether a connection to another rank was closed, though no rank has left in good order."""
        if not any(map(is_closed, self._peer_sockets)):
            return False
        return not any(self.store.check([f"bye/{rank}"]) for rank in range(self.size))

    def _shutdown_peer_sockets(self) -> None:
        if isinstance(self.all_ranks, TorchGroup):
            shutdown_sockets(self._group_sockets)

    def _await_fault_readers(self) -> None:
        keys = [f"fault_read/{rank}" for rank in range(self.size) if rank not in self._silent_ranks]
        deadline = time.monotonic() + FAULT_WINDOW_S
        with contextlib.suppress(RuntimeError):  # torchrun's store may have ended already
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)
