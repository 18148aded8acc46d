"""The key-value store of a simulated run: rank 0 serves it, and every call takes a round trip to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paragan.plan.predict.event_loop import SimEvent
from paragan.plan.predict.rank_clock import RankClock


@dataclass
class StoreServer:
    """What the ranks of a simulation have written, and the events of keys that are waited for."""

    values: dict[str, str] = field(default_factory=dict[str, str])
    events: dict[str, SimEvent] = field(default_factory=dict[str, SimEvent])


@dataclass(frozen=True)
class SimulatedStore:
    """The store as one rank sees it (`process_group.Store`).

    round_trip_s : to rank 0 and back
    """

    server: StoreServer
    clock: RankClock
    round_trip_s: float

    def set(self, key: str, value: str, /) -> None:
        self.clock.sleep(self.round_trip_s)
        self.server.values[key] = value
        if event := self.server.events.pop(key, None):
            event.trigger()

    def get(self, key: str, /) -> bytes:
        self.clock.sleep(self.round_trip_s)
        return self.server.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self.clock.sleep(self.round_trip_s)
        return all(key in self.server.values for key in keys)

    def wait(self, key: str) -> None:
        """Wait until a key exists."""
        if key not in self.server.values:
            self.clock.wait(self.server.events.setdefault(key, SimEvent()), f"the key {key} of the store")
