"""A world that continues without the ranks it loses, and takes them back.

No rank is special. Every rank serves a key-value store (elastic/kv_store.py), so any survivor can lead. Whether the
others are alive is asked periodically (elastic/liveness.py).

When a rank is lost, every rank closes the connections of the group (so that all notice), reports to the lowest rank
that is alive, and gets the next `Membership` from it: which ranks belong to it, and from which step on they continue.
The members must be more than half of the former ones that are not known to have exited. A rank that was left out
(frozen, out of reach, or killed and started again) asks all it can reach to join; the members admit it at a step they
agree on.

Ranks may notice a loss at different times, and a frozen one may wake at any moment. So no rank waits without checking
again which rank leads, which memberships the others are in, and which ranks report to it. If these contradict each
other, the attempt fails with CommunicationError and is repeated.

A rank reports with the step that it can continue with, and with its generation: how often ranks had agreed on the
parameters that it has. A round may have ended on some survivors and broken on others. Those of the highest generation
keep their parameters; the others get them from a member that has them, as ranks that join do.

The loop around it is train/elastic_loop.py.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from paragan.comm.elastic.group_connections import Ports, connections_of_group, connections_since
from paragan.comm.elastic.kv_store import CancellableStore, KVClient, KVServer, PrefixStore, ServerAddress
from paragan.comm.elastic.liveness import HEARTBEAT_PERIOD_S, STARTUP_TIMEOUT_S, Liveness
from paragan.comm.elastic.membership import MEMBERSHIP_KEY, NO_MEMBERSHIP, Membership, MembershipVersion
from paragan.comm.elastic.rejoin import REPLY_TIMEOUT_S, JoinProtocol, JoinRequest, SurvivorReport
from paragan.comm.elastic.survivors import continue_from, find_shutdown_reason, has_majority
from paragan.comm.host_staging import staged_on_host
from paragan.comm.launch_info import LaunchInfo, master_address
from paragan.comm.lost_ranks import describe_lost
from paragan.comm.process_group import POLL_S, CommunicationError, Group, SingleRankGroup, WaitThread, new_gloo_group
from paragan.comm.rendezvous import rendezvous
from paragan.comm.sockets import (
    SocketId,
    block_new_connections,
    is_closed,
    is_listening,
    local_address_towards,
    open_sockets,
    shutdown_sockets,
)
from paragan.comm.store_port import describe_ends
from paragan.comm.world import FAULT_WINDOW_S, World
from paragan.core.errors import RunError

CANCELLED_KEY = "cancelled"  # set in the store of a group that is not to be used any more
DRAIN_S = 0.1  # for the threads of a broken group to stop writing what had arrived for it


@functools.cache
def _freeze_imports() -> None:
    """Let garbage collection skip all objects that exist now, once per process.

    A full collection stops all threads. With what torch imports, it takes tenths of a second, and longer where
    processes share cores: the others, whose heartbeats are not answered meanwhile, would take this rank for lost.
    """
    gc.freeze()


class QuorumLostError(RunError):
    """Too few ranks remain to continue: a last checkpoint is to be written."""


class EvictedError(CommunicationError):
    """The others continued without this rank."""


class GroupState(enum.Enum):
    """State of the process group that a rank is in."""

    FORMING = "no usable group; failures are expected"
    READY = "in use; when a rank is lost its connections are closed"
    BROKEN = "a rank was lost; no rank may wait for a message"


class ElasticWorld(World):
    """A world on gloo whose ranks may be lost and come back.

    `launch_info` and `all_ranks` change with every membership.

    original_rank  : the number with which this rank was started, below `initial_size`
    joined_late    : whether it joined a run that was already training
    liveness       : which other ranks are alive
    min_ranks      : with how many ranks it continues at least
    membership     : which ranks belong to the world now

    unreachable_joiners : ranks that asked to join when `admit` was called, at addresses that this rank does not reach
    """

    is_elastic: ClassVar[bool] = True

    def __init__(
        self,
        launch_info: LaunchInfo,
        device: torch.device,
        address: str,
        timeout_s: float,
        link_timeout_s: float,
        min_ranks: int,
    ):
        _freeze_imports()
        self._server = KVServer(address)
        super().__init__(launch_info, device, self._server, SingleRankGroup(), timeout_s)
        self.original_rank = launch_info.rank
        self.joined_late = False
        self.liveness = Liveness(self.original_rank, self._server.address, link_timeout_s)
        self.min_ranks = min_ranks
        self.membership = Membership(-1, (), 0, self.original_rank, "", {}, {})
        self._state = GroupState.FORMING
        self._lock = threading.Lock()
        self._wait_threads: list[WaitThread] = []  # those that wait for its messages
        self._peers: tuple[int, ...] = ()  # its other ranks, also while it is being formed
        self._hosts_store = False  # whether it is formed by this rank's store
        self.unreachable_joiners: dict[int, ServerAddress] = {}
        self._unresponsive_ranks = set[int]()  # whose stores answer, and which did not lead the others on in time
        self._join_protocol = JoinProtocol(self.original_rank, self._server, self.liveness.addresses)
        self._attempts = itertools.count(1)
        self._closed = False
        self._rendezvous_store: Any = None
        self._store_clients = list[str]()  # the ranks' ends of their connections to the rendezvous store
        threading.Thread(target=self._monitor_peers, daemon=True, name="elastic").start()

    @staticmethod
    def start(
        launch_info: LaunchInfo,
        device: torch.device,
        timeout_s: float,
        link_timeout_s: float,
        env: Mapping[str, str] = os.environ,
        min_ranks: int = 2,
    ) -> ElasticWorld:
        """Form the world of all ranks, which find each other at MASTER_ADDR. It is not needed later.

        Args:
            launch_info: this process.
            device: of its networks.
            timeout_s: of the rendezvous, and of every collective.
            link_timeout_s: how long a rank may be silent until it counts as lost.
            env: has MASTER_ADDR and MASTER_PORT.
            min_ranks: with how many ranks it continues at least.

        Raises:
            CommunicationError: a rank is missing.
            RunError: the group could not be formed.
        """
        rendezvous_store, connections, store_port = rendezvous(
            launch_info, env, timeout_s, "strategies that survive lost ranks"
        )
        local_host = local_address_towards(master_address(env))
        world = ElasticWorld(launch_info, device, local_host, timeout_s, link_timeout_s, min_ranks)
        world._rendezvous_store = rendezvous_store  # keeps it open: other ranks may still read from it
        world.store = PrefixStore(rendezvous_store, "paragan/" + env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        addresses: dict[int, ServerAddress] = {}
        for rank, text in enumerate(world.all_gather_str(json.dumps(world._server.address))):
            addresses[rank] = ServerAddress(*json.loads(text))
        world._store_port = store_port
        world._store_clients = world.all_gather_str(describe_ends(connections))
        try:
            world._adopt_membership(Membership(0, tuple(addresses), 0, 0, "start", addresses, {}))
        except CommunicationError as error:
            raise RunError(
                f"rank {launch_info.rank} could not start with the others: {error}. If they are still running from an "
                "earlier start, end them, or use another MASTER_PORT"
            ) from error
        return world

    @staticmethod
    def join_run(
        launch_info: LaunchInfo,
        device: torch.device,
        timeout_s: float,
        link_timeout_s: float,
        addresses: Mapping[int, ServerAddress],
        min_ranks: int = 2,
    ) -> ElasticWorld | None:
        """Join a run that is already training.

        Args:
            launch_info: this process.
            device: of its networks.
            timeout_s: of every collective.
            link_timeout_s: how long a rank may be silent until it counts as lost.
            addresses: of the stores of the run's members, by their original rank.
            min_ranks: with how many ranks it continues at least.

        Returns:
            The world, or None if none of the members can be reached.
        """
        others = {rank: at for rank, at in addresses.items() if rank != launch_info.rank}
        reachable = {rank: at for rank, at in others.items() if is_listening(at.host, at.port)}
        if not reachable:
            return None
        local_host = local_address_towards(next(iter(reachable.values()))[:2])
        world = ElasticWorld(launch_info, device, local_host, timeout_s, link_timeout_s, min_ranks)
        world.joined_late = True
        world.liveness.add(reachable)
        world.request_join()
        return world

    def close_rendezvous(self) -> None:
        """Close the port of the rendezvous: from now on, ranks that come find the run by its folder."""
        if self._store_port:
            self._store_port.close_to_strangers(self._store_clients)

    # which ranks are alive ----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The original numbers of the ranks that belong to the world."""
        return self.membership.members

    @property
    def original_ranks(self) -> tuple[int, ...]:
        """The same: the numbers with which its ranks were started, in rank order."""
        return self.membership.members

    @property
    def membership_epoch(self) -> int:
        """The epoch of the membership."""
        return self.membership.epoch

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The original numbers of the ranks that do not belong to it now."""
        return tuple(r for r in range(self.initial_size) if r not in self.members)

    def _monitor_peers(self) -> None:
        """Close the connections of the group when a member is lost, so that no exchange waits for it."""
        while not self._closed:
            time.sleep(HEARTBEAT_PERIOD_S)
            self.liveness.add_time(HEARTBEAT_PERIOD_S)
            with self._lock:
                if self._state is GroupState.READY and (
                    self._failure_reason() or any(map(is_closed, self._group_sockets))
                ):
                    self._disconnect(GroupState.BROKEN)

    def _failure_reason(self) -> str:
        """Return why the group must be left; empty if it is intact."""
        if lost := [r for r in self._peers if not self.liveness.is_alive(r)]:
            return f"rank {', '.join(map(str, lost))} does not answer"
        if reporting := self._join_protocol.pending_reports(self._peers):
            return f"process group aborted by rank {', '.join(map(str, reporting))}"
        return ""

    def raise_if_broken(self) -> None:
        """Raise CommunicationError if a rank of the group is lost, or has left it."""
        if reason := self._failure_reason():
            raise CommunicationError(reason)
        if self._state is GroupState.BROKEN or (not self._hosts_store and self.store.check([CANCELLED_KEY])):
            raise CommunicationError("process group aborted: a peer was lost")

    def _disconnect(self, state: GroupState) -> None:
        self._state = state
        shutdown_sockets(self._group_sockets)
        for thread in self._wait_threads:
            thread.abandon()

    # continuing without lost ranks --------------------------------------------------------------------------------

    def reform(self, step: int, generation: int = 0) -> Membership:
        """Leave the broken group, and form one of the surviving ranks.

        A rank that was left out asks to join, and comes back without state.

        Args:
            step: the round that this rank can continue with; -1: it has no parameters.
            generation: how often ranks had agreed on the parameters that it has.

        Raises:
            QuorumLostError: too few ranks remain. If they include this one, they are a group for a last checkpoint.
            CommunicationError: no group was formed within the timeout.
        """
        deadline = self.liveness.active_s + self.timeout_s
        self._unresponsive_ranks.clear()
        self._leave_group()
        self.liveness.check_now()
        time.sleep(DRAIN_S)
        while True:
            unresponsive_before = set(self._unresponsive_ranks)
            self._leave_group()
            try:
                leader = self._leader()
                if leader == self.original_rank:
                    membership = self._lead_reform(step, generation, deadline)
                else:
                    membership = self._follow_leader(leader, step, generation, deadline + self.timeout_s)
                if self.original_rank not in membership.members:
                    raise QuorumLostError(f"the other ranks stop: {membership.shutdown_reason}")
                self._adopt_membership(membership)
                break
            except EvictedError:
                return self.request_join()
            except CommunicationError:
                if self._unresponsive_ranks - unresponsive_before:
                    deadline = self.liveness.active_s + self.timeout_s  # with another leader
                elif self.liveness.active_s > deadline:
                    raise
                time.sleep(POLL_S)
        if membership.shutdown_reason:
            raise QuorumLostError(membership.shutdown_reason)
        return membership

    def _leave_group(self) -> None:
        """Leave the group, also one that is being formed, and make all who wait for its messages fail."""
        with self._lock:
            self._disconnect(GroupState.FORMING)
        if self._hosts_store:
            self.store.set(CANCELLED_KEY, "")

    def _latest_membership(self) -> MembershipVersion:
        """Return the newest membership that a member is in.

        Raises:
            EvictedError: a member is in one without this rank that is at least as new as ours.
        """
        local = MembershipVersion(self.membership.epoch, self.members)
        others = self.liveness.versions(self.members)
        if any(version.epoch >= local.epoch and self.original_rank not in version.members for version in others):
            raise EvictedError("the other ranks continued without this one")
        return max([local, *others], key=lambda version: version.epoch)

    def _leader(self) -> int:
        """Return the lowest surviving rank."""
        return min((r for r in self._latest_membership().members if self._is_survivor(r)), default=self.original_rank)

    def _is_survivor(self, rank: int) -> bool:
        """Return whether a rank is alive, and not one that was lost and asks to join again."""
        if rank == self.original_rank:
            return True
        is_present = self.liveness.is_alive(rank) and rank not in self._unresponsive_ranks
        return is_present and not self._join_protocol.pending_joins([rank])

    def _check_leader(self, leader: int) -> None:
        if self._leader() != leader:
            raise CommunicationError(f"leader changed while reporting (was rank {leader})")

    def _lead_reform(self, step: int, generation: int, deadline: float) -> Membership:
        """Wait until all survivors have reported, and send them the next membership.

        A minority that has not reported by the deadline is left out: their stores answer, and their training hangs.
        """
        while True:
            self._check_leader(self.original_rank)
            latest = self._latest_membership()
            reports = self._join_protocol.pending_reports(latest.members)
            number = self._join_protocol.next_number()
            reports[self.original_rank] = SurvivorReport(number, step, self.membership.epoch, generation)
            missing = [r for r in latest.members if r not in reports and self._is_survivor(r)]
            if not missing:
                break
            if self.liveness.active_s > deadline:
                if has_majority(latest.members, tuple(reports), ()):
                    break
                raise CommunicationError(
                    f"rank {', '.join(map(str, missing))} did not report within {self.timeout_s:g} s"
                )
            time.sleep(POLL_S / 4)
        membership = self._next_membership(latest, reports)
        self._join_protocol.send_answers(membership)
        return membership

    def _next_membership(self, latest: MembershipVersion, reports: Mapping[int, SurvivorReport]) -> Membership:
        """Return the membership of the ranks that reported; `latest` is the newest that any of them was in."""
        members = tuple(sorted(reports))
        lost = [r for r in latest.members if r not in members]
        # Those that ask to join again have given up their membership, like those whose processes have ended.
        exited = [r for r in lost if self.liveness.has_exited(r) or self._join_protocol.pending_joins([r])]
        without_state = tuple(r for r in members if reports[r].step < 0)
        shutdown_reason = find_shutdown_reason(latest.members, members, without_state, exited, self.min_ranks)
        if shutdown_reason and len(members) > len(without_state):  # ranks without state have nothing to save
            members = tuple(r for r in members if r not in without_state)
        step, without_state = continue_from({r: reports[r] for r in members})
        return Membership(
            epoch=max(latest.epoch, *(report.epoch for report in reports.values())) + 1,
            members=members,
            step=step,
            store_rank=self.original_rank,
            store_prefix=f"reform {next(self._attempts)}",
            addresses={r: self.liveness.addresses[r] for r in members},
            answered={r: report.number for r, report in reports.items()},
            without_state=without_state,
            shutdown_reason=shutdown_reason,
            partitioned=bool(shutdown_reason) and not has_majority(latest.members, members, exited),
            after_loss=True,
        )

    def _follow_leader(self, leader: int, step: int, generation: int, deadline: float) -> Membership:
        """Report to the leader, and wait for the next membership. After the deadline another rank is to lead."""
        with (
            KVClient(self.liveness.addresses[leader], REPLY_TIMEOUT_S) as client,
            self._join_protocol.reporting(client, step, self.membership.epoch, generation) as number,
        ):
            while not (membership := self._join_protocol.read_answer(client, number)):
                self._check_leader(leader)
                if self.liveness.active_s > deadline:
                    self._unresponsive_ranks.add(leader)
                    raise CommunicationError(f"rank {leader} did not answer a report in time")
                time.sleep(POLL_S)
            return membership

    def _adopt_membership(self, membership: Membership) -> None:
        """Form the group of a membership, and make it this world's."""
        members = membership.members
        rank = members.index(self.original_rank)
        peers = tuple(r for r in members if r != self.original_rank)
        self.liveness.add(membership.addresses)
        with self._lock:
            self._join_protocol.mark_answered(membership)
            self._group_sockets = set[SocketId]()
            self._wait_threads = []
            self._peers = peers
            self._hosts_store = membership.store_rank == self.original_rank
        self.store = self._server
        self.all_ranks = SingleRankGroup()
        if self._hosts_store:
            self.store = PrefixStore(self._server, membership.store_prefix)
        else:
            client = KVClient(membership.addresses[membership.store_rank], self.liveness.timeout_s)
            self.store = PrefixStore(client, membership.store_prefix)
        if peers:
            self.all_ranks = self._new_gloo_group("group", rank, len(members), peers, self.make_wait_thread())
        self.launch_info = replace(self.launch_info, rank=rank, size=len(members))
        self._gather_count = 0
        self._pair_group_count = {}
        self.membership = membership
        if not membership.shutdown_reason:
            self._server.set(MEMBERSHIP_KEY, MembershipVersion(membership.epoch, members).to_json())
        with self._lock:
            self._state = GroupState.READY if peers else GroupState.FORMING

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        """Return a thread that waits for the messages of a group; it is cancelled when the world's group is aborted."""
        self._wait_threads.append(super().make_wait_thread(group))
        return self._wait_threads[-1]

    def _new_gloo_group(
        self, name: str, rank: int, size: int, others: Sequence[int], wait_thread: WaitThread | None = None
    ) -> Group:
        """Form a group in a thread, since torch would wait for a rank that dies meanwhile.

        others: the original numbers of its other ranks.
        """
        store = CancellableStore(self.store)
        deadline = self.liveness.active_s + max(STARTUP_TIMEOUT_S, 3 * self.liveness.timeout_s)
        formed: list[tuple[Group, set[SocketId]]] = []  # the group and its connections
        errors: list[CommunicationError] = []

        def candidates() -> dict[SocketId, Ports]:
            return connections_since(sockets_before, [address.port for address in self.liveness.addresses.values()])

        def form_group() -> None:
            try:
                group = new_gloo_group(store, name, rank, size, self.timeout_s, wait_thread)
                connections = connections_of_group(store, name, rank, size, candidates())
                formed.append((staged_on_host(group, self.device), connections))
            except CommunicationError as error:
                errors.append(error)

        sockets_before = open_sockets()
        thread = threading.Thread(target=form_group, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_S)
                self.raise_if_broken()
                if self._state is GroupState.FORMING:
                    self._latest_membership()
                if self.liveness.active_s > deadline:
                    names = ", ".join(map(str, others))
                    raise CommunicationError(f"timed out forming the process group with rank {names}")
        finally:
            store.cancelled = True
            block_new_connections(open_sockets() - sockets_before)
            new_sockets = formed[0][1] if formed else set(candidates())
            self._group_sockets = self._group_sockets | new_sockets  # not in place: another thread iterates over it
        if errors:
            raise errors[0]
        return formed[0][0]

    def pair_group(self, other: int) -> Group:
        """Form a gloo group of this rank and another one; see `World.pair_group`."""
        pair = sorted((self.rank, other))
        number = self._pair_group_count[other] = self._pair_group_count.get(other, 0) + 1
        name = f"pair/{pair[0]}-{pair[1]}/{number}"
        return self._new_gloo_group(name, pair.index(self.rank), 2, [self.members[other]], self.make_wait_thread())

    # taking ranks back --------------------------------------------------------------------------------------------

    def request_join(self) -> Membership:
        """Ask all reachable ranks to join, and wait until the members among them admit this rank, without state.

        Raises:
            CommunicationError: there is no member to wait for.
        """
        self.membership = replace(self.membership, epoch=NO_MEMBERSHIP.epoch, members=NO_MEMBERSHIP.members)
        self._server.set(MEMBERSHIP_KEY, NO_MEMBERSHIP.to_json())
        while True:
            self._leave_group()
            membership = self._await_admission()
            with contextlib.suppress(CommunicationError):
                self._adopt_membership(membership)
                return membership

    def _await_admission(self) -> Membership:
        """Ask to join until a rank answers. There is no limit while a member is alive: members check once a tick."""
        number = self._join_protocol.next_number()
        clients: dict[int, KVClient] = {}
        deadline = self.liveness.active_s + self.timeout_s
        with contextlib.ExitStack() as stack:
            while True:
                alive = self.liveness.alive_ranks()
                if any(version.members for version in self.liveness.versions(alive)):
                    deadline = self.liveness.active_s + self.timeout_s
                elif not alive or self.liveness.active_s > deadline:
                    raise CommunicationError("no member of the run admitted this rank")
                for rank in alive:
                    with contextlib.suppress(CommunicationError):
                        if rank not in clients:
                            clients[rank] = stack.enter_context(
                                KVClient(self.liveness.addresses[rank], REPLY_TIMEOUT_S)
                            )
                            self._join_protocol.request_join(clients[rank], number)
                        if membership := self._join_protocol.read_answer(clients[rank], number):
                            return membership
                time.sleep(POLL_S)

    def admit(self, step: int) -> Membership | None:
        """Admit the ranks that ask to join. All members call this at the same step; it is free while none is missing.

        Returns:
            The new membership, which this world has adopted; None if no rank asks.

        Raises:
            CommunicationError: a rank was lost meanwhile, or the others took this one for lost.
        """
        if not self.missing_ranks:
            return None
        requests = self._gather_joins()
        if not requests:
            return None
        addresses = {r: self.liveness.addresses[r] for r in self.members}
        addresses |= {r: request.address for r, request in requests.items()}
        epoch = self.membership.epoch + 1
        # The store of a rank that joins may have requests of members to join, which were answered while it was away.
        answered = self._join_protocol.answered_numbers(self.members)
        membership = Membership(
            epoch=epoch,
            members=tuple(sorted(addresses)),
            step=step,
            store_rank=min(self.members),
            store_prefix=f"admit {epoch}",
            addresses=addresses,
            answered=answered | {rank: request.number for rank, request in requests.items()},
            without_state=tuple(requests),
        )
        self._join_protocol.send_answers(membership)
        with self._lock:
            self._state = GroupState.FORMING
            shutdown_sockets(self._group_sockets)
            for thread in self._wait_threads:
                thread.close()
        self._adopt_membership(membership)
        return membership

    def _gather_joins(self) -> dict[int, JoinRequest]:
        """Return the requests to join that have reached all members, of ranks that all members reach."""
        pending = self._join_protocol.pending_joins(self.missing_ranks)
        reachable = {rank: request for rank, request in pending.items() if is_listening(request.host, request.port)}
        self.unreachable_joiners = {rank: request.address for rank, request in (pending.items() - reachable.items())}
        rows = [json.loads(text) for text in self.all_gather_str(json.dumps(reachable))]
        return {rank: r for rank, r in reachable.items() if all(row.get(str(rank)) == list(r) for row in rows)}

    # failures and the end -----------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException, step: int | None = None) -> str:
        """Return one line with this rank, the step if it is known, and the reason: which rank was lost, if one was."""
        where = f"rank {self.original_rank}" if step is None else f"rank {self.original_rank}, step {step}"
        lost = self._find_lost_ranks() if isinstance(error, CommunicationError) else ""
        return f"{where}: {error}: {lost}" if lost and lost not in str(error) else f"{where}: {error}"

    def _find_lost_ranks(self) -> str:
        """Return which ranks were lost, after a connection broke. They are known a little later than that."""
        deadline = time.monotonic() + FAULT_WINDOW_S
        while time.monotonic() < deadline:
            if lost := describe_lost(self._peers):
                return lost
            if exited := [rank for rank in self._peers if not self.liveness.is_alive(rank)]:
                return f"rank {', '.join(map(str, exited))} does not answer"
            time.sleep(POLL_S)
        return ""

    def close(self) -> None:
        """Leave in good order: no rank closes its connections before all have finished."""
        with self._lock:
            self._state = GroupState.FORMING
        if self.size > 1:
            with contextlib.suppress(RunError):
                self.all_ranks.all_reduce_sum(torch.zeros(1)).wait()
        self._closed = True
        self.liveness.stop()
        self._server.close()
        if self._store_port:
            self._store_port.close()

    def abandon(self) -> None:
        """Leave after a failure: close the connections, so that the others notice."""
        with self._lock:
            self._disconnect(GroupState.BROKEN)
