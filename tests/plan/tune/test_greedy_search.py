"""Which switches are taken, by a worker whose times are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from paragan.plan.tune.greedy_search import Option, Overrides, TrialTimes, is_faster, tune_greedily

WIGGLE = (1.0, 1.004, 0.996, 1.002, 0.998, 1.0, 1.001)  # of a round to the next


def worker(seconds: Callable[[Overrides], float], start: Callable[[Overrides], float] = lambda layout: 0.0):
    """Times that are known; a contestant's rounds wiggle out of step with its neighbor's."""

    def trial(layouts: Sequence[Overrides]) -> list[TrialTimes]:
        turned = [WIGGLE[i % 7 :] + WIGGLE[: i % 7] for i in range(len(layouts))]
        return [TrialTimes([seconds(x) * w for w in private], start(x)) for x, private in zip(layouts, turned)]

    return trial


def switches(*names: str, values: Sequence[object] = (0, 1), built: bool = False) -> list[Option]:
    return [Option(name, tuple({name: value} for value in values), built) for name in names]


def times(**gain: float) -> Callable[[Overrides], float]:
    """Each switch that is on multiplies the time by its own factor."""

    def seconds(layout: Overrides) -> float:
        product = 1.0
        for name, factor in gain.items():
            product *= factor if layout[name] else 1.0
        return product

    return seconds


def test_accepted_switches_report_their_share():
    result = tune_greedily(switches("a", "b", "c"), worker(times(a=0.5, b=1.3, c=0.8)))
    assert result.overrides == {"a": 1, "b": 0, "c": 1}
    assert result.slowdown_without == pytest.approx({"a": 2.0, "c": 1.25}, rel=0.02)
    assert result.speedup == pytest.approx(2.5, rel=0.02)


def test_within_noise_the_default_is_chosen():
    result = tune_greedily(switches("a", "b"), worker(times(a=0.99, b=1.0)))
    assert (result.overrides, result.slowdown_without, result.speedup) == ({"a": 0, "b": 0}, {}, 1.0)


def test_a_switch_that_needs_another_is_tried_after_it():
    def seconds(layout: Overrides) -> float:  # b is good with a alone, and comes before it
        return {(0, 0): 1.0, (1, 0): 1.1, (0, 1): 0.8, (1, 1): 0.5}[layout["b"], layout["a"]]

    result = tune_greedily(switches("b", "a"), worker(seconds))
    assert result.overrides == {"a": 1, "b": 1}


def test_a_switch_that_another_makes_worthless_goes_back():
    def seconds(layout: Overrides) -> float:
        return 0.5 if layout["b"] else 0.8 if layout["a"] else 1.0

    assert tune_greedily(switches("a", "b"), worker(seconds)).overrides == {"a": 0, "b": 1}


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_slower_than_the_best_of_all_by_more_than_noise(seed):
    """Where what switches are worth multiplies, one after another finds the best of all."""
    gain = {name: 0.7 + ((seed + 3) * (i + 5) * 37 % 61) / 100 for i, name in enumerate("abcde")}
    seconds = times(**gain)
    result = tune_greedily(switches(*gain), worker(seconds))
    best = min(seconds(dict(zip(gain, on))) for on in itertools.product((0, 1), repeat=5))
    assert seconds(result.overrides) <= best * 1.03**2


def test_one_of_several_choices():
    seconds = {True: 1.0, "G": 0.9, "D": 0.6, False: 0.7}
    result = tune_greedily(switches("a", values=(True, "G", "D", False)), worker(lambda layout: seconds[layout["a"]]))
    assert result.overrides == {"a": "D"}


@pytest.mark.parametrize(("rounds", "read_batches"), [(100, 0), (1000, 1)])
def test_what_is_built_has_to_be_paid_back(rounds, read_batches):
    trial = worker(times(a=0.9), lambda layout: 30.0 * layout["a"])
    assert tune_greedily(switches("a", built=True), trial, rounds).overrides == {"a": read_batches}


def test_no_other_switch_is_tried_in_a_built_layout():
    """Building takes long: no other switch is tried in what was built."""
    tried, trial = [], worker(times(a=0.5, b=0.8, c=1.3))

    def watched(layouts: Sequence[Overrides]) -> list[TrialTimes]:
        tried.extend(layouts)
        return trial(layouts)

    result = tune_greedily([*switches("b", built=True), *switches("a", "c")], watched)
    assert result.overrides == {"a": 1, "b": 1, "c": 0}
    assert result.slowdown_without == pytest.approx({"a": 2.0, "b": 1.25}, rel=0.02)
    assert all((layout["a"], layout["c"]) == (1, 0) for layout in tried if layout["b"])


def test_inconsistent_rounds_are_inconclusive():
    one, other = TrialTimes([1.0, 1.0, 1.0, 1.0]), TrialTimes([0.5, 0.5, 1.5, 1.5])
    assert not is_faster(other, one)
    assert is_faster(TrialTimes([0.5] * 4), one)
