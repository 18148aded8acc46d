"""Detect which ranks of an elastic world are alive, by heartbeats: requests to their stores at a fixed period.

A rank whose port refuses connections has *exited*; one that does not answer for `timeout_s` is *silent*, because of
itself or of the network. Ranks are called by the numbers they were started with.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from paragan.comm.elastic.kv_store import KVClient, ServerAddress
from paragan.comm.elastic.membership import MEMBERSHIP_KEY, NO_MEMBERSHIP, MembershipVersion
from paragan.comm.process_group import CommunicationError

HEARTBEAT_PERIOD_S = 0.25  # how often another rank is asked whether it is alive
STARTUP_TIMEOUT_S = 20.0  # how long an answer may take while processes start: imports can block their threads


class HeartbeatThread:
    """Asks another rank periodically whether it is alive, and which membership it is in.

    silent_s      : seconds without an answer. `Liveness` adds to it while this process runs, so time for which this
                    process itself was frozen does not count.
    ever_answered : whether it has answered at all
    exited        : whether its port refuses connections: its process has ended
    stopped       : set this to end the thread
    membership    : the latest answer
    """

    def __init__(self, address: ServerAddress, timeout_s: float):
        self.address, self.timeout_s = address, timeout_s
        self.silent_s = 0.0
        self.ever_answered = self.exited = self.stopped = False
        self.membership = NO_MEMBERSHIP
        self._check_event = threading.Event()
        threading.Thread(target=self._poll, daemon=True, name=f"heartbeat {address.host}:{address.port}").start()

    def check_now(self) -> None:
        """Check again without waiting for the next period: a group broke, and this rank may be why."""
        self._check_event.set()

    def _poll(self) -> None:
        while not self.stopped and not self.exited:
            connected = False
            try:
                with KVClient(self.address, self.timeout_s) as client:
                    while not self.stopped:
                        answer = client.get_or_none(MEMBERSHIP_KEY)
                        self.membership = MembershipVersion.from_json(answer) if answer else NO_MEMBERSHIP
                        connected, self.ever_answered, self.silent_s = True, True, 0.0
                        self._await_next_period()
            except CommunicationError as error:
                self.exited = isinstance(error.__cause__, ConnectionRefusedError)
                if not connected:  # else whether it has exited shows at once, by another connection
                    self._await_next_period()

    def _await_next_period(self) -> None:
        self._check_event.wait(HEARTBEAT_PERIOD_S)
        self._check_event.clear()


class Liveness:
    """Tracks which other ranks are alive, and which memberships they are in.

    timeout_s : how long a rank may be silent until it counts as lost
    started   : whether training has started; before that, silent ranks get more time
    active_s  : seconds for which this process has run, without those for which it was frozen
    addresses : of the stores of all ranks known so far, this one's included
    """

    def __init__(self, original_rank: int, address: ServerAddress, timeout_s: float):
        self.original_rank = original_rank
        self.timeout_s = timeout_s
        self.started = False
        self.active_s = 0.0
        self.addresses: dict[int, ServerAddress] = {original_rank: address}
        self._heartbeats: dict[int, HeartbeatThread] = {}

    def add(self, addresses: Mapping[int, ServerAddress]) -> None:
        """Watch these ranks too. One that was started again has another address than before."""
        self.addresses.update(addresses)
        for rank, address in addresses.items():
            former = self._heartbeats.get(rank)
            if rank != self.original_rank and (former is None or former.address != address or former.exited):
                if former:
                    former.stopped = True
                self._heartbeats[rank] = HeartbeatThread(address, self.timeout_s)

    def add_time(self, seconds: float) -> None:
        """Add time for which this process has run."""
        self.active_s += seconds
        for heartbeat in list(self._heartbeats.values()):
            heartbeat.silent_s += seconds

    def check_now(self) -> None:
        """Ask all ranks again without waiting for the next period."""
        for heartbeat in list(self._heartbeats.values()):
            heartbeat.check_now()

    def is_alive(self, rank: int) -> bool:
        """Return whether a rank has not exited and was not silent for too long."""
        if rank == self.original_rank:
            return True
        heartbeat = self._heartbeats.get(rank)
        if heartbeat is None or heartbeat.exited:
            return False
        if heartbeat.ever_answered and self.started:
            return heartbeat.silent_s < self.timeout_s
        return heartbeat.silent_s < max(self.timeout_s, STARTUP_TIMEOUT_S)

    def has_exited(self, rank: int) -> bool:
        """Return whether the process of a rank is known to have ended, or was never known."""
        return rank not in self._heartbeats or self._heartbeats[rank].exited

    def alive_ranks(self) -> list[int]:
        """Return the other ranks that are alive."""
        return [rank for rank in self._heartbeats if self.is_alive(rank)]

    def versions(self, ranks: Sequence[int]) -> list[MembershipVersion]:
        """Return which memberships those of these ranks are in that are known, without this one's."""
        return [self._heartbeats[rank].membership for rank in ranks if rank in self._heartbeats]

    def stop(self) -> None:
        """End all heartbeats."""
        for heartbeat in self._heartbeats.values():
            heartbeat.stopped = True
