"""Who is there: what members of a world agree on, and how they look after each other."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass

from paragan.comm.elastic.kv_store import Remote
from paragan.comm.process_group import Lost
from paragan.comm.sockets import Address

PULSE_S = 0.25  # how often others are asked whether they are there


@dataclass(frozen=True)
class Formation:
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
    host: int
    place: str
    addresses: dict[int, Address]
    settled: dict[int, int]
    empty: tuple[int, ...] = ()
    ending: str = ""
    private: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Formation:
        data = json.loads(text)
        data["addresses"] = {int(r): (host, port) for r, (host, port) in data["addresses"].items()}
        data["settled"] = {int(r): nonce for r, nonce in data["settled"].items()}
        return Formation(**data | {"members": tuple(data["members"]), "empty": tuple(data["empty"])})


@dataclass(frozen=True)
class Now:
    """The formation a rank is in, as its board tells."""

    epoch: int
    members: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps([self.epoch, self.members])

    @staticmethod
    def from_json(text: str) -> Now:
        epoch, members = json.loads(text)
        return Now(epoch, tuple(members))


NOWHERE = Now(-1, ())


class Watch:
    """Asks one other rank, again and again, whether it is there, and which formation it is in."""

    def __init__(self, address: Address, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self.quiet_s = 0.0  # time of ours without an answer: time for which we are frozen ourselves does not count
        self.met = self.gone = self.over = False
        self.now = NOWHERE
        threading.Thread(target=self._ask, daemon=True, name=f"watch {address}").start()

    def _ask(self) -> None:
        while not self.over and not self.gone:
            try:
                with Remote(self.address, self.timeout_s) as board:
                    while not self.over:
                        now = board.read("now")
                        self.now = Now.from_json(now) if now else NOWHERE
                        self.met, self.quiet_s = True, 0.0
                        time.sleep(PULSE_S)
            except Lost as error:
                self.gone = isinstance(error.__cause__, ConnectionRefusedError)
                time.sleep(PULSE_S)
