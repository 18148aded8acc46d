import pytest

from benchmarks.quality.images_needed import images_factor, measured_tables
from paragan.plan.select import learning_cost
from paragan.plan.select.candidates import parse_strategy
from paragan.plan.select.learning_cost import images_needed, interpolate

CURVE = [(10, 4.0), (20, 2.0), (40, 1.0)]


def test_the_tables_are_those_of_the_results():
    measured = measured_tables()
    assert {name: getattr(learning_cost, name) for name in measured} == measured


@pytest.mark.parametrize(("fd", "factor"), [(0.9, 1), (1.0, 1), (1.5, 40 / 30), (2.0, 2), (3.0, 40 / 15), (9.0, 4)])
def test_a_distance_is_worth_the_images_with_which_the_rival_had_it(fd, factor):
    assert images_factor(fd, CURVE) == pytest.approx(factor)


def test_tables_are_interpolated_and_end_with_their_last_row():
    table = {1: 1.0, 3: 3.0, 7: 4.0}
    assert [interpolate(table, x) for x in (0, 1, 3, 7, 100)] == [1, 1, 3, 4, 4]
    assert interpolate(table, 2**1.5 - 1) == pytest.approx(2)


def test_what_is_exact_costs_nothing_and_properties_are_multiplied(monkeypatch):
    monkeypatch.setitem(learning_cost.PERIOD_FACTORS["parameters"], 2, 1.5)
    monkeypatch.setitem(learning_cost.WIRE_FACTORS, "sign", 2.0)
    monkeypatch.setitem(learning_cost.GOSSIP_FACTORS, 4, 3.0)
    monkeypatch.setitem(learning_cost.DELAY_FACTORS, 8, 5.0)

    def needed(name, ranks=4):
        return images_needed(parse_strategy(name), ranks, 0.0)

    assert needed("sync") == needed("sync+bf16") == needed("CPOAdam") == 1
    assert needed("sync+sign+sync_period=2") == 3
    assert needed("gossip+sync_period=2") == 4.5
    assert needed("gossip+sync_period=2", ranks=1) == 1
    period = needed("sync+sync_period=32")
    assert needed("sync+sync_period=32+fragments=4+delay=8") == 5 * period
    assert needed("sync+sync_period=32+fragments=4") == period
    assert needed("sync+sync_period=32+delay=8", ranks=1) == 1


def test_only_accumulation_costs_images_where_gradients_are_not_exchanged():
    """On one rank, and on two of which one trains G and one D."""

    def needed(name, ranks):
        return images_needed(parse_strategy(name), ranks, 0.0)

    accumulated = "sync+sync_period=2+sync_mode=accumulate"
    assert needed(accumulated, 1) == needed(accumulated, 4) > 1
    teams = needed("async+split=1:1", 2)
    assert needed("async+split=1:1+sync_period=2", 2) == teams
    assert needed("async+split=1:1+sign", 2) == teams
    assert needed("async+split=1:1+sync_period=2+sync_mode=accumulate", 2) > teams
    assert needed("async+split=2:2+sync_period=2", 4) > teams
