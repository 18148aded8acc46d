"""Requests between ranks when a membership changes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paragan.comm.elastic import elastic_world
from paragan.comm.elastic.elastic_world import ElasticWorld
from paragan.comm.elastic.kv_store import KVClient, KVServer
from paragan.comm.elastic.membership import Membership
from paragan.comm.elastic.rejoin import JoinProtocol


class ProtocolRank:
    """A process of a rank that knows the stores of the others."""

    def __init__(self, rank: int):
        self.rank, self.server = rank, KVServer("127.0.0.1")
        self.addresses = {rank: self.server.address}
        self.protocol = JoinProtocol(rank, self.server, self.addresses)

    def answer(self, numbers: dict[int, int]) -> None:
        """Answer the requests of these numbers with a membership."""
        membership = Membership(1, (0, 1), 1, 0, "", dict(self.addresses), numbers)
        self.protocol.send_answers(membership)
        self.protocol.mark_answered(membership)

    def report_to(self, other: ProtocolRank) -> int:
        """Report to another rank, which confirms that the report is waited for. Returns its number."""
        other.addresses[self.rank] = self.server.address
        with (
            KVClient(other.server.address, 5) as client,
            self.protocol.reporting(client, step=1, epoch=0, generation=0) as number,
        ):
            assert set(other.protocol.pending_reports([self.rank])) == {self.rank}
        return number

    def join(self, other: ProtocolRank) -> int:
        """Ask another rank to join. Returns the number of the request."""
        number = self.protocol.next_number()
        with KVClient(other.server.address, 5) as client:
            self.protocol.request_join(client, number)
        other.addresses[self.rank] = other.protocol.pending_joins([self.rank])[self.rank].address
        return number


@pytest.fixture
def ranks() -> Iterator[list[ProtocolRank]]:
    ranks = [ProtocolRank(0), ProtocolRank(1), ProtocolRank(1)]
    yield ranks
    for rank in ranks:
        rank.server.close()


@pytest.mark.parametrize("answered", [False, True])
def test_the_report_of_a_killed_process_is_void_when_its_rank_comes_back(answered, ranks):
    """Else its leader takes the rank that it has just admitted for one that leaves the group, again and again."""
    leader, killed, successor = ranks
    number = killed.report_to(leader)
    if answered:
        leader.answer({1: number})
    killed.server.close()
    leader.answer({1: successor.join(leader)})
    assert not leader.protocol.pending_reports([1])
    assert not leader.protocol.pending_joins([1])


def test_requests_count_until_they_or_later_ones_are_answered(ranks):
    leader, member, _ = ranks
    earlier = member.join(leader)
    later = member.join(leader)
    assert leader.protocol.pending_joins([1])[1].number == later > earlier
    leader.answer({1: earlier})
    assert leader.protocol.pending_joins([1])
    leader.answer({1: later})
    assert not leader.protocol.pending_joins([1])
    leader.answer({1: earlier})  # read late
    assert not leader.protocol.pending_joins([1])


def test_who_joins_learns_which_requests_in_its_store_the_others_have_answered(ranks):
    """Else a rank that was left out while another one joined would take that one for lost."""
    member, joined, _ = ranks
    left_out = ProtocolRank(2)
    number = joined.join(member)
    with KVClient(left_out.server.address, 5) as client:
        joined.protocol.request_join(client, number)
    member.answer({1: number})
    assert left_out.protocol.pending_joins([1])
    answered = member.protocol.answered_numbers([0, 1])
    assert answered == {1: number}
    left_out.answer(answered | {2: left_out.join(member)})
    assert not left_out.protocol.pending_joins([1])
    joined.join(left_out)  # lost again
    assert left_out.protocol.pending_joins([1])
    left_out.server.close()


def test_full_collections_of_garbage_skip_what_was_imported(pool):
    """They stop all threads: a rank that they stop for long would be taken for lost."""

    def job(world):
        gc.unfreeze()
        elastic_world._freeze_imports.cache_clear()
        ElasticWorld(world.launch_info, world.device, "127.0.0.1", 5, 1, 2).close()
        return gc.get_freeze_count(), len(gc.get_objects())

    [(frozen, collected)] = pool(1, job)
    assert frozen > 10 * collected
