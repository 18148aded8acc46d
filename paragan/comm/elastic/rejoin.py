"""What ranks ask of each other when a world changes: who is left reports, who was left out knocks.

Both are numbered words on the board of the rank that is asked, which answers there with a `Formation`. Words stay when
whoever wrote them dies, freezes or gives up. So a number is settled once something came of it, and a report counts only
while its rank says, on its own board, that it waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from paragan.comm.elastic.kv_store import Board, Remote
from paragan.comm.elastic.membership import Formation
from paragan.comm.process_group import Lost
from paragan.comm.sockets import Address

ANSWER_S = 1.0  # how long an answer may take when ranks form a group: who is slower is asked again
LIFE = 1 << 30  # more than the words that a rank numbers in its life


class Report(NamedTuple):
    """Of a rank that is left: the step and the formation it is at."""

    number: int
    step: int
    epoch: int


class Knock(NamedTuple):
    """Of a rank that asks to be let in, and where its board is."""

    number: int
    host: str
    port: int


class Asking:
    """The words of one rank to others, and of others to it; addresses: of the boards of all who ever were there."""

    def __init__(self, identity: int, board: Board, addresses: Mapping[int, Address]):
        self.identity, self._board, self._addresses = identity, board, addresses
        self._numbers = itertools.count(secrets.randbits(60))  # not those of a former life
        self._settled: dict[int, int] = {}  # the last of others that something came of, or that they gave up
        self._waited: dict[int, int] = {}  # reports that were seen to be waited for

    # of this rank

    def number(self) -> int:
        return next(self._numbers)

    @contextlib.contextmanager
    def report(self, leader: Remote, step: int, epoch: int) -> Generator[int]:
        """Report to a leader, and wait for what comes of it until this is left; yields the number to ask `told` for."""
        number = self.number()
        self._board.set("waits", str(number))
        try:
            leader.set(f"report/{self.identity}", json.dumps(Report(number, step, epoch)))
            yield number
        finally:
            self._board.set("waits", "")

    def knock(self, member: Remote, number: int) -> None:
        member.set(f"knock/{self.identity}", json.dumps(Knock(number, *self._board.address)))

    def told(self, board: Remote, number: int) -> Formation | None:
        """What that rank answered."""
        answer = board.read(f"answer/{self.identity}/{number}")
        return Formation.from_json(answer) if answer else None

    # of others

    def reports(self, ranks: Iterable[int]) -> dict[int, Report]:
        """Which of these reported here, and wait for what comes of it."""
        words = {rank: self._board.read(f"report/{rank}") for rank in ranks if rank != self.identity}
        reports = {rank: Report(*json.loads(word)) for rank, word in words.items() if word}
        return {
            rank: report
            for rank, report in reports.items()
            if not self._void(rank, report.number) and not self.knocks([rank]) and self._waits(rank, report.number)
        }

    def knocks(self, ranks: Iterable[int]) -> dict[int, Knock]:
        """Which of these ask here to be let in."""
        words = {rank: self._board.read(f"knock/{rank}") for rank in ranks}
        knocks = {rank: Knock(*json.loads(word)) for rank, word in words.items() if word}
        return {rank: knock for rank, knock in knocks.items() if not self._void(rank, knock.number)}

    def tell(self, formation: Formation) -> None:
        """Answer all whose words it settles."""
        for rank, number in formation.settled.items():
            self._board.set(f"answer/{rank}/{number}", formation.to_json())

    def settle(self, formation: Formation) -> None:
        """What it answers is void from now on."""
        self._settled |= formation.settled

    def _void(self, rank: int, number: int) -> bool:
        """Whether something came of this, or of a later one. Another life of the rank has quite other numbers."""
        return 0 <= self._settled.get(rank, -1) - number < LIFE

    def _waits(self, rank: int, number: int) -> bool:
        """Whether a rank waits for what comes of a report: it may be old, or have come while we were frozen."""
        if self._waited.get(rank) != number:
            try:
                with Remote(self._addresses[rank], ANSWER_S) as board:
                    waits = board.read("waits")
            except Lost:
                return False
            if waits != str(number):
                self._settled[rank] = number
                return False
            self._waited[rank] = number
        return True
