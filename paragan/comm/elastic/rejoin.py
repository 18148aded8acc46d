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

from paragan.comm.elastic.kv_store import KVClient, KVServer
from paragan.comm.elastic.membership import Membership
from paragan.comm.process_group import CommunicationError
from paragan.comm.sockets import Address

REPLY_TIMEOUT_S = 1.0  # how long an answer may take when ranks form a group: who is slower is asked again
SEQUENCE_WINDOW = 1 << 30  # more than the words that a rank numbers in its life


class SurvivorReport(NamedTuple):
    """Of a rank that is left: the step and the formation it is at."""

    number: int
    step: int
    epoch: int


class JoinRequest(NamedTuple):
    """Of a rank that asks to be let in, and where its board is."""

    number: int
    host: str
    port: int


class JoinProtocol:
    """The words of one rank to others, and of others to it; addresses: of the boards of all who ever were there."""

    def __init__(self, original_rank: int, server: KVServer, addresses: Mapping[int, Address]):
        self.original_rank, self._server, self._addresses = original_rank, server, addresses
        self._sequence = itertools.count(secrets.randbits(60))  # not those of a former life
        self._last_answered: dict[int, int] = {}  # the last of others that something came of, or that they gave up
        self._confirmed_reports: dict[int, int] = {}  # reports that were seen to be waited for

    # of this rank

    def next_number(self) -> int:
        return next(self._sequence)

    @contextlib.contextmanager
    def reporting(self, leader: KVClient, step: int, epoch: int) -> Generator[int]:
        """Report to a leader, and wait for what comes of it until this is left; yields the number to ask `told` for."""
        number = self.next_number()
        self._server.set("waits", str(number))
        try:
            leader.set(f"report/{self.original_rank}", json.dumps(SurvivorReport(number, step, epoch)))
            yield number
        finally:
            self._server.set("waits", "")

    def request_join(self, member: KVClient, number: int) -> None:
        member.set(f"knock/{self.original_rank}", json.dumps(JoinRequest(number, *self._server.address)))

    def read_answer(self, client: KVClient, number: int) -> Membership | None:
        """What that rank answered."""
        answer = client.get_or_none(f"answer/{self.original_rank}/{number}")
        return Membership.from_json(answer) if answer else None

    # of others

    def pending_reports(self, ranks: Iterable[int]) -> dict[int, SurvivorReport]:
        """Which of these reported here, and wait for what comes of it."""
        words = {rank: self._server.get_or_none(f"report/{rank}") for rank in ranks if rank != self.original_rank}
        reports = {rank: SurvivorReport(*json.loads(word)) for rank, word in words.items() if word}
        return {
            rank: report
            for rank, report in reports.items()
            if not self._is_answered(rank, report.number)
            and not self.pending_joins([rank])
            and self._is_waiting(rank, report.number)
        }

    def pending_joins(self, ranks: Iterable[int]) -> dict[int, JoinRequest]:
        """Which of these ask here to be let in."""
        words = {rank: self._server.get_or_none(f"knock/{rank}") for rank in ranks}
        knocks = {rank: JoinRequest(*json.loads(word)) for rank, word in words.items() if word}
        return {rank: knock for rank, knock in knocks.items() if not self._is_answered(rank, knock.number)}

    def send_answers(self, membership: Membership) -> None:
        """Answer all whose words it settles."""
        for rank, number in membership.answered.items():
            self._server.set(f"answer/{rank}/{number}", membership.to_json())

    def mark_answered(self, membership: Membership) -> None:
        """What it answers is void from now on."""
        self._last_answered |= membership.answered

    def _is_answered(self, rank: int, number: int) -> bool:
        """Whether something came of this, or of a later one. Another life of the rank has quite other numbers."""
        return 0 <= self._last_answered.get(rank, -1) - number < SEQUENCE_WINDOW

    def _is_waiting(self, rank: int, number: int) -> bool:
        """Whether a rank waits for what comes of a report: it may be old, or have come while we were frozen."""
        if self._confirmed_reports.get(rank) != number:
            try:
                with KVClient(self._addresses[rank], REPLY_TIMEOUT_S) as board:
                    waits = board.get_or_none("waits")
            except CommunicationError:
                return False
            if waits != str(number):
                self._last_answered[rank] = number
                return False
            self._confirmed_reports[rank] = number
        return True
