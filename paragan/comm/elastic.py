"""A world that goes on without those it lost, and takes them back.

No rank is special. Every rank has a board where others read and leave words, so whoever is left can lead; a thread for
each other rank asks again and again whether it is there. A rank whose port refuses us is *gone*; one that does not
answer for `link_timeout_s` is *silent*, which may be its fault or the network's.

Once somebody is lost every rank hangs up (so that all notice), reports to the lowest rank that is well, and is told the
next `Formation`: who belongs to it, and from which step on. Those who are there must be more than half of those who are
not known to be gone. Who was left out - frozen, cut off, or killed and started again - knocks at a member, and
is admitted by all at a step they agree on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from ..errors import Failed
from .keys import Address, Board, Named, Remote
from .world import POLL_S, Group, Lost, Place, Solo, World, hang_up, meet, open_sockets, rendezvous

PULSE_S = 0.25  # how often others are asked whether they are there
FIRST_S = 20.0  # how long the first answer may take: programs start slowly
LISTEN_S = 2.0  # how long one who may be there has to take a call


class Alone(Failed):
    """Too few are left to go on: what is there is to be saved."""


class LeftOut(Exception):
    """The others went on without this rank."""


@dataclass(frozen=True)
class Formation:
    """Who belongs to the world from a step on. Ranks are called by the numbers they were started with.

    host, place : on whose board they meet, and under which name there, another for every attempt
    empty       : those who have no parameters yet
    ending      : why it is for a last checkpoint only, or nothing
    private     : whether others, out of reach, may be going on with this run
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    host: int
    place: str
    addresses: dict[int, Address]
    empty: tuple[int, ...] = ()
    ending: str = ""
    private: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Formation:
        data = json.loads(text)
        data["addresses"] = {int(r): (host, port) for r, (host, port) in data["addresses"].items()}
        return Formation(**data | {"members": tuple(data["members"]), "empty": tuple(data["empty"])})


class Watch:
    """Asks one other rank, again and again, whether it is there and whether it went on without us."""

    def __init__(self, address: Address, epoch: Callable[[], int], timeout_s: float):
        self.address, self.epoch, self.timeout_s = address, epoch, timeout_s
        self.quiet_s = 0.0  # time of ours without an answer: time for which we are frozen ourselves does not count
        self.met = self.gone = self.over = False
        self._passed = -1
        threading.Thread(target=self._ask, daemon=True, name=f"watch {address}").start()

    @property
    def moved_on(self) -> bool:
        """Whether it is in a formation after ours."""
        return self._passed == self.epoch()

    def _ask(self) -> None:
        while not self.over and not self.gone:
            try:
                with Remote(self.address, self.timeout_s) as board:
                    while not self.over:
                        epoch = self.epoch()
                        if board.check([f"past/{epoch}"]):
                            self._passed = epoch
                        self.met, self.quiet_s = True, 0.0
                        time.sleep(PULSE_S)
            except Lost as error:
                self.gone = isinstance(error.__cause__, ConnectionRefusedError)
                time.sleep(PULSE_S)


class Elastic(World):
    """A world on gloo whose ranks may be lost and come back; `place` and `everyone` change with every formation.

    identity : the number this rank was started with, of `began`;  late : whether it joined a run that was under way
    """

    elastic: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device, address: str, timeout_s: float, link_timeout_s: float):
        self._board = Board(address)
        super().__init__(place, device, self._board, Solo(), timeout_s)
        self.identity, self.late = place.rank, False
        self.link_timeout_s = link_timeout_s
        self.formation = Formation(-1, (), 0, self.identity, "", {})
        self.addresses: dict[int, Address] = {self.identity: self._board.address}  # of all who ever were there
        self._watches: dict[int, Watch] = {}
        self._links: set[int] = set()  # the sockets of the group
        self._nonces, self._attempts = itertools.count(1), itertools.count(1)
        self._answered: dict[int, int] = {}
        self._hosting = False  # whether the group meets, or met, at our board
        self._standing = False  # whether the group is to be left once somebody is lost
        self._seed: Any = None
        threading.Thread(target=self._look_after, daemon=True, name="elastic").start()

    @staticmethod
    def begin(
        place: Place, device: torch.device, timeout_s: float, link_timeout_s: float, env: Mapping[str, str] = os.environ
    ) -> Elastic:
        """All ranks together, at MASTER_ADDR: the only time it is needed."""
        seed = rendezvous(place, env, timeout_s)
        world = Elastic(place, device, _own_address(env), timeout_s, link_timeout_s)
        world._seed = seed  # others may still be reading there
        world.store = Named(seed, "paragan/" + env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        there = dict(enumerate(json.loads(word) for word in world.agree(json.dumps(world._board.address))))
        addresses = {rank: (host, port) for rank, (host, port) in there.items()}
        world._form(Formation(0, tuple(addresses), 0, 0, "begin", addresses))
        return world

    @staticmethod
    def enter(
        place: Place,
        device: torch.device,
        timeout_s: float,
        link_timeout_s: float,
        members: Mapping[int, Address],
    ) -> Elastic | None:
        """Join a run that is under way, or None where none of its members is there."""
        there = {rank: at for rank, at in members.items() if rank != place.rank and _listens(at)}
        if not there:
            return None
        world = Elastic(place, device, _towards(next(iter(there.values()))), timeout_s, link_timeout_s)
        world.late = True
        world._get_to_know(there)
        world.knock()
        return world

    # who is there -------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        return self.formation.members

    @property
    def seats(self) -> tuple[int, ...]:
        return self.formation.members

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.began) if r not in self.members)

    def well(self, rank: int) -> bool:
        if rank == self.identity:
            return True
        watch = self._watches.get(rank)
        if watch is None or watch.gone:
            return False
        return watch.quiet_s < (self.link_timeout_s if watch.met else max(self.link_timeout_s, FIRST_S))

    def _get_to_know(self, addresses: Mapping[int, Address]) -> None:
        self.addresses.update(addresses)
        for rank, address in addresses.items():
            former = self._watches.get(rank)
            if rank != self.identity and (former is None or former.address != address or former.gone):
                if former:
                    former.over = True
                self._watches[rank] = Watch(address, lambda: self.formation.epoch, self.link_timeout_s)

    def _look_after(self) -> None:
        """Hang up once a member is lost, so that no exchange waits for it."""
        while True:
            time.sleep(PULSE_S)
            for watch in self._watches.values():
                watch.quiet_s += PULSE_S
            if self._standing and not all(self.well(r) for r in self.members):
                self._hang_up()

    def _is_of_a_board(self, descriptor: int) -> bool:
        boards = {address[1] for address in self.addresses.values()}
        try:
            with socket.socket(fileno=os.dup(descriptor)) as link:
                return link.getsockname()[1] in boards or link.getpeername()[1] in boards
        except OSError:
            return False

    def _hang_up(self) -> None:
        self._standing = False
        hang_up(self._links)

    # going on without some ----------------------------------------------------------------------------------------

    def again(self, step: int) -> Formation:
        """Leave the group that broke, and form one of those who are left; step: the round this rank is at.

        A rank that was left out knocks, and comes back empty. Alone where too few are left: then the
        group is that of those few, for a last checkpoint.
        """
        self._give_up()
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                leader = min(r for r in self.members if self.well(r))
                formation = self._lead(step) if leader == self.identity else self._follow(leader, step)
                self._form(formation)
                break
            except Lost:
                self._give_up()
                if time.monotonic() > deadline:
                    raise
            except LeftOut:
                return self.knock()
        if formation.ending:
            raise Alone(formation.ending)
        return formation

    def _give_up(self) -> None:
        """Leave the group, or what was to become one; whoever still waits for it is told."""
        self._hang_up()
        if self._hosting:
            self.store.set("over", "")

    def _look(self) -> None:
        ill = [r for r in self.members if not self.well(r)]
        if self._standing and ill:
            raise Lost(f"rank {', '.join(map(str, ill))} does not answer")
        if self._reports() if self._hosting else self.store.check(["over"]):
            raise Lost("somebody gave this group up")

    def _lead(self, step: int) -> Formation:
        """Wait until all who are well have reported, and tell them who belongs to us."""
        steps, nonces, epoch = {self.identity: step}, dict[int, int](), self.formation.epoch
        deadline = time.monotonic() + self.timeout_s
        while True:
            for rank, (nonce, at, past) in self._reports().items():
                steps[rank], nonces[rank], epoch = at, nonce, max(epoch, past)
            waited = [r for r in self.members if r not in steps and self.well(r) and not self._knocks([r])]
            if not waited:
                break
            if any(self._watches[r].moved_on for r in waited):
                raise LeftOut
            if time.monotonic() > deadline:
                raise Lost(f"rank {', '.join(map(str, waited))} did not report within {self.timeout_s:g} s")
            time.sleep(POLL_S / 4)
        formation = self._next(epoch + 1, steps)
        for rank, nonce in nonces.items():
            self._answered[rank] = nonce
            self._board.set(f"answer/{rank}/{nonce}", formation.to_json())
        return formation

    def _reports(self) -> dict[int, tuple[int, int, int]]:
        """Who reported here and was not answered yet: (nonce, step, epoch)."""
        found = dict[int, tuple[int, int, int]]()
        for rank in self.members:
            if rank != self.identity and self._board.check([f"report/{rank}"]):
                nonce, step, epoch = json.loads(self._board.get(f"report/{rank}"))
                if nonce > self._answered.get(rank, 0) and epoch >= self.formation.epoch - 1:
                    found[rank] = nonce, step, epoch
        return found

    def _next(self, epoch: int, steps: Mapping[int, int]) -> Formation:
        here = tuple(sorted(steps))
        lost = [r for r in self.members if r not in here]
        gone = [r for r in lost if self._watches[r].gone]
        empty = tuple(r for r, step in steps.items() if step < 0)
        missing, ending = ", ".join(map(str, lost)), ""
        if len(here) == len(empty):
            ending = "no rank that has parameters is left"
        elif len(here) == 1:
            ending = f"rank {missing} {'is' if len(lost) == 1 else 'are'} gone: every other rank"
        elif 2 * len(here) <= len(self.members) - len(gone):
            ending = f"rank {missing} cannot be reached, and rank {', '.join(map(str, here))} are no majority"
        addresses = {r: self.addresses[r] for r in here}
        place, step, private = f"again {next(self._attempts)}", max(steps.values()), len(gone) < len(lost)
        return Formation(epoch, here, step, self.identity, place, addresses, empty, ending, private)

    def _follow(self, leader: int, step: int) -> Formation:
        """Report to the leader, and be told."""
        nonce, watch = next(self._nonces), self._watches[leader]
        answer, patience_s = f"answer/{self.identity}/{nonce}", 4 * PULSE_S
        with Remote(self.addresses[leader], self.link_timeout_s) as board:
            board.set(f"report/{self.identity}", json.dumps([nonce, step, self.formation.epoch]))
            while not board.check([answer]):
                if not self.well(leader):
                    raise Lost(f"rank {leader} does not answer")
                if watch.moved_on:  # its answer to us, if there was one, is older than that
                    patience_s -= POLL_S
                    if patience_s < 0:
                        raise LeftOut
                time.sleep(POLL_S)
            return Formation.from_json(board.get(answer).decode())

    def _form(self, formation: Formation) -> None:
        """Meet the others of a formation, and be of it."""
        self.store, self.everyone = self._board, Solo()
        self._get_to_know(formation.addresses)
        members, me = formation.members, self.identity
        others = [r for r in members if r != me]
        mine = formation.host == me
        host = self._board if mine else Remote(formation.addresses[formation.host], self.link_timeout_s)
        self.store, self._links, self._hosting = Named(host, formation.place), set(), mine
        if others:
            self.everyone = self._meet("group", members.index(me), len(members), others)
        self.place = replace(self.place, rank=members.index(me), size=len(members))
        for epoch in range(self.formation.epoch, formation.epoch):
            self._board.set(f"past/{epoch}", "")
        self._agreed, self._linked, self.formation = 0, {}, formation
        self._answered |= {rank: nonce for rank, (nonce, _, _) in self._reports().items()}  # of attempts before
        self._standing = bool(others)

    def _meet(self, name: str, rank: int, size: int, others: Sequence[int]) -> Group:
        """Torch would wait for one who died meanwhile: a thread waits, and we look."""
        found, errors = list[Group](), list[Lost]()

        def wait() -> None:
            try:
                found.append(meet(self.store, name, rank, size, self.timeout_s))
            except Lost as error:
                errors.append(error)

        thread, not_ours = threading.Thread(target=wait, daemon=True), open_sockets()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_S)
                ill = [r for r in others if not self.well(r)]
                if ill and thread.is_alive():
                    raise Lost(f"rank {', '.join(map(str, ill))} does not answer")
                self._look()
        finally:
            self._links |= {link for link in open_sockets() - not_ours if not self._is_of_a_board(link)}
        if errors:
            raise errors[0]
        return found[0]

    def link(self, other: int) -> Group:
        pair = sorted((self.rank, other))
        number = self._linked[other] = self._linked.get(other, 0) + 1
        return self._meet(f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [self.members[other]])

    # taking some back ---------------------------------------------------------------------------------------------

    def knock(self) -> Formation:
        """Ask a member to be let in, and wait for it. This rank comes empty."""
        self._hang_up()
        self._nonces = itertools.count(time.time_ns() // 1_000_000)  # greater than those of a former life
        deadline = time.monotonic() + self.timeout_s
        while True:
            for rank in (r for r in sorted(self.addresses) if r != self.identity and self.well(r)):
                with contextlib.suppress(Lost):
                    formation = self._knock_at(rank, deadline)
                    self._form(formation)
                    return formation
            if time.monotonic() > deadline or not any(map(self.well, self._watches)):
                raise Lost("no member of the run let this rank in")
            time.sleep(PULSE_S)

    def _knock_at(self, rank: int, deadline: float) -> Formation:
        nonce = next(self._nonces)
        answer = f"answer/{self.identity}/{nonce}"
        with Remote(self.addresses[rank], self.link_timeout_s) as board:
            board.set(f"knock/{self.identity}", json.dumps([nonce, *self._board.address]))
            while not board.check([answer]):
                if time.monotonic() > deadline or not self.well(rank):
                    raise Lost(f"rank {rank} did not answer")
                time.sleep(POLL_S)
            return Formation.from_json(board.get(answer).decode())

    def admit(self, step: int) -> Formation | None:
        """Let in who knocked. All members call this at the same step; it costs them nothing while all are there."""
        if not self.absent:
            return None
        mine = self._knocks(self.absent)
        knocks = {int(r): knock for word in self.agree(json.dumps(mine)) for r, knock in json.loads(word).items()}
        if not knocks:
            return None
        addresses = {r: self.addresses[r] for r in self.members}
        addresses |= {r: (host, port) for r, (_, host, port) in knocks.items()}
        members, host = tuple(sorted(addresses)), min(self.members)
        epoch = self.formation.epoch + 1
        formation = Formation(epoch, members, step, host, f"admit {epoch}", addresses, tuple(knocks))
        self._standing = False
        for rank, (nonce, *_) in mine.items():
            self._board.pop(f"knock/{rank}")
            self._board.set(f"answer/{rank}/{nonce}", formation.to_json())
        hang_up(self._links)
        self._form(formation)
        return formation

    def _knocks(self, ranks: Iterable[int]) -> dict[int, list[Any]]:
        """Which of these asked here to be let in: [nonce, host, port]."""
        there = [rank for rank in ranks if self._board.check([f"knock/{rank}"])]
        return {rank: json.loads(self._board.get(f"knock/{rank}")) for rank in there}

    # failures and the end -----------------------------------------------------------------------------------------

    def explain(self, error: BaseException, step: int) -> str:
        return f"rank {self.identity}, step {step}: {error}"

    def close(self) -> None:
        """Leave in good order: nobody hangs up before all are done."""
        self._standing = False
        if self.size > 1:
            with contextlib.suppress(Failed):
                self.everyone.sum(torch.zeros(1)).wait()

    def abandon(self) -> None:
        self._hang_up()


def _own_address(env: Mapping[str, str]) -> str:
    """The address of this host on the way to MASTER_ADDR."""
    return _towards((env.get("MASTER_ADDR") or "127.0.0.1", 9))


def _towards(address: Address) -> str:
    def name() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(address)
            return s.getsockname()[0]

    try:
        return name()
    except OSError as error:
        raise Lost(f"{address[0]} cannot be reached: {error}") from error


def somebody_at(addresses: Iterable[Address]) -> bool:
    """Whether any of these answers."""
    return any(map(_listens, addresses))


def _listens(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=LISTEN_S).close()
        return True
    except OSError:
        return False
