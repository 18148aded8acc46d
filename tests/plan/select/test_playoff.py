"""Strategies that a plan finds about as fast play, and the clock decides."""

import pytest

import fake_profiles
from paragan.core.schema import read_yaml
from paragan.plan.links import parse_links
from paragan.plan.predict.predict import Prediction
from paragan.plan.select import learning_cost, playoff
from paragan.plan.select.candidates import Candidate, parse_strategy
from paragan.plan.select.compare import Goal, compare_strategies

LINKS = parse_links("4 hosts, 100 Mbit/s, 10 ms")
SPENT = {"compute": 0.05, "codec": 0.0, "latency": 0.0, "bandwidth": 0.0, "waiting": 0.0}


def plan(steps, memory=0):
    """Of strategies that take so many seconds a round, and 1000 bytes."""

    def play(run, profile, links, ranks):
        step_s = next(s for name, s in steps.items() if parse_strategy(name) == run.strategy)
        return Prediction(step_s, run.batch / step_s, 0.05, 0.05 / step_s, 100, 10, 1000, 0.0, lambda: SPENT)

    options = [Candidate(name, parse_strategy(name)) for name in steps]
    return compare_strategies(
        fake_profiles.make_run(),
        options,
        fake_profiles.make_profile(),
        LINKS,
        4,
        Goal(100, memory_bytes=memory),
        predict_fn=play,
    )


def names(rows):
    return [row.name for row in rows]


def test_close_candidates_are_measured_within_memory_and_time():
    steps = {"sync": 0.1, "sync+int8": 0.101, "sync+bf16": 0.11, "sync+int4": 0.13}
    assert names(playoff.shortlist(plan(steps), 15)) == ["sync", "sync+int8", "sync+bf16"]
    assert names(playoff.shortlist(plan(steps, memory=2500), 15)) == ["sync", "sync+int8"]
    each = 9 * 0.1 + playoff.NUM_BLOCKS * playoff.BLOCK_S
    assert names(playoff.shortlist(plan(steps), 2.1 * each)) == ["sync", "sync+int8"]
    assert names(playoff.shortlist(plan(steps), 1)) == ["sync"]
    slow = {name: 20 * s for name, s in steps.items()}
    assert names(playoff.shortlist(plan(slow), 15)) == ["sync"]


def test_candidates_with_warnings_are_not_shortlisted():
    steps = {"sync": 0.1, "sync+topk": 0.101}  # which the plan has a warning for
    result = plan(steps)
    assert result.rows[1].limits
    assert names(playoff.shortlist(result, 15)) == ["sync"]


@pytest.mark.parametrize(
    ("seconds", "wins", "expected"),
    [
        ({"sync": 0.10, "sync+int8": 0.11}, "sync", "the fastest of 2"),
        ({"sync": 0.10, "sync+int8": 0.099}, "sync", "1.0% behind the fastest of 2"),
        ({"sync": 0.10, "sync+int8": 0.095}, "sync", "5.3% behind the fastest of 2"),  # it gives up 5 %, and TELLS
        ({"sync": 0.10, "sync+int8": 0.093}, "sync+int8", "the fastest of 2 timed here; predicted to be best was sync"),
        ({"sync": 0.10, "sync+sync_period=2": 0.05}, "sync", "100.0% behind"),  # it needs twice the images
        ({"sync": 0.10, "sync+sync_period=2": 0.04}, "sync+sync_period=2", "the fastest"),
    ],
)
def test_the_playoff_is_decided_by_time_to_the_goal_and_margin(seconds, wins, expected, monkeypatch):
    monkeypatch.setitem(learning_cost.PERIOD_FACTORS["parameters"], 2, 2.0)
    result = plan({"sync": 0.1, **dict.fromkeys(seconds, 0.1)})
    assert result.best.name == "sync"
    assert playoff.select_winner(result, seconds).name == wins
    first, other = playoff.describe_result(result, seconds)
    assert first.startswith(f"{wins}: ")
    assert expected in first
    assert other.startswith(f"not {next(name for name in seconds if name != wins)}: ")
    assert ("not enough for" in other) == (seconds[wins] > min(seconds.values()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_play_and_agree(ranks, tmp_path, processes):
    few = (
        "from paragan.plan.select import learning_cost, playoff\n"
        "playoff.BLOCK_S = 0.05\nplayoff.SHORTLIST_MARGIN = 100.0\nplayoff.MIN_DIFFERENCE = 0.0"
    )
    options = "sync,async" if ranks == 1 else "sync,sync+int8+sync_period=2,gossip,async-gossip,async+split=1:1"
    run = ["train", "digits", "--strategy=auto", "--strategy.measure_s=8", f"--strategy.strategies={options}"]
    run += ["--batch=16", "--lanes=4", "--nets.width=4", f"--run-dir={tmp_path}/run", "--kimg=0.16"]
    started = processes.start_ranks(
        ranks, *run, "--evaluation.metrics=[]", start=lambda *a, **env: processes.start_forked(*a, patch=few, **env)
    )
    assert [rank.wait() for rank in started] == [0] * ranks, started[0].err
    about = read_yaml(tmp_path / "run/run.yaml")["reasons"]
    assert f"of {2 if ranks == 1 else 5} timed here" in about[0]
    assert sum("as timed here" in line for line in about) == (1 if ranks == 1 else 4)
