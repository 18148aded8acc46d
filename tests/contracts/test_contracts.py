"""Contracts that every strategy must satisfy."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiny_run
from advice import advises
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.host_copies import copy_to_host
from paragan.plan.predict.simulated_world import lone_world
from paragan.strategies.base import assign_lanes
from paragan.train.averaged_model import averaged_networks, consensus_distance, consensus_terms
from paragan.train.loop import play_round
from paragan.train.round_snapshot import RoundSnapshot, full_state
from paragan.train.session import rebind_to_world

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
every_strategy = pytest.mark.parametrize("settings", table.STRATEGIES.values(), ids=table.STRATEGIES)

every_kind_of_strategy = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, marks=[] if name in table.REPRESENTATIVES else pytest.mark.slow)
        for name, settings in table.STRATEGIES.items()
    ],
    ids=table.STRATEGIES,
)

as_one_rank = pytest.mark.parametrize(
    "settings", [table.STRATEGIES[name] for name in table.RANK_COUNT_INVARIANT], ids=table.RANK_COUNT_INVARIANT
)

replicated = pytest.mark.parametrize(
    "settings", [s for name, s in table.STRATEGIES.items() if name not in table.UNREPLICATED],
    ids=[name for name in table.STRATEGIES if name not in table.UNREPLICATED],
)  # fmt: skip

unreplicated = pytest.mark.parametrize(
    "settings", [table.STRATEGIES[name] for name in table.UNREPLICATED], ids=table.UNREPLICATED
)


@functools.cache
def six_rounds_of_one(run):
    return tiny_run.play_rounds(run, 6)


def rank_count_case(ranks, variant, name):
    """Return one case of the test below: sync with each variant, and each strategy alone, need not be asked for."""
    quick = ranks == 3 and (variant == "plain" or name == "sync")
    return pytest.param(ranks, variant, name, id=f"{ranks}-{variant}-{name}", marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "variant", "name"),
    [  # three ranks have two lanes, one and one
        rank_count_case(ranks, variant, name)
        for ranks, variant in [*((3, variant) for variant in table.VARIANTS), (2, "plain"), (4, "plain")]
        for name in table.RANK_COUNT_INVARIANT
    ],
)
def test_n_ranks_equal_one(pool, name, variant, ranks):
    settings = (*table.STRATEGIES[name], "nets.batch_norm=true", "nets.spectral=true", *table.VARIANTS[variant])
    run = tiny_run.make_run(*settings)
    one = six_rounds_of_one(run)
    several = pool(ranks, lambda world: tiny_run.play_rounds(run, 6, world))
    amplified = run.objective.gp > 0 and run.strategy.optimizer_wrapper == "optimistic"  # Adam where slopes are near 0
    bound, most = (5e-3, 2e-2) if amplified else (2e-4, 2e-3)
    for network in ("G/", "D/"):
        assert tiny_run.relative_distance(several[0], one, network) < bound
    for name in one:  # every buffer, one by one
        torch.testing.assert_close(several[0][name], one[name], rtol=2e-2, atol=most, msg=name)


@replicated
def test_replicas_are_identical(pool, settings):
    run = tiny_run.make_run(*settings, "objective.r1=1")
    states = pool(3, lambda world: tiny_run.play_rounds(run, 5, world))
    assert all(tiny_run.is_equal(states[0], other) for other in states[1:])


@unreplicated
def test_evaluated_networks_are_the_mean_over_ranks(pool, settings):
    run = tiny_run.make_run(*settings, "nets.batch_norm=true")

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(3):
            play_round(s)
        before = tiny_run.session_state(s)
        distances = consensus_distance(s, copy_to_host(consensus_terms(s)))
        with averaged_networks(s):
            mean = tiny_run.session_state(s)
        return before, mean, distances, tiny_run.is_equal(before, tiny_run.session_state(s))

    results = pool(4, job)
    averages = torch.stack([before["G/average"] for before, *_ in results])
    for _, mean, distances, restored in results:
        torch.testing.assert_close(mean["G/average"], averages.mean(0))
        assert all(torch.equal(mean[name], results[0][1][name]) for name in mean if name.startswith("D/"))
        assert restored
        assert distances == results[0][2]
        assert 0 < distances["Consensus/D"] < 1
    assert not tiny_run.is_equal(results[0][0], results[1][0])


@every_strategy
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [(2, "adam"), *(pytest.param(1, name, marks=pytest.mark.slow) for name in ("adam", "sgd", "rmsprop"))],
)
def test_six_and_four_rounds_equal_ten(pool, settings, optimizer, ranks, tmp_path):
    settings = (*settings, "objective.r1=1", f"g.optimizer={optimizer}", f"d.optimizer={optimizer}")
    run = tiny_run.make_run(*settings, "nets.batch_norm=true")

    def ten(world):
        return tiny_run.play_rounds(run, 10, world)

    def six_and_four(world):
        saved, _ = tiny_run.save_after(run, 6, world, tmp_path)
        s = tiny_run.make_session(run, world, saved)
        assert s.clock.step == 6
        for _ in range(4):
            play_round(s)
        return tiny_run.gather_owner_state(s)

    def same(world):
        return tiny_run.is_equal(ten(world), six_and_four(world))

    assert all([same(World.solo())] if ranks == 1 else pool(ranks, same))


class Broken(Exception):
    pass


@pytest.mark.slow(after=7)
@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "plain") for name in table.REPLAYING), ("sync", "kept"), ("sync", "clipped, in groups")],
)
def test_a_broken_round_is_played_again(pool, name, variant):
    settings = (*table.STRATEGIES[name], *table.VARIANTS[variant], "strategy.peer_timeout_s=5")
    run = tiny_run.make_run(*settings, "nets.batch_norm=true")
    assert run.strategy.replays_broken_rounds

    def job(world):
        s = tiny_run.make_session(run, world)
        snapshot = RoundSnapshot()
        for _ in range(3):
            play_round(s)
            snapshot.capture(s)
        play_round(s)
        expected = {name: value.clone() for name, value in full_state(s.game.players).items()}
        with pytest.raises(Broken), mock.patch.object(s.game.g, "step", side_effect=Broken):
            play_round(s)  # D has stepped
        s.clock.step, s.clock.images = snapshot.step, s.run.images_after(snapshot.step)
        for player in s.game.players:
            player.drop_round()
        snapshot.restore(s)
        s = rebind_to_world(s.run, world, tiny_run.make_dataset(), s.game, s.clock)
        play_round(s)
        return tiny_run.is_equal(full_state(s.game.players), expected)

    assert all(pool(2, job))


@pytest.mark.parametrize("optimizer", ["adabelief", "lamb", "lookahead"])
def test_contracts_hold_with_a_third_party_optimizer(optimizer, tmp_path):
    test_six_and_four_rounds_equal_ten(None, ("strategy=sync",), optimizer, 1, tmp_path)


CLIPPED = table.VARIANTS["clip"]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sync", "DQGAN sign", "gossip int8", "async teams"])
def test_contracts_hold_with_weight_clipping(pool, name, ranks, tmp_path):
    test_six_and_four_rounds_equal_ten(pool, (*table.STRATEGIES[name], *CLIPPED), "sgd", ranks, tmp_path)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sync, accumulated", "quantized", "gossip int8", "async teams"])
def test_contracts_hold_with_clipped_gradients_and_groups(pool, name, ranks, tmp_path):
    settings = (*table.STRATEGIES[name], *table.VARIANTS["clipped, in groups"])
    test_six_and_four_rounds_equal_ten(pool, settings, "adam", ranks, tmp_path)


def test_freezing_between_two_checkpoints_is_the_same_after_a_resume(tmp_path):
    frozen = ("g.groups=[{pattern: 'start.*', freeze_from_kimg: 0.08}, {pattern: 'ups.*', freeze_from_kimg: 0.128}]",)
    test_six_and_four_rounds_equal_ten(None, ("strategy=sync", *frozen), "adam", 1, tmp_path)


@every_kind_of_strategy
def test_d_is_clipped_after_every_step_and_g_is_not(pool, settings):
    run = tiny_run.make_run(*settings, *CLIPPED, "nets.batch_norm=true")  # whose gains begin at 1

    def largest(world):
        s = tiny_run.make_session(run, world)
        rounds = []
        for _ in range(3):
            play_round(s)
            rounds.append([float(player.flat.params.abs().max()) for player in s.game.players])
        return rounds, s.game.d in s.role.trained_players

    for rounds, moves_d in pool(2, largest):
        for g, d in rounds:
            assert g > 0.5
            assert d <= float(torch.tensor(0.01)) or not moves_d


@pytest.mark.slow(after=2)
@as_one_rank
def test_four_ranks_then_two_equal_one(pool, settings, tmp_path):
    run = tiny_run.make_run(*settings)

    saved = pool(4, lambda world: tiny_run.save_after(run, 4, world, tmp_path)[0])[0]

    def then(world):
        s = tiny_run.make_session(run, world, saved)
        for _ in range(4):
            play_round(s)
        return tiny_run.gather_owner_state(s)

    assert tiny_run.relative_distance(pool(2, then)[0], tiny_run.play_rounds(run, 8), "G/") < 2e-4


@every_kind_of_strategy
def test_two_ranks_resume_from_the_mean_state_of_four(pool, settings, tmp_path):
    run = tiny_run.make_run(*settings)

    def remembered(session):
        return {f"{p.name} {k}": v.clone() for p in session.game.players for k, v in p.flat.states().items()}

    def first(world):
        saved, s = tiny_run.save_after(run, 3, world, tmp_path)
        return saved, remembered(s)

    before = pool(4, first)
    saved = before[0][0]

    def then(world):
        s = tiny_run.make_session(run, world, saved)
        restored = remembered(s)
        play_round(s)
        return restored, tiny_run.gather_owner_state(s)

    after = pool(2, then)
    for restored, _ in after:
        assert restored.keys() == {name for _, memories in before for name in memories}
        for name, vector in restored.items():
            of_those = [memories[name] for _, memories in before if name in memories]
            torch.testing.assert_close(vector, torch.stack(of_those).mean(0))
            assert vector.any()
    assert settings in map(table.STRATEGIES.get, table.UNREPLICATED) or tiny_run.is_equal(after[0][1], after[1][1])


@every_kind_of_strategy
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_counted_bytes_equal_predicted_bytes(pool, settings, ranks):
    run = tiny_run.make_run(*settings, "nets.batch_norm=true")

    def predicted(s):
        from paragan.plan.cost import player_traffic

        totals = [player_traffic(s.role, player) for player in s.game.players]
        return [(6 * t.sent_bytes, 6 * t.messages) for t in totals]

    def counted(world):
        s = tiny_run.make_session(run, world)
        for _ in range(6):
            play_round(s)
        if s.role.drain:
            s.role.drain()
        return [(p.meter.sent_bytes, p.meter.messages) for p in s.game.players], predicted(s), s.role.description

    rows = pool(ranks, counted)
    rounded = 6 if any("sync_period" in setting for setting in settings) else 0
    for row, expected, _ in rows:
        assert all(a == pytest.approx(b, abs=rounded) for a, b in zip(row, expected, strict=True))
    assert any(any(row) for row, _, _ in rows)
    virtual = tiny_run.make_session(run, lone_world(ranks))
    if virtual.role.description == rows[0][2]:  # split=auto may have measured another split
        assert predicted(virtual) == rows[0][1]


@every_strategy
def test_every_lane_has_one_owner(settings):
    for ranks in range(1, 9):
        shares = [assign_lanes(8, rank, ranks) for rank in range(ranks)]
        assert sorted(lane for share in shares for lane in share.lanes) == list(range(8))
        assert sum(share.weight for share in shares) == pytest.approx(1)


def test_more_ranks_than_lanes_are_refused_with_numbers_that_work():
    with advises("--lanes=2: 3 ranks need one lane each. Use --lanes=3 or more, or at most 2 ranks."):
        assign_lanes(2, 0, 3)
    assert assign_lanes(3, 0, 3).lanes == (0,)
    assert assign_lanes(2, 0, 2).lanes == (0,)


@every_strategy
def test_too_many_ranks_are_rejected_with_the_maximum(settings):
    run = tiny_run.make_run(*settings)
    world = lone_world(17)  # more than two teams could use, too
    with pytest.raises(UsageError, match="at most 8 ranks"):
        tiny_run.make_session(run, world)
    assert LaunchInfo().size == 1
