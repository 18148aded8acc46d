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

from paragan.comm.elastic.kv_store import CancellableStore, KVClient, KVServer, PrefixStore
from paragan.comm.elastic.membership import (
    HEARTBEAT_PERIOD_S,
    NO_MEMBERSHIP,
    HeartbeatThread,
    Membership,
    MembershipVersion,
)
from paragan.comm.elastic.rejoin import REPLY_TIMEOUT_S, JoinProtocol, JoinRequest, SurvivorReport
from paragan.comm.process_group import POLL_S, CommunicationError, Group, SingleRankGroup, WaitThread, new_gloo_group
from paragan.comm.sockets import (
    Address,
    SocketId,
    duplicate_socket,
    is_closed,
    is_listener,
    is_listening,
    local_address_towards,
    open_sockets,
    shutdown_sockets,
)
from paragan.comm.world import LaunchInfo, World, rendezvous
from paragan.core.errors import RunError

STARTUP_TIMEOUT_S = (
    20.0  # how long an answer may take while programs start: importing and loading may stop everything else
)


class QuorumLostError(RunError):
    """Too few are left to go on: what is there is to be saved."""


class EvictedError(Exception):
    """The others went on without this rank."""


class GroupState(enum.Enum):
    """Of the group a rank is in."""

    FORMING = "it is left, or not there yet, or nobody minds any more"
    READY = "it is to be left once somebody is lost"
    BROKEN = "somebody is lost: nobody is to wait for anything"


class ElasticWorld(World):
    """A world on gloo whose ranks may be lost and come back; `place` and `everyone` change with every formation.

    identity  : the number this rank was started with, of `began`;  late : whether it joined a run that was under way
    under_way : whether the game has begun: before, who is silent is given more time
    """

    is_elastic: ClassVar[bool] = True

    def __init__(
        self, launch_info: LaunchInfo, device: torch.device, address: str, timeout_s: float, link_timeout_s: float
    ):
        self._server = KVServer(address)
        super().__init__(launch_info, device, self._server, SingleRankGroup(), timeout_s)
        self.original_rank, self.joined_late = launch_info.rank, False
        self.link_timeout_s, self.started = link_timeout_s, False
        self.membership = Membership(-1, (), 0, self.original_rank, "", {}, {})
        self.active_s = 0.0  # time of ours, without that for which we were frozen
        self.addresses: dict[int, Address] = {self.original_rank: self._server.address}  # of all who ever were there
        self._heartbeats: dict[int, HeartbeatThread] = {}
        self._state, self._lock = GroupState.FORMING, threading.Lock()
        self._group_sockets = set[SocketId]()  # the sockets of the group,
        self._wait_threads: list[WaitThread] = []  # those who wait at it,
        self._peers: tuple[int, ...] = ()  # and the others who belong to it, or are to
        self._hosts_store = False  # whether the group meets, or met, at our board
        self._join_protocol = JoinProtocol(self.original_rank, self._server, self.addresses)
        self._attempts = itertools.count(1)
        self._closed = False
        self._rendezvous_store: Any = None
        threading.Thread(target=self._monitor_peers, daemon=True, name="elastic").start()

    @staticmethod
    def start(
        launch_info: LaunchInfo,
        device: torch.device,
        timeout_s: float,
        link_timeout_s: float,
        env: Mapping[str, str] = os.environ,
    ) -> ElasticWorld:
        """All ranks together, at MASTER_ADDR: the only time it is needed."""
        seed, _ = rendezvous(launch_info, env, timeout_s)
        world = ElasticWorld(
            launch_info,
            device,
            local_address_towards((env.get("MASTER_ADDR") or "127.0.0.1", 9)),
            timeout_s,
            link_timeout_s,
        )
        world._rendezvous_store = seed  # others may still be reading there
        world.store = PrefixStore(seed, "paragan/" + env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        there = dict(enumerate(json.loads(word) for word in world.all_gather_str(json.dumps(world._server.address))))
        addresses = {rank: (host, port) for rank, (host, port) in there.items()}
        try:
            world._adopt_membership(Membership(0, tuple(addresses), 0, 0, "begin", addresses, {}))
        except CommunicationError as error:
            raise RunError(
                f"rank {launch_info.rank} could not begin with the others: {error}; if they began earlier and go on, "
                "end them, or give another MASTER_PORT"
            ) from error
        return world

    @staticmethod
    def join_run(
        launch_info: LaunchInfo,
        device: torch.device,
        timeout_s: float,
        link_timeout_s: float,
        addresses: Mapping[int, Address],
    ) -> ElasticWorld | None:
        """Join a run that is under way, or None where none of its members is there."""
        there = {rank: at for rank, at in addresses.items() if rank != launch_info.rank and is_listening(at)}
        if not there:
            return None
        world = ElasticWorld(
            launch_info, device, local_address_towards(next(iter(there.values()))), timeout_s, link_timeout_s
        )
        world.joined_late = True
        world._add_peers(there)
        world.request_join()
        return world

    # who is there -------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        return self.membership.members

    @property
    def original_ranks(self) -> tuple[int, ...]:
        return self.membership.members

    @property
    def membership_epoch(self) -> int:
        return self.membership.epoch

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.initial_size) if r not in self.members)

    def is_alive(self, rank: int) -> bool:
        if rank == self.original_rank:
            return True
        watch = self._heartbeats.get(rank)
        if watch is None or watch.exited:
            return False
        ready = watch.ever_answered and self.started
        return watch.silent_s < (self.link_timeout_s if ready else max(self.link_timeout_s, STARTUP_TIMEOUT_S))

    def _add_peers(self, addresses: Mapping[int, Address]) -> None:
        self.addresses.update(addresses)
        for rank, address in addresses.items():
            former = self._heartbeats.get(rank)
            if rank != self.original_rank and (former is None or former.address != address or former.exited):
                if former:
                    former.stopped = True
                self._heartbeats[rank] = HeartbeatThread(address, self.link_timeout_s)

    def _monitor_peers(self) -> None:
        """Hang up once a member is lost, so that no exchange waits for it."""
        while not self._closed:
            time.sleep(HEARTBEAT_PERIOD_S)
            self.active_s += HEARTBEAT_PERIOD_S
            for watch in list(self._heartbeats.values()):
                watch.silent_s += HEARTBEAT_PERIOD_S
            with self._lock:
                if self._state is GroupState.READY and (
                    self._failure_reason() or any(map(is_closed, self._group_sockets))
                ):
                    self._disconnect(GroupState.BROKEN)

    def _failure_reason(self) -> str:
        """Why this group is to be left, if it is."""
        if ill := [r for r in self._peers if not self.is_alive(r)]:
            return f"rank {', '.join(map(str, ill))} does not answer"
        return "somebody gave this group up" if self._join_protocol.pending_reports(self._peers) else ""

    def raise_if_broken(self) -> None:
        if trouble := self._failure_reason():
            raise CommunicationError(trouble)
        if self._state is GroupState.BROKEN or (not self._hosts_store and self.store.check(["over"])):
            raise CommunicationError("this group was given up")

    def _is_group_socket(self, socket_id: SocketId) -> bool:
        """Whether this socket is a link of the group: neither its door nor a board's."""
        boards, handle = {port for _, port in self.addresses.values()}, duplicate_socket(socket_id)
        if not handle:
            return False
        with handle:
            try:
                if handle.family == socket.AF_UNIX or is_listener(handle):
                    return False
                return not {handle.getsockname()[1], handle.getpeername()[1]} & boards
            except OSError:
                return False

    def _disconnect(self, state: GroupState) -> None:
        self._state = state
        shutdown_sockets(self._group_sockets)
        for waiter in self._wait_threads:
            waiter.abandon()

    # going on without some ----------------------------------------------------------------------------------------

    def reform(self, step: int) -> Membership:
        """Leave the group that broke, and form one of those who are left; step: the round this rank is at.

        A rank that was left out knocks, and comes back empty. Alone where too few are left: then the
        group is that of those few, for a last checkpoint.
        """
        deadline = self.active_s + self.timeout_s
        while True:
            self._leave_group()
            try:
                leader = self._leader()
                formation = (
                    self._lead_reform(step, deadline)
                    if leader == self.original_rank
                    else self._follow_leader(leader, step)
                )
                if self.original_rank not in formation.members:
                    raise QuorumLostError(f"the others stop: {formation.shutdown_reason}")
                self._adopt_membership(formation)
                break
            except CommunicationError:
                if self.active_s > deadline:
                    raise
                time.sleep(POLL_S)
            except EvictedError:
                return self.request_join()
        if formation.shutdown_reason:
            raise QuorumLostError(formation.shutdown_reason)
        return formation

    def _leave_group(self) -> None:
        """Leave the group, or what was to become one; whoever still waits for it is told."""
        with self._lock:
            self._disconnect(GroupState.FORMING)
        if self._hosts_store:
            self.store.set("over", "")

    def _latest_membership(self) -> MembershipVersion:
        """The newest formation that somebody is in, of those that have us. LeftOut where others are in one as new as
        ours that has not."""
        newest = MembershipVersion(self.membership.epoch, self.members)
        there = [self._heartbeats[r].membership for r in self.members if r in self._heartbeats]
        if any(now.epoch >= newest.epoch and self.original_rank not in now.members for now in there):
            raise EvictedError
        return max(newest, *there, key=lambda now: now.epoch) if there else newest

    def _leader(self) -> int:
        """The lowest of those who are well, and did not come back since."""
        return min((r for r in self._latest_membership().members if self._is_survivor(r)), default=self.original_rank)

    def _is_survivor(self, rank: int) -> bool:
        return rank == self.original_rank or (self.is_alive(rank) and not self._join_protocol.pending_joins([rank]))

    def _check_leader(self, leader: int) -> None:
        if self._leader() != leader:
            raise CommunicationError(f"rank {leader} leads no more")

    def _lead_reform(self, step: int, deadline: float) -> Membership:
        """Wait until all who are well have reported, and tell them who belongs to us."""
        while True:
            self._check_leader(self.original_rank)
            newest = self._latest_membership()
            reports = self._join_protocol.pending_reports(newest.members)
            reports[self.original_rank] = SurvivorReport(self._join_protocol.next_number(), step, self.membership.epoch)
            waited = [r for r in newest.members if r not in reports and self._is_survivor(r)]
            if not waited:
                break
            if self.active_s > deadline:
                raise CommunicationError(
                    f"rank {', '.join(map(str, waited))} did not report within {self.timeout_s:g} s"
                )
            time.sleep(POLL_S / 4)
        formation = self._next_membership(newest, reports)
        self._join_protocol.send_answers(formation)
        return formation

    def _next_membership(self, latest: MembershipVersion, reports: Mapping[int, SurvivorReport]) -> Membership:
        """The formation of those who reported, where they were in none newer than this."""
        here, before = tuple(sorted(reports)), latest.members
        lost = [r for r in before if r not in here]
        gone = [r for r in lost if r not in self._heartbeats or self._heartbeats[r].exited]
        empty = tuple(r for r in here if reports[r].step < 0)
        ending = find_shutdown_reason(before, here, empty, gone)
        if ending and len(here) > len(empty):  # those who have nothing have nothing to save
            here, empty = tuple(r for r in here if r not in empty), ()
        return Membership(
            epoch=max(latest.epoch, *(report.epoch for report in reports.values())) + 1,
            members=here,
            step=max(report.step for report in reports.values()),
            store_rank=self.original_rank,
            store_prefix=f"again {next(self._attempts)}",
            addresses={r: self.addresses[r] for r in here},
            answered={r: report.number for r, report in reports.items()},
            without_state=empty,
            shutdown_reason=ending,
            partitioned=bool(ending) and len(gone) < len(lost),
        )

    def _follow_leader(self, leader: int, step: int) -> Membership:
        """Report to the leader, and be told."""
        with (
            KVClient(self.addresses[leader], REPLY_TIMEOUT_S) as board,
            self._join_protocol.reporting(board, step, self.membership.epoch) as number,
        ):
            while not (formation := self._join_protocol.read_answer(board, number)):
                self._check_leader(leader)
                time.sleep(POLL_S)
            return formation

    def _adopt_membership(self, membership: Membership) -> None:
        """Meet the others of a formation, and be of it."""
        members, me = membership.members, self.original_rank
        others = tuple(r for r in members if r != me)
        mine = membership.store_rank == me
        self._add_peers(membership.addresses)
        with self._lock:
            self._join_protocol.mark_answered(membership)
            self._group_sockets, self._wait_threads, self._peers, self._hosts_store = set[SocketId](), [], others, mine
        self.store, self.all_ranks = self._server, SingleRankGroup()
        host = self._server if mine else KVClient(membership.addresses[membership.store_rank], self.link_timeout_s)
        self.store = PrefixStore(host, membership.store_prefix)
        if others:
            self.all_ranks = self._new_gloo_group(
                "group", members.index(me), len(members), others, self.make_wait_thread()
            )
        self.launch_info = replace(self.launch_info, rank=members.index(me), size=len(members))
        self._gather_count, self._pair_group_count, self.membership = 0, {}, membership
        if not membership.shutdown_reason:
            self._server.set("now", MembershipVersion(membership.epoch, members).to_json())
        with self._lock:
            self._state = GroupState.READY if others else GroupState.FORMING

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        self._wait_threads.append(super().make_wait_thread(group))
        return self._wait_threads[-1]

    def _new_gloo_group(
        self, name: str, rank: int, size: int, others: Sequence[int], wait_thread: WaitThread | None = None
    ) -> Group:
        """Torch would wait for one who died meanwhile: a thread waits, and we look."""
        found, errors, words = list[Group](), list[CommunicationError](), CancellableStore(self.store)
        patience_s = self.active_s + max(STARTUP_TIMEOUT_S, 3 * self.link_timeout_s)

        def wait() -> None:
            try:
                found.append(new_gloo_group(words, name, rank, size, self.timeout_s, wait_thread))
            except CommunicationError as error:
                errors.append(error)

        thread, not_ours = threading.Thread(target=wait, daemon=True), open_sockets()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_S)
                self.raise_if_broken()
                if self._state is GroupState.FORMING:
                    self._latest_membership()
                if self.active_s > patience_s:
                    raise CommunicationError("not all came to where they were to meet")
        finally:
            words.cancelled = True
            self._group_sockets = self._group_sockets | set(
                filter(self._is_group_socket, open_sockets() - not_ours)
            )  # others may be reading
        if errors:
            raise errors[0]
        return found[0]

    def pair_group(self, other: int) -> Group:
        pair = sorted((self.rank, other))
        number = self._pair_group_count[other] = self._pair_group_count.get(other, 0) + 1
        return self._new_gloo_group(
            f"link/{pair[0]}-{pair[1]}/{number}", pair.index(self.rank), 2, [self.members[other]]
        )

    # taking some back ---------------------------------------------------------------------------------------------

    def request_join(self) -> Membership:
        """Ask all who are there to be let in, and wait for the members among them. This rank comes empty."""
        self.membership = replace(self.membership, epoch=NO_MEMBERSHIP.epoch, members=NO_MEMBERSHIP.members)
        self._server.set("now", NO_MEMBERSHIP.to_json())
        while True:
            self._leave_group()
            formation = self._await_admission()
            with contextlib.suppress(CommunicationError):
                self._adopt_membership(formation)
                return formation

    def _await_admission(self) -> Membership:
        """Knock, until somebody answers. While members are there this takes what it takes: they look once a tick."""
        number, boards = self._join_protocol.next_number(), dict[int, KVClient]()
        deadline = self.active_s + self.timeout_s
        with contextlib.ExitStack() as stack:
            while True:
                there = [r for r in self._heartbeats if self.is_alive(r)]
                if any(self._heartbeats[r].membership.members for r in there):
                    deadline = self.active_s + self.timeout_s
                elif not there or self.active_s > deadline:
                    raise CommunicationError("no member of the run let this rank in")
                for rank in there:
                    with contextlib.suppress(CommunicationError):
                        if rank not in boards:
                            boards[rank] = stack.enter_context(KVClient(self.addresses[rank], REPLY_TIMEOUT_S))
                            self._join_protocol.request_join(boards[rank], number)
                        if formation := self._join_protocol.read_answer(boards[rank], number):
                            return formation
                time.sleep(POLL_S)

    def admit(self, step: int) -> Membership | None:
        """Let in who knocked. All members call this at the same step; it costs them nothing while all are there."""
        if not self.missing_ranks:
            return None
        mine = json.dumps(self._join_protocol.pending_joins(self.missing_ranks))
        knocks = {
            int(r): JoinRequest(*knock) for word in self.all_gather_str(mine) for r, knock in json.loads(word).items()
        }
        if not knocks:
            return None
        addresses = {r: self.addresses[r] for r in self.members}
        addresses |= {r: (knock.host, knock.port) for r, knock in knocks.items()}
        members, host = tuple(sorted(addresses)), min(self.members)
        epoch = self.membership.epoch + 1
        settled = {rank: knock.number for rank, knock in knocks.items()}
        formation = Membership(epoch, members, step, host, f"admit {epoch}", addresses, settled, tuple(knocks))
        self._join_protocol.send_answers(formation)
        with self._lock:
            self._state = GroupState.FORMING
            shutdown_sockets(self._group_sockets)
            for waiter in self._wait_threads:
                waiter.close()
        self._adopt_membership(formation)
        return formation

    # failures and the end -----------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException, step: int | None = None) -> str:
        return f"rank {self.original_rank}{'' if step is None else f', step {step}'}: {error}"

    def close(self) -> None:
        """Leave in good order: nobody hangs up before all are done."""
        with self._lock:
            self._state = GroupState.FORMING
        if self.size > 1:
            with contextlib.suppress(RunError):
                self.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
        self._closed = True
        for watch in self._heartbeats.values():
            watch.stopped = True
        self._server.close()

    def abandon(self) -> None:
        with self._lock:
            self._disconnect(GroupState.BROKEN)


def find_shutdown_reason(
    previous: Sequence[int], present: Sequence[int], without_state: Sequence[int], exited: Sequence[int]
) -> str:
    """Why those who are here are too few to go on, or nothing; some of those who are not are gone for sure."""
    lost = [r for r in previous if r not in present]
    names, missing = ", ".join(map(str, present)), ", ".join(map(str, lost))
    if len(present) == len(without_state):
        return "no rank that has parameters is left"
    if 2 * len(present) <= len(previous) - len(exited):
        return f"rank {missing} cannot be reached, and rank {names} {'is' if len(present) == 1 else 'are'} no majority"
    if len(present) == 1:
        return f"rank {missing} {'is' if len(lost) == 1 else 'are'} gone: every other rank"
    return ""
