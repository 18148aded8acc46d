"""Links are measured between ranks, equally many on each host."""

from __future__ import annotations

from unittest import mock

from advice import advises
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.plan import measure_links as module
from paragan.plan.measure_links import measure_links


def test_one_rank_has_no_links_and_two_have(pool):
    with advises("one rank has no links. Start several: with a launcher, or with --ranks 2"):
        measure_links(World.solo())
    links = pool(2, lambda world: measure_links(world, quick=True))
    assert [(one.hosts, one.ranks) for one in links] == [(1, 2)] * 2


def test_hosts_have_equally_many_ranks(pool):
    def measured(hosts):
        def job(world):
            with mock.patch.object(module, "_host_id", return_value=hosts[world.rank]):
                try:
                    return measure_links(world, quick=True)
                except UsageError as error:
                    return error

        results = pool(len(hosts), job)
        for result in results:
            if isinstance(result, UsageError):
                raise result
        return results

    with advises("WORLD_SIZE=3: hosts have different numbers of ranks (2, 1). Start equally many on each"):
        measured("aab")
    assert [(links.hosts, links.ranks_per_host) for links in measured("ab")] == [(2, 1)] * 2
