"""The ranks of a run: where each was put, how they meet, agree, and tell each other of failures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch

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

FAULT_WINDOW_S = 4.0  # how long the survivors of a broken exchange listen for the one who knows why


@dataclass(frozen=True)
class LaunchInfo:
    """Where a launcher put this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> LaunchInfo:
        """Reads torchrun's variables, else those srun gives its tasks; a single process without either."""
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        elif "RANK" in env or "WORLD_SIZE" in env:
            both = "RANK and WORLD_SIZE belong together: set both, as torchrun does, or neither"
            raise UsageError(both, same_on_all_ranks=False)
        else:
            return LaunchInfo()
        rank, size = _read_int(env, names[0]), _read_int(env, names[1])
        local_rank = _read_int(env, names[2], 0)
        local_size = _read_int(env, names[3], 1)
        if not 0 <= rank < size:
            raise UsageError(f"{names[0]}={rank} must be less than {names[1]}={size}", same_on_all_ranks=False)
        return LaunchInfo(rank, size, local_rank, max(local_size, local_rank + 1))


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise UsageError(f"{name}={text!r} must be a number, as torchrun and srun set it", same_on_all_ranks=False)
    return int(digits)


def master_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 serves the store of all."""
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise UsageError("MASTER_ADDR is not set: start with torchrun, srun or --ranks N")
    job = _read_int(env, "SLURM_JOB_ID", 0)
    port = _read_int(env, "MASTER_PORT", 29500 + job % 10000)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} must be between 1 and 65535", same_on_all_ranks=False)
    return address, port


def rendezvous(launch_info: LaunchInfo, env: Mapping[str, str], timeout_s: float) -> tuple[Store, set[SocketId]]:
    """The key-value store all ranks share, and the connections on which it is asked. Waits at most `timeout_s` for rank
    0 to serve it, and as long for answers: torch's own would wait for one who is frozen for ever."""
    address, port = master_address(env)
    served = launch_info.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not served:
            _await_server(address, port, timeout_s)
        before, timeout = open_sockets(), timedelta(seconds=timeout_s)
        store = c10d.TCPStore(address, port, launch_info.size, served, timeout, wait_for_workers=False)
        asked = set(
            filter(is_connected, open_sockets() - before)
        )  # and not a pipe that somebody else has opened meanwhile
        set_recv_timeout(asked, timeout_s)
        return store, asked
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError and its kin
        reason = str(error).splitlines()[0]
        what = f"rank 0 cannot serve {address}:{port}" if served else f"rank 0 is not at {address}:{port}"
        raise CommunicationError(f"{what} (MASTER_ADDR:MASTER_PORT), says rank {launch_info.rank}: {reason}") from error


def _await_server(address: str, port: int, timeout_s: float) -> None:
    """Return when somebody listens there: torch's own attempts print a stack trace each."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), POLL_S)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of hosts: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


class World:
    """All ranks, this one's place among them, its device and its store; deals out groups.

    `World.solo()` needs no process group, so every strategy also runs in one process.

    elastic : whether it can go on without a rank that was lost (comm/elastic.py)
    began   : how many ranks it was started with
    """

    is_elastic: ClassVar[bool] = False

    def __init__(self, launch_info: LaunchInfo, device: torch.device, store: Store, all_ranks: Group, timeout_s: float):
        self.launch_info, self.device, self.store, self.all_ranks = launch_info, device, store, all_ranks
        self.timeout_s, self.initial_size = timeout_s, launch_info.size
        self._gather_count = 0
        self._pair_group_count: dict[int, int] = {}  # how often this rank asked for a link to another
        self._silent_ranks = list[int]()  # ranks that did not say why they left
        self._store_sockets = set[SocketId]()  # sockets on which the store is asked,
        self._other_sockets = set[SocketId]()  # all that are no link between ranks,
        self._peer_sockets = set[SocketId]()  # and those that are, of the group of all

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> World:
        return World(LaunchInfo(), torch.device(device), c10d.HashStore(), SingleRankGroup(), 60.0)

    @staticmethod
    def join(
        launch_info: LaunchInfo, device: torch.device, timeout_s: float, env: Mapping[str, str] = os.environ
    ) -> World:
        """Meet the other ranks. Every collective of this world fails after `timeout_s`, none hangs."""
        if launch_info.size == 1:
            return World(launch_info, device, c10d.HashStore(), SingleRankGroup(), timeout_s)
        store, asked = rendezvous(launch_info, env, timeout_s)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
        world = World(launch_info, device, c10d.PrefixStore(f"paragan/{attempt}", store), SingleRankGroup(), timeout_s)
        world._store_sockets = asked
        world.all_gather_str("")  # all are there; a missing rank is named
        world._other_sockets = open_sockets()
        c10d.init_process_group(
            backend_of(device).dist_backend,
            store=c10d.PrefixStore(f"group/{attempt}", store),
            rank=launch_info.rank,
            world_size=launch_info.size,
            timeout=timedelta(seconds=timeout_s),
        )
        process_group = c10d.group.WORLD
        world.all_ranks = TorchGroup(process_group)
        world._peer_sockets = set(filter(is_connected, open_sockets() - world._other_sockets))
        return world

    @property
    def rank(self) -> int:
        return self.launch_info.rank

    @property
    def size(self) -> int:
        return self.launch_info.size

    @property
    def original_ranks(self) -> tuple[int, ...]:
        """The numbers that the ranks of this world were started with, in rank order."""
        return tuple(range(self.size))

    @property
    def membership_epoch(self) -> int:
        """How often the ranks that belong to it have changed."""
        return 0

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.launch_info.rank == 0

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks, or None where this rank is not among them. Every rank calls this, in the
        same order."""
        if self.size == 1 or len(ranks) == 1:
            return SingleRankGroup() if self.rank in ranks else None
        process_group = c10d.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return TorchGroup(process_group) if self.rank in ranks else None

    def pair_group(self, other: int) -> Group:
        """A group of this rank and another one, on gloo, by which nobody else is held up. Both call this; a rank
        calls it for its pairs in rising order."""
        pair = sorted((self.rank, other))
        number = self._pair_group_count[other] = self._pair_group_count.get(other, 0) + 1
        return self._new_gloo_group(f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [other])

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        """Who waits for a link, and is told when it is given up."""
        return WaitThread(self.timeout_s, group)

    def _new_gloo_group(self, name: str, rank: int, size: int, others: Sequence[int]) -> Group:
        return new_gloo_group(self.store, name, rank, size, self.timeout_s)

    def all_gather_str(self, text: str, timeout_s: float | None = None) -> list[str]:
        """Everyone's word, in rank order, once all have spoken. Costs store round trips: not for steps."""
        self._gather_count += 1
        name, timeout_s = f"agree/{self._gather_count}", timeout_s or self.timeout_s
        return as_comm_error(lambda: self._gather_strings(name, text, timeout_s, self._peer_sockets))

    def _gather_strings(
        self, name: str, text: str, timeout_s: float, peer_sockets: Collection[SocketId] = ()
    ) -> list[str]:
        """lines: of which none breaks before all have spoken, unless a rank is lost."""
        self.store.set(f"{name}/{self.rank}", text)
        missing, words, broken = list(range(self.size)), dict[int, str](), False
        deadline = time.monotonic() + timeout_s
        while True:
            for rank in [r for r in missing if self.store.check([f"{name}/{r}"])]:
                words[rank] = self.store.get(f"{name}/{rank}").decode()
                missing.remove(rank)
            if not missing:
                return [words[rank] for rank in range(self.size)]
            self.raise_if_broken()
            waited = f"rank {', '.join(map(str, missing))} did not arrive"
            if broken:
                raise CommunicationError(f"{waited}, and a link to a rank broke")
            if time.monotonic() > deadline:
                raise CommunicationError(f"{waited} within {timeout_s:g} s")
            time.sleep(POLL_S)
            broken = any(
                map(is_closed, peer_sockets)
            )  # whoever has all words may leave: what is missing then is missing

    def raise_if_broken(self) -> None:
        """Lost, where waiting for others makes no sense any more."""

    def report_failure(self, error: BaseException, step: int | None = None) -> str:
        """Tell the others why this rank gives up, and learn who began: one line with rank, and step if there is one."""
        if self.size == 1:
            return str(error) if step is None else f"step {step}: {error}"
        own, lost = (
            f"rank {self.rank}{'' if step is None else f', step {step}'}: {error}",
            isinstance(error, CommunicationError),
        )
        at = "" if step is None else f" at step {step}"
        try:
            set_recv_timeout(self._store_sockets, FAULT_WINDOW_S)
            self.store.set(f"fault/{self.rank}", ("lost " if lost else "") + own)
            if lost:
                self._shutdown_peer_sockets()  # who is not linked to the one that was lost learns of it from us
            told = self._find_first_fault(own, at) if lost else own
            self.store.set(f"told/{self.rank}", "")
            return told
        except RuntimeError:
            return f"rank 0 was lost{at} (it held the store); rank {self.rank} saw: {error}"

    def _find_first_fault(self, own_message: str, step_suffix: str) -> str:
        deadline = time.monotonic() + FAULT_WINDOW_S
        silent = [r for r in range(self.size) if r != self.rank]
        while silent and time.monotonic() < deadline:
            for rank in [r for r in silent if self.store.check([f"fault/{r}"])]:
                fault = self.store.get(f"fault/{rank}").decode()
                if not fault.startswith("lost "):
                    return fault
                silent.remove(rank)
            time.sleep(POLL_S)
        if not silent:
            return own_message
        self._silent_ranks = silent
        ranks = ", ".join(map(str, silent))
        return f"rank {ranks} was lost{step_suffix} (killed, or out of reach); {own_message}"

    def split_off(self, ranks: Sequence[int], env: Mapping[str, str] = os.environ) -> World:
        """A world of this rank and some others, which needs nobody else any more. Every rank calls this, with the ranks
        that it leaves with; this world is closed."""
        if self.size == 1:
            return self
        with socket.socket() as s:
            s.bind(("", 0))
            here = [local_address_towards(master_address(env)), s.getsockname()[1]]
        host, port = json.loads(self.all_gather_str(json.dumps(here))[ranks[0]])
        self.close()
        place = LaunchInfo(ranks.index(self.rank), len(ranks), self.launch_info.local_rank, self.launch_info.local_size)
        return World.join(place, self.device, self.timeout_s, {"MASTER_ADDR": host, "MASTER_PORT": str(port)})

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave as it has ended: in good order where nothing broke. Failed says who was lost, where nobody did yet."""
        if error is None or isinstance(error, UsageError | Interrupted):
            self.close()
            return
        told = self.report_failure(error) if isinstance(error, CommunicationError) else ""
        self.abandon()
        if told:
            raise RunError(told) from error

    def close(self) -> None:
        """Leave in good order: rank 0, which may hold the store, goes last."""
        if self.size == 1:
            return
        if self.is_main:
            as_comm_error(lambda: self._gather_strings("bye", "", self.timeout_s))
        else:
            as_comm_error(lambda: self.store.set(f"bye/{self.rank}", ""))
        c10d.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure: hang up, so that the others notice. Rank 0, which may hold the store, then
        lets them read there who began."""
        if isinstance(self.all_ranks, TorchGroup):
            self.all_ranks.process_group.abort()  # means nothing to gloo, whose links live until the process ends
            self._shutdown_peer_sockets()
            if self.is_main:
                self._await_fault_readers()

    def _shutdown_peer_sockets(self) -> None:
        if isinstance(self.all_ranks, TorchGroup):
            shutdown_sockets(open_sockets() - self._other_sockets)

    def _await_fault_readers(self) -> None:
        told = [f"told/{rank}" for rank in range(self.size) if rank not in self._silent_ranks]
        deadline = time.monotonic() + FAULT_WINDOW_S
        with contextlib.suppress(RuntimeError):  # the store may be torchrun's, and gone
            while not self.store.check(told) and time.monotonic() < deadline:
                time.sleep(POLL_S)
