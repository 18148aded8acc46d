"""Requests between ranks when a membership changes: survivors report to a leader, others ask to join.

Both are numbered values in the store of the rank that is asked, which answers there with a `Membership`. A value stays
in the store when the rank that wrote it dies, freezes or changes its mind. Therefore a number is void once it was
answered, and a report counts only while its rank's own store says that it is still waiting for the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from paragan.comm.elastic.kv_store import KVClient, KVServer, ServerAddress
from paragan.comm.elastic.membership import Membership
from paragan.comm.process_group import CommunicationError

REPLY_TIMEOUT_S = 1.0  # how long an answer may take while ranks form a group; slower ranks are asked again
COUNT_BITS = 30  # of a number: they count the requests of a process; the bits above are random, one value per process


class SurvivorReport(NamedTuple):
    """The report of a surviving rank: the step and the epoch that it is at.

    step       : the round that it can continue with; -1: it has no parameters
    generation : how often ranks had agreed on the parameters that it has
    """

    number: int
    step: int
    epoch: int
    generation: int = 0


class JoinRequest(NamedTuple):
    """What a rank that asks to join sends: the address of its store."""

    number: int
    host: str
    port: int
    secret: str

    @property
    def address(self) -> ServerAddress:
        """Address of the rank's store."""
        return ServerAddress(self.host, self.port, self.secret)


class JoinProtocol:
    """The requests of one rank to others, and of others to it.

    original_rank : the number with which this rank was started
    server        : this rank's store
    addresses     : of the stores of all ranks known so far
    """

    def __init__(self, original_rank: int, server: KVServer, addresses: Mapping[int, ServerAddress]):
        self.original_rank, self._server, self._addresses = original_rank, server, addresses
        self._sequence = itertools.count(secrets.randbits(30) << COUNT_BITS)
        self._last_answered: dict[tuple[int, int], int] = {}  # by rank and process: the latest that is void
        self._answered_numbers: dict[int, int] = {}  # by rank: the one that a membership answered last
        self._confirmed_reports: dict[int, int] = {}  # each rank's latest report that was known to be waited for

    # requests of this rank

    def next_number(self) -> int:
        """Return a new number for a request."""
        return next(self._sequence)

    @contextlib.contextmanager
    def reporting(self, leader: KVClient, step: int, epoch: int, generation: int) -> Generator[int]:
        """Report to a leader, and wait for its answer until this context ends.

        Yields:
            The number to call `read_answer` with.
        """
        number = self.next_number()
        self._server.set("waiting_for", str(number))
        try:
            leader.set(f"report/{self.original_rank}", json.dumps(SurvivorReport(number, step, epoch, generation)))
            yield number
        finally:
            self._server.set("waiting_for", "")

    def request_join(self, member: KVClient, number: int) -> None:
        """Ask a member to join the run."""
        member.set(f"join/{self.original_rank}", json.dumps(JoinRequest(number, *self._server.address)))

    def read_answer(self, client: KVClient, number: int) -> Membership | None:
        """Return that rank's answer to request `number`, if it has answered."""
        answer = client.get_or_none(f"answer/{self.original_rank}/{number}")
        return Membership.from_json(answer) if answer else None

    # requests of others

    def pending_reports(self, ranks: Iterable[int]) -> dict[int, SurvivorReport]:
        """Return the reports of these ranks that still wait for an answer of this rank."""
        reports: dict[int, SurvivorReport] = {}
        for rank in ranks:
            text = self._server.get_or_none(f"report/{rank}") if rank != self.original_rank else None
            if not text:
                continue
            report = SurvivorReport(*json.loads(text))
            is_void = self._is_answered(rank, report.number) or self.pending_joins([rank])
            if not is_void and self._is_waiting(rank, report.number):
                reports[rank] = report
        return reports

    def pending_joins(self, ranks: Iterable[int]) -> dict[int, JoinRequest]:
        """Return the requests of these ranks to join that were not answered yet."""
        requests: dict[int, JoinRequest] = {}
        for rank in ranks:
            text = self._server.get_or_none(f"join/{rank}")
            if text:
                request = JoinRequest(*json.loads(text))
                if not self._is_answered(rank, request.number):
                    requests[rank] = request
        return requests

    def send_answers(self, membership: Membership) -> None:
        """Answer all requests that led to this membership."""
        for rank, number in membership.answered.items():
            self._server.set(f"answer/{rank}/{number}", membership.to_json())

    def answered_numbers(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the number of the request of each of these ranks that was answered last, if any was."""
        return {rank: self._answered_numbers[rank] for rank in ranks if rank in self._answered_numbers}

    def mark_answered(self, membership: Membership) -> None:
        """Make void all requests that this membership answers."""
        self._answered_numbers |= membership.answered
        for rank, number in membership.answered.items():
            self._make_void(rank, number)
            self._confirmed_reports.pop(rank, None)  # maybe of a process that has ended since

    def _make_void(self, rank: int, number: int) -> None:
        """Let this request of a rank, and all earlier ones of the same process, count no longer."""
        key = (rank, number >> COUNT_BITS)
        self._last_answered[key] = max(number, self._last_answered.get(key, -1))

    def _is_answered(self, rank: int, number: int) -> bool:
        """Return whether this request or a later one of the same process was answered."""
        return number <= self._last_answered.get((rank, number >> COUNT_BITS), -1)

    def _is_waiting(self, rank: int, number: int) -> bool:
        """Return whether a rank still waits for the answer to a report, which may be old if this process was frozen."""
        if self._confirmed_reports.get(rank) != number:
            try:
                with KVClient(self._addresses[rank], REPLY_TIMEOUT_S) as client:
                    waiting_for = client.get_or_none("waiting_for")
            except CommunicationError:
                return False
            if waiting_for != str(number):
                self._make_void(rank, number)
                return False
            self._confirmed_reports[rank] = number
        return True
