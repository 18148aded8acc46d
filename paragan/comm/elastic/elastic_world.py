"""A world that goes on without those it lost, and takes them back.

No rank is special. Every rank has a board where others read and leave words, so whoever is left can lead; a thread for
each other rank asks again and again whether it is there. A rank whose port refuses us is *gone*; one that does not
answer for `link_timeout_s` is *silent*, which may be its fault or the network's.

Once somebody is lost every rank hangs up (so that all notice), reports to the lowest rank that is well, and is told the
next `Formation`: who belongs to it, and from which step on. Those who are there must be more than half of those who are
not known to be gone. Who was left out - frozen, cut off, or killed and started again - knocks at all who are there, and
is admitted by the members at a step they agree on.

Ranks may see others lost at different times, and wake in the middle. So nobody waits without looking again at who
leads, which formations others are in, and who reports to it. What does not fit is given up (Lost), and tried anew.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from paragan.comm.elastic.kv_store import Board, Leavable, Named, Remote
from paragan.comm.elastic.membership import NOWHERE, PULSE_S, Formation, Now, Watch
from paragan.comm.elastic.rejoin import ANSWER_S, Asking, Knock, Report
from paragan.comm.process_group import POLL_S, Group, Lost, Solo, Waiter, meet
from paragan.comm.sockets import Address, Link, answers, hang_up, hung_up, listens, open_sockets, still_open, towards
from paragan.comm.world import Place, World, rendezvous
from paragan.core.errors import Failed

FIRST_S = 20.0  # how long an answer may take while programs start: importing and loading may stop everything else


class Alone(Failed):
    """Too few are left to go on: what is there is to be saved."""


class LeftOut(Exception):
    """The others went on without this rank."""


class State(enum.Enum):
    """Of the group a rank is in."""

    FORMING = "it is left, or not there yet, or nobody minds any more"
    STANDING = "it is to be left once somebody is lost"
    BROKEN = "somebody is lost: nobody is to wait for anything"


class Elastic(World):
    """A world on gloo whose ranks may be lost and come back; `place` and `everyone` change with every formation.

    identity  : the number this rank was started with, of `began`;  late : whether it joined a run that was under way
    under_way : whether the game has begun: before, who is silent is given more time
    """

    elastic: ClassVar[bool] = True

    def __init__(self, place: Place, device: torch.device, address: str, timeout_s: float, link_timeout_s: float):
        self._board = Board(address)
        super().__init__(place, device, self._board, Solo(), timeout_s)
        self.identity, self.late = place.rank, False
        self.link_timeout_s, self.under_way = link_timeout_s, False
        self.formation = Formation(-1, (), 0, self.identity, "", {}, {})
        self.awake_s = 0.0  # time of ours, without that for which we were frozen
        self.addresses: dict[int, Address] = {self.identity: self._board.address}  # of all who ever were there
        self._watches: dict[int, Watch] = {}
        self._state, self._lock = State.FORMING, threading.Lock()
        self._links = set[Link]()  # the sockets of the group,
        self._waiters: list[Waiter] = []  # those who wait at it,
        self._with: tuple[int, ...] = ()  # and the others who belong to it, or are to
        self._hosting = False  # whether the group meets, or met, at our board
        self._asking = Asking(self.identity, self._board, self.addresses)
        self._attempts = itertools.count(1)
        self._closed = False
        self._seed: Any = None
        threading.Thread(target=self._look_after, daemon=True, name="elastic").start()

    @staticmethod
    def begin(
        place: Place, device: torch.device, timeout_s: float, link_timeout_s: float, env: Mapping[str, str] = os.environ
    ) -> Elastic:
        """All ranks together, at MASTER_ADDR: the only time it is needed."""
        seed, _ = rendezvous(place, env, timeout_s)
        world = Elastic(place, device, towards((env.get("MASTER_ADDR") or "127.0.0.1", 9)), timeout_s, link_timeout_s)
        world._seed = seed  # others may still be reading there
        world.store = Named(seed, "paragan/" + env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        there = dict(enumerate(json.loads(word) for word in world.agree(json.dumps(world._board.address))))
        addresses = {rank: (host, port) for rank, (host, port) in there.items()}
        try:
            world._form(Formation(0, tuple(addresses), 0, 0, "begin", addresses, {}))
        except Lost as error:
            raise Failed(
                f"rank {place.rank} could not begin with the others: {error}; if they began earlier and go on, "
                "end them, or give another MASTER_PORT"
            ) from error
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
        there = {rank: at for rank, at in members.items() if rank != place.rank and answers(at)}
        if not there:
            return None
        world = Elastic(place, device, towards(next(iter(there.values()))), timeout_s, link_timeout_s)
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
    def epoch(self) -> int:
        return self.formation.epoch

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.began) if r not in self.members)

    def well(self, rank: int) -> bool:
        if rank == self.identity:
            return True
        watch = self._watches.get(rank)
        if watch is None or watch.gone:
            return False
        ready = watch.met and self.under_way
        return watch.quiet_s < (self.link_timeout_s if ready else max(self.link_timeout_s, FIRST_S))

    def _get_to_know(self, addresses: Mapping[int, Address]) -> None:
        self.addresses.update(addresses)
        for rank, address in addresses.items():
            former = self._watches.get(rank)
            if rank != self.identity and (former is None or former.address != address or former.gone):
                if former:
                    former.over = True
                self._watches[rank] = Watch(address, self.link_timeout_s)

    def _look_after(self) -> None:
        """Hang up once a member is lost, so that no exchange waits for it."""
        while not self._closed:
            time.sleep(PULSE_S)
            self.awake_s += PULSE_S
            for watch in list(self._watches.values()):
                watch.quiet_s += PULSE_S
            with self._lock:
                if self._state is State.STANDING and (self._trouble() or any(map(hung_up, self._links))):
                    self._hang_up(State.BROKEN)

    def _trouble(self) -> str:
        """Why this group is to be left, if it is."""
        if ill := [r for r in self._with if not self.well(r)]:
            return f"rank {', '.join(map(str, ill))} does not answer"
        return "somebody gave this group up" if self._asking.reports(self._with) else ""

    def look(self) -> None:
        if trouble := self._trouble():
            raise Lost(trouble)
        if self._state is State.BROKEN or (not self._hosting and self.store.check(["over"])):
            raise Lost("this group was given up")

    def _is_link(self, found: Link) -> bool:
        """Whether this socket is a link of the group: neither its door nor a board's."""
        boards, handle = {port for _, port in self.addresses.values()}, still_open(found)
        if not handle:
            return False
        with handle:
            try:
                if handle.family == socket.AF_UNIX or listens(handle):
                    return False
                return not {handle.getsockname()[1], handle.getpeername()[1]} & boards
            except OSError:
                return False

    def _hang_up(self, state: State) -> None:
        self._state = state
        hang_up(self._links)
        for waiter in self._waiters:
            waiter.give_up()

    # going on without some ----------------------------------------------------------------------------------------

    def again(self, step: int) -> Formation:
        """Leave the group that broke, and form one of those who are left; step: the round this rank is at.

        A rank that was left out knocks, and comes back empty. Alone where too few are left: then the
        group is that of those few, for a last checkpoint.
        """
        deadline = self.awake_s + self.timeout_s
        while True:
            self._give_up()
            try:
                leader = self._leader()
                formation = self._lead(step, deadline) if leader == self.identity else self._follow(leader, step)
                if self.identity not in formation.members:
                    raise Alone(f"the others stop: {formation.ending}")
                self._form(formation)
                break
            except Lost:
                if self.awake_s > deadline:
                    raise
                time.sleep(POLL_S)
            except LeftOut:
                return self.knock()
        if formation.ending:
            raise Alone(formation.ending)
        return formation

    def _give_up(self) -> None:
        """Leave the group, or what was to become one; whoever still waits for it is told."""
        with self._lock:
            self._hang_up(State.FORMING)
        if self._hosting:
            self.store.set("over", "")

    def _newest(self) -> Now:
        """The newest formation that somebody is in, of those that have us. LeftOut where others are in one as new as
        ours that has not."""
        newest = Now(self.formation.epoch, self.members)
        there = [self._watches[r].now for r in self.members if r in self._watches]
        if any(now.epoch >= newest.epoch and self.identity not in now.members for now in there):
            raise LeftOut
        return max(newest, *there, key=lambda now: now.epoch) if there else newest

    def _leader(self) -> int:
        """The lowest of those who are well, and did not come back since."""
        return min((r for r in self._newest().members if self._stays(r)), default=self.identity)

    def _stays(self, rank: int) -> bool:
        return rank == self.identity or (self.well(rank) and not self._asking.knocks([rank]))

    def _keeps(self, leader: int) -> None:
        if self._leader() != leader:
            raise Lost(f"rank {leader} leads no more")

    def _lead(self, step: int, deadline: float) -> Formation:
        """Wait until all who are well have reported, and tell them who belongs to us."""
        while True:
            self._keeps(self.identity)
            newest = self._newest()
            reports = self._asking.reports(newest.members)
            reports[self.identity] = Report(self._asking.number(), step, self.formation.epoch)
            waited = [r for r in newest.members if r not in reports and self._stays(r)]
            if not waited:
                break
            if self.awake_s > deadline:
                raise Lost(f"rank {', '.join(map(str, waited))} did not report within {self.timeout_s:g} s")
            time.sleep(POLL_S / 4)
        formation = self._next(newest, reports)
        self._asking.tell(formation)
        return formation

    def _next(self, newest: Now, reports: Mapping[int, Report]) -> Formation:
        """The formation of those who reported, where they were in none newer than this."""
        here, before = tuple(sorted(reports)), newest.members
        lost = [r for r in before if r not in here]
        gone = [r for r in lost if r not in self._watches or self._watches[r].gone]
        empty = tuple(r for r in here if reports[r].step < 0)
        ending = why_it_ends(before, here, empty, gone)
        if ending and len(here) > len(empty):  # those who have nothing have nothing to save
            here, empty = tuple(r for r in here if r not in empty), ()
        return Formation(
            epoch=max(newest.epoch, *(report.epoch for report in reports.values())) + 1,
            members=here,
            step=max(report.step for report in reports.values()),
            host=self.identity,
            place=f"again {next(self._attempts)}",
            addresses={r: self.addresses[r] for r in here},
            settled={r: report.number for r, report in reports.items()},
            empty=empty,
            ending=ending,
            private=bool(ending) and len(gone) < len(lost),
        )

    def _follow(self, leader: int, step: int) -> Formation:
        """Report to the leader, and be told."""
        with (
            Remote(self.addresses[leader], ANSWER_S) as board,
            self._asking.report(board, step, self.formation.epoch) as number,
        ):
            while not (formation := self._asking.told(board, number)):
                self._keeps(leader)
                time.sleep(POLL_S)
            return formation

    def _form(self, formation: Formation) -> None:
        """Meet the others of a formation, and be of it."""
        members, me = formation.members, self.identity
        others = tuple(r for r in members if r != me)
        mine = formation.host == me
        self._get_to_know(formation.addresses)
        with self._lock:
            self._asking.settle(formation)
            self._links, self._waiters, self._with, self._hosting = set[Link](), [], others, mine
        self.store, self.everyone = self._board, Solo()
        host = self._board if mine else Remote(formation.addresses[formation.host], self.link_timeout_s)
        self.store = Named(host, formation.place)
        if others:
            self.everyone = self._meet("group", members.index(me), len(members), others, self.waiter())
        self.place = replace(self.place, rank=members.index(me), size=len(members))
        self._agreed, self._linked, self.formation = 0, {}, formation
        if not formation.ending:
            self._board.set("now", Now(formation.epoch, members).to_json())
        with self._lock:
            self._state = State.STANDING if others else State.FORMING

    def waiter(self, group: Group | None = None) -> Waiter:
        self._waiters.append(super().waiter(group))
        return self._waiters[-1]

    def _meet(self, name: str, rank: int, size: int, others: Sequence[int], waiter: Waiter | None = None) -> Group:
        """Torch would wait for one who died meanwhile: a thread waits, and we look."""
        found, errors, words = list[Group](), list[Lost](), Leavable(self.store)
        patience_s = self.awake_s + max(FIRST_S, 3 * self.link_timeout_s)

        def wait() -> None:
            try:
                found.append(meet(words, name, rank, size, self.timeout_s, waiter))
            except Lost as error:
                errors.append(error)

        thread, not_ours = threading.Thread(target=wait, daemon=True), open_sockets()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_S)
                self.look()
                if self._state is State.FORMING:
                    self._newest()
                if self.awake_s > patience_s:
                    raise Lost("not all came to where they were to meet")
        finally:
            words.over = True
            self._links = self._links | set(filter(self._is_link, open_sockets() - not_ours))  # others may be reading
        if errors:
            raise errors[0]
        return found[0]

    def link(self, other: int) -> Group:
        pair = sorted((self.rank, other))
        number = self._linked[other] = self._linked.get(other, 0) + 1
        return self._meet(f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [self.members[other]])

    # taking some back ---------------------------------------------------------------------------------------------

    def knock(self) -> Formation:
        """Ask all who are there to be let in, and wait for the members among them. This rank comes empty."""
        self.formation = replace(self.formation, epoch=NOWHERE.epoch, members=NOWHERE.members)
        self._board.set("now", NOWHERE.to_json())
        while True:
            self._give_up()
            formation = self._let_in()
            with contextlib.suppress(Lost):
                self._form(formation)
                return formation

    def _let_in(self) -> Formation:
        """Knock, until somebody answers. While members are there this takes what it takes: they look once a tick."""
        number, boards = self._asking.number(), dict[int, Remote]()
        deadline = self.awake_s + self.timeout_s
        with contextlib.ExitStack() as stack:
            while True:
                there = [r for r in self._watches if self.well(r)]
                if any(self._watches[r].now.members for r in there):
                    deadline = self.awake_s + self.timeout_s
                elif not there or self.awake_s > deadline:
                    raise Lost("no member of the run let this rank in")
                for rank in there:
                    with contextlib.suppress(Lost):
                        if rank not in boards:
                            boards[rank] = stack.enter_context(Remote(self.addresses[rank], ANSWER_S))
                            self._asking.knock(boards[rank], number)
                        if formation := self._asking.told(boards[rank], number):
                            return formation
                time.sleep(POLL_S)

    def admit(self, step: int) -> Formation | None:
        """Let in who knocked. All members call this at the same step; it costs them nothing while all are there."""
        if not self.absent:
            return None
        mine = json.dumps(self._asking.knocks(self.absent))
        knocks = {int(r): Knock(*knock) for word in self.agree(mine) for r, knock in json.loads(word).items()}
        if not knocks:
            return None
        addresses = {r: self.addresses[r] for r in self.members}
        addresses |= {r: (knock.host, knock.port) for r, knock in knocks.items()}
        members, host = tuple(sorted(addresses)), min(self.members)
        epoch = self.formation.epoch + 1
        settled = {rank: knock.number for rank, knock in knocks.items()}
        formation = Formation(epoch, members, step, host, f"admit {epoch}", addresses, settled, tuple(knocks))
        self._asking.tell(formation)
        with self._lock:
            self._state = State.FORMING
            hang_up(self._links)
            for waiter in self._waiters:
                waiter.end()
        self._form(formation)
        return formation

    # failures and the end -----------------------------------------------------------------------------------------

    def explain(self, error: BaseException, step: int | None = None) -> str:
        return f"rank {self.identity}{'' if step is None else f', step {step}'}: {error}"

    def close(self) -> None:
        """Leave in good order: nobody hangs up before all are done."""
        with self._lock:
            self._state = State.FORMING
        if self.size > 1:
            with contextlib.suppress(Failed):
                self.everyone.sum(torch.zeros(1)).wait()
        self._closed = True
        for watch in self._watches.values():
            watch.over = True
        self._board.close()

    def abandon(self) -> None:
        with self._lock:
            self._hang_up(State.BROKEN)


def why_it_ends(before: Sequence[int], here: Sequence[int], empty: Sequence[int], gone: Sequence[int]) -> str:
    """Why those who are here are too few to go on, or nothing; some of those who are not are gone for sure."""
    lost = [r for r in before if r not in here]
    names, missing = ", ".join(map(str, here)), ", ".join(map(str, lost))
    if len(here) == len(empty):
        return "no rank that has parameters is left"
    if 2 * len(here) <= len(before) - len(gone):
        return f"rank {missing} cannot be reached, and rank {names} {'is' if len(here) == 1 else 'are'} no majority"
    if len(here) == 1:
        return f"rank {missing} {'is' if len(lost) == 1 else 'are'} gone: every other rank"
    return ""
