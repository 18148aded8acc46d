"""Who is there: what members of a world agree on, and how they look after each other."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass

from paragan.comm.elastic.kv_store import KVClient
from paragan.comm.process_group import CommunicationError
from paragan.comm.sockets import Address

HEARTBEAT_PERIOD_S = 0.25  # how often others are asked whether they are there


@dataclass(frozen=True)
class Membership:
    """Who belongs to the world from a step on. Ranks are called by the numbers they were started with.

    host, place : on whose board they meet, and under which name there, another for every attempt
    settled     : the number of the last word of each that this answers: its reports up to that one are void
    empty       : those who have no parameters yet
    ending      : why it is for a last checkpoint only, or nothing
    private     : whether it ends because others are out of reach: they may be going on, and the run is theirs
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    store_rank: int
    store_prefix: str
    addresses: dict[int, Address]
    answered: dict[int, int]
    without_state: tuple[int, ...] = ()
    shutdown_reason: str = ""
    partitioned: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Membership:
        data = json.loads(text)
        data["addresses"] = {int(r): (host, port) for r, (host, port) in data["addresses"].items()}
        data["answered"] = {int(r): number for r, number in data["answered"].items()}
        data["members"] = tuple(data["members"])
        data["without_state"] = tuple(data["without_state"])
        return Membership(**data)


@dataclass(frozen=True)
class MembershipVersion:
    """The formation a rank is in, as its board tells."""

    epoch: int
    members: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps([self.epoch, self.members])

    @staticmethod
    def from_json(text: str) -> MembershipVersion:
        epoch, members = json.loads(text)
        return MembershipVersion(epoch, tuple(members))


NO_MEMBERSHIP = MembershipVersion(-1, ())


class HeartbeatThread:
    """Asks one other rank, again and again, whether it is there, and which formation it is in."""

    def __init__(self, address: Address, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self.silent_s = 0.0  # time of ours without an answer: time for which we are frozen ourselves does not count
        self.ever_answered = self.exited = self.stopped = False
        self.membership = NO_MEMBERSHIP
        threading.Thread(target=self._poll, daemon=True, name=f"watch {address}").start()

    def _poll(self) -> None:
        while not self.stopped and not self.exited:
            try:
                with KVClient(self.address, self.timeout_s) as board:
                    while not self.stopped:
                        now = board.get_or_none("now")
                        self.membership = MembershipVersion.from_json(now) if now else NO_MEMBERSHIP
                        self.ever_answered, self.silent_s = True, 0.0
                        time.sleep(HEARTBEAT_PERIOD_S)
            except CommunicationError as error:
                self.exited = isinstance(error.__cause__, ConnectionRefusedError)
                time.sleep(HEARTBEAT_PERIOD_S)
