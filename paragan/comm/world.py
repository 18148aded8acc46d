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

from paragan.comm.process_group import POLL_S, Group, Lost, Ranks, Solo, Store, Waiter, c10d, meet, or_lost
from paragan.comm.sockets import Link, answer_within, connects, hang_up, hung_up, open_sockets, towards
from paragan.core.devices import kind_of
from paragan.core.errors import Failed, Interrupted, Unusable

FAULT_WINDOW_S = 4.0  # how long the survivors of a broken exchange listen for the one who knows why


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Place:
        """Reads torchrun's variables, else those srun gives its tasks; a single process without either."""
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        elif "RANK" in env or "WORLD_SIZE" in env:
            both = "RANK and WORLD_SIZE belong together: set both, as torchrun does, or neither"
            raise Unusable(both, everywhere=False)
        else:
            return Place()
        rank, size = _number(env, names[0]), _number(env, names[1])
        local_rank = _number(env, names[2], 0)
        local_size = _number(env, names[3], 1)
        if not 0 <= rank < size:
            raise Unusable(f"{names[0]}={rank} must be less than {names[1]}={size}", everywhere=False)
        return Place(rank, size, local_rank, max(local_size, local_rank + 1))


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    digits = text.split("(")[0].split(",")[0]  # SLURM writes 4(x2): 4 tasks on each of 2 nodes
    if not digits.isdigit():
        raise Unusable(f"{name}={text!r} must be a number, as torchrun and srun set it", everywhere=False)
    return int(digits)


def meeting_point(env: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 serves the store of all."""
    address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise Unusable("MASTER_ADDR is not set: start with torchrun, srun or --ranks N")
    job = _number(env, "SLURM_JOB_ID", 0)
    port = _number(env, "MASTER_PORT", 29500 + job % 10000)
    if not 0 < port < 65536:
        raise Unusable(f"MASTER_PORT={port} must be between 1 and 65535", everywhere=False)
    return address, port


def rendezvous(place: Place, env: Mapping[str, str], timeout_s: float) -> tuple[Store, set[Link]]:
    """The key-value store all ranks share, and the connections on which it is asked. Waits at most `timeout_s` for rank
    0 to serve it, and as long for answers: torch's own would wait for one who is frozen for ever."""
    address, port = meeting_point(env)
    served = place.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not served:
            _await_server(address, port, timeout_s)
        before, timeout = open_sockets(), timedelta(seconds=timeout_s)
        store = c10d.TCPStore(address, port, place.size, served, timeout, wait_for_workers=False)
        asked = set(filter(connects, open_sockets() - before))  # and not a pipe that somebody else has opened meanwhile
        answer_within(asked, timeout_s)
        return store, asked
    except (RuntimeError, ValueError, OSError) as error:  # DistNetworkError and its kin
        reason = str(error).splitlines()[0]
        what = f"rank 0 cannot serve {address}:{port}" if served else f"rank 0 is not at {address}:{port}"
        raise Lost(f"{what} (MASTER_ADDR:MASTER_PORT), says rank {place.rank}: {reason}") from error


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

    elastic: ClassVar[bool] = False

    def __init__(self, place: Place, device: torch.device, store: Store, everyone: Group, timeout_s: float):
        self.place, self.device, self.store, self.everyone = place, device, store, everyone
        self.timeout_s, self.began = timeout_s, place.size
        self._agreed = 0
        self._linked: dict[int, int] = {}  # how often this rank asked for a link to another
        self._silent = list[int]()  # ranks that did not say why they left
        self._asked = set[Link]()  # sockets on which the store is asked,
        self._not_ours = set[Link]()  # all that are no link between ranks,
        self._lines = set[Link]()  # and those that are, of the group of all

    @staticmethod
    def solo(device: torch.device | str = "cpu") -> World:
        return World(Place(), torch.device(device), c10d.HashStore(), Solo(), 60.0)

    @staticmethod
    def join(place: Place, device: torch.device, timeout_s: float, env: Mapping[str, str] = os.environ) -> World:
        """Meet the other ranks. Every collective of this world fails after `timeout_s`, none hangs."""
        if place.size == 1:
            return World(place, device, c10d.HashStore(), Solo(), timeout_s)
        store, asked = rendezvous(place, env, timeout_s)
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives its restarts
        world = World(place, device, c10d.PrefixStore(f"paragan/{attempt}", store), Solo(), timeout_s)
        world._asked = asked
        world.agree("")  # all are there; a missing rank is named
        world._not_ours = open_sockets()
        c10d.init_process_group(
            kind_of(device).backend,
            store=c10d.PrefixStore(f"group/{attempt}", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
        process_group = c10d.group.WORLD
        world.everyone = Ranks(process_group)
        world._lines = set(filter(connects, open_sockets() - world._not_ours))
        return world

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def seats(self) -> tuple[int, ...]:
        """The numbers that the ranks of this world were started with, in rank order."""
        return tuple(range(self.size))

    @property
    def epoch(self) -> int:
        """How often the ranks that belong to it have changed."""
        return 0

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.place.rank == 0

    def group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks, or None where this rank is not among them. Every rank calls this, in the
        same order."""
        if self.size == 1 or len(ranks) == 1:
            return Solo() if self.rank in ranks else None
        process_group = c10d.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return Ranks(process_group) if self.rank in ranks else None

    def link(self, other: int) -> Group:
        """A group of this rank and another one, on gloo, by which nobody else is held up. Both call this; a rank
        calls it for its pairs in rising order."""
        pair = sorted((self.rank, other))
        number = self._linked[other] = self._linked.get(other, 0) + 1
        return self._meet(f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [other])

    def waiter(self, group: Group | None = None) -> Waiter:
        """Who waits for a link, and is told when it is given up."""
        return Waiter(self.timeout_s, group)

    def _meet(self, name: str, rank: int, size: int, others: Sequence[int]) -> Group:
        return meet(self.store, name, rank, size, self.timeout_s)

    def agree(self, word: str, timeout_s: float | None = None) -> list[str]:
        """Everyone's word, in rank order, once all have spoken. Costs store round trips: not for steps."""
        self._agreed += 1
        name, timeout_s = f"agree/{self._agreed}", timeout_s or self.timeout_s
        return or_lost(lambda: self._words(name, word, timeout_s, self._lines))

    def _words(self, name: str, word: str, timeout_s: float, lines: Collection[Link] = ()) -> list[str]:
        """lines: of which none breaks before all have spoken, unless a rank is lost."""
        self.store.set(f"{name}/{self.rank}", word)
        missing, words, broken = list(range(self.size)), dict[int, str](), False
        deadline = time.monotonic() + timeout_s
        while True:
            for rank in [r for r in missing if self.store.check([f"{name}/{r}"])]:
                words[rank] = self.store.get(f"{name}/{rank}").decode()
                missing.remove(rank)
            if not missing:
                return [words[rank] for rank in range(self.size)]
            self.look()
            waited = f"rank {', '.join(map(str, missing))} did not arrive"
            if broken:
                raise Lost(f"{waited}, and a link to a rank broke")
            if time.monotonic() > deadline:
                raise Lost(f"{waited} within {timeout_s:g} s")
            time.sleep(POLL_S)
            broken = any(map(hung_up, lines))  # whoever has all words may leave: what is missing then is missing

    def look(self) -> None:
        """Lost, where waiting for others makes no sense any more."""

    def explain(self, error: BaseException, step: int | None = None) -> str:
        """Tell the others why this rank gives up, and learn who began: one line with rank, and step if there is one."""
        if self.size == 1:
            return str(error) if step is None else f"step {step}: {error}"
        own, lost = f"rank {self.rank}{'' if step is None else f', step {step}'}: {error}", isinstance(error, Lost)
        at = "" if step is None else f" at step {step}"
        try:
            answer_within(self._asked, FAULT_WINDOW_S)
            self.store.set(f"fault/{self.rank}", ("lost " if lost else "") + own)
            if lost:
                self._cut_links()  # who is not linked to the one that was lost learns of it from us
            told = self._first_fault(own, at) if lost else own
            self.store.set(f"told/{self.rank}", "")
            return told
        except RuntimeError:
            return f"rank 0 was lost{at} (it held the store); rank {self.rank} saw: {error}"

    def _first_fault(self, own: str, at: str) -> str:
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
            return own
        self._silent = silent
        ranks = ", ".join(map(str, silent))
        return f"rank {ranks} was lost{at} (killed, or out of reach); {own}"

    def leave_with(self, ranks: Sequence[int], env: Mapping[str, str] = os.environ) -> World:
        """A world of this rank and some others, which needs nobody else any more. Every rank calls this, with the ranks
        that it leaves with; this world is closed."""
        if self.size == 1:
            return self
        with socket.socket() as s:
            s.bind(("", 0))
            here = [towards(meeting_point(env)), s.getsockname()[1]]
        host, port = json.loads(self.agree(json.dumps(here))[ranks[0]])
        self.close()
        place = Place(ranks.index(self.rank), len(ranks), self.place.local_rank, self.place.local_size)
        return World.join(place, self.device, self.timeout_s, {"MASTER_ADDR": host, "MASTER_PORT": str(port)})

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave as it has ended: in good order where nothing broke. Failed says who was lost, where nobody did yet."""
        if error is None or isinstance(error, Unusable | Interrupted):
            self.close()
            return
        told = self.explain(error) if isinstance(error, Lost) else ""
        self.abandon()
        if told:
            raise Failed(told) from error

    def close(self) -> None:
        """Leave in good order: rank 0, which may hold the store, goes last."""
        if self.size == 1:
            return
        if self.first:
            or_lost(lambda: self._words("bye", "", self.timeout_s))
        else:
            or_lost(lambda: self.store.set(f"bye/{self.rank}", ""))
        c10d.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure: hang up, so that the others notice. Rank 0, which may hold the store, then
        lets them read there who began."""
        if isinstance(self.everyone, Ranks):
            self.everyone.process_group.abort()  # means nothing to gloo, whose links live until the process ends
            self._cut_links()
            if self.first:
                self._await_told()

    def _cut_links(self) -> None:
        if isinstance(self.everyone, Ranks):
            hang_up(open_sockets() - self._not_ours)

    def _await_told(self) -> None:
        told = [f"told/{rank}" for rank in range(self.size) if rank not in self._silent]
        deadline = time.monotonic() + FAULT_WINDOW_S
        with contextlib.suppress(RuntimeError):  # the store may be torchrun's, and gone
            while not self.store.check(told) and time.monotonic() < deadline:
                time.sleep(POLL_S)
