import dataclasses

import pytest

import fake_profiles
from advice import advises
from paragan.core.errors import UsageError
from paragan.nets import SNGAN
from paragan.plan.links import parse_links
from paragan.plan.predict.predict import Prediction
from paragan.plan.profile.profile import NoiseScale
from paragan.plan.select import learning_cost
from paragan.plan.select.candidates import Candidate, default_candidates, parse_settings, parse_strategy
from paragan.plan.select.compare import Goal, batch_images_factor, compare_strategies
from paragan.plan.select.convergence_limits import find_limits, noise_warnings

GOAL = Goal(100)
LINKS = parse_links("4 hosts, 100 Mbit/s, 10 ms")


def named(*names):
    return [Candidate(name, parse_strategy(name)) for name in names]


def prediction(step_s, batch, spent=None, memory=1000, sent=100):
    usual = {"compute": 0.05, "codec": 0.0, "latency": 0.0, "bandwidth": step_s - 0.05, "waiting": 0.0}
    return Prediction(step_s, batch / step_s, 0.05, 0.05 / step_s, sent, 10, memory, 0.0, lambda: spent or usual)


def reported(**steps):
    """A predictor that knows the seconds of a round by the promise of a strategy."""
    return lambda run, profile, links, ranks: prediction(steps[run.strategy.semantics.split()[0]], run.batch)


def plan(options, play, goal=GOAL, run=None, ranks=4, **more):
    run = run or fake_profiles.make_run()
    return compare_strategies(run, options, fake_profiles.make_profile(), LINKS, ranks, goal, predict_fn=play, **more)


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("sync", "equivalent"),
        ("CPOAdam", "equivalent"),
        ("sync+int8", "compressed"),
        ("sync+int8+sync_period=4", "periodic"),
        ("gossip+sync_period=2", "periodic"),
        ("gossip+int4", "decentralized"),
        ("async-gossip", "stale"),
        ("async+split=1:3", "stale"),
        ("per-label", "per-label models"),
    ],
)
def test_what_one_gets(name, promise):
    assert parse_strategy(name).semantics == promise


def test_names_are_command_line_options():
    (one,) = named("async+split=1:3+int8")
    assert one.cli_options == ["--strategy=async", "--strategy.split=1:3", "--strategy.wire=int8"]
    assert parse_settings("sync") == [("strategy", "sync")]
    with pytest.raises(UsageError, match=r"strategy\.wire: there is no int9"):
        parse_strategy("sync+int9")


@pytest.mark.parametrize(("compressed", "first"), [(0.0960, "sync"), (0.0940, "sync+int8")])
def test_lossy_strategies_rank_first_only_beyond_the_margin(compressed, first):
    result = plan(named("sync+int8", "sync"), reported(equivalent=0.1, compressed=compressed))
    assert result.best.name == first
    assert ("is needed, since" in result.rows[1].reason) == (first == "sync")


def test_convergence_limits_rank_last():
    result = plan(named("sync", "sync+sync_period=160"), reported(equivalent=0.1, periodic=0.06))
    assert [row.name for row in result.rows] == ["sync", "sync+sync_period=160"]
    assert result.rows[1].reason.startswith("a period of 160 rounds: periods above 128 were not measured")


def test_strategies_rank_by_the_time_to_the_goal_not_by_speed(monkeypatch):
    monkeypatch.setitem(learning_cost.PERIOD_FACTORS["parameters"], 4, 2.0)
    slow, fast = 0.06, 0.04  # seconds of a round, against 0.1
    names, reason = {}, {}
    for seconds in (slow, fast):
        result = plan(named("sync", "sync+sync_period=4"), reported(equivalent=0.1, periodic=seconds))
        names[seconds] = [row.name for row in result.rows]
        reason[seconds] = {row.name: row.reason for row in result.rows}
        assert {row.name: row.kimg for row in result.rows} == {"sync": 100, "sync+sync_period=4": 200}
    assert names == {slow: ["sync", "sync+sync_period=4"], fast: ["sync+sync_period=4", "sync"]}
    assert reason[slow]["sync+sync_period=4"] == "1.20x the time, with 2.00x the images (an estimate)"
    assert ", with 2.00x the images (an estimate); " in reason[fast]["sync+sync_period=4"]


def test_time_and_cost_follow_from_images():
    result = plan(named("sync"), reported(equivalent=0.1), Goal(360, host_price_per_h=2.0))
    row = result.best
    assert row.hours == pytest.approx(360e3 / 640 / 3600)
    assert row.cost == pytest.approx(row.hours * 4 * 2.0)


def test_the_largest_batch_that_fits_is_named():
    def play(run, profile, links, ranks):
        return prediction(0.1, run.batch, memory=1_000_000 * run.batch)

    goal = Goal(100, memory_bytes=30_000_000)
    with pytest.raises(UsageError, match=r"^--batch 64: a rank needs 64 MB for its part, and has 30 MB\. Use"):
        plan(named("sync", "gossip"), play, goal)
    with advises("Use --batch 24, the largest that fits"):
        plan(named("sync", "gossip"), play, goal)
    assert plan(named("sync", "gossip"), play, goal, run=fake_profiles.make_run(batch=24)).best.fits_memory


def test_a_batch_that_never_fits_needs_more_ranks_or_checkpointing():
    def play(run, profile, links, ranks):
        lane_bytes = 1_000_000 if getattr(run.nets, "checkpointing", False) else 3_000_000
        return prediction(0.1, run.batch, memory=lane_bytes * run.lanes // ranks)

    goal = Goal(100, memory_bytes=4_000_000)
    sngan = dataclasses.replace(fake_profiles.make_run(), nets=SNGAN())
    with advises("No batch fits. Use more ranks (with as many --lanes)"):
        plan(named("sync"), play, goal, run=sngan)
    assert plan(named("sync"), play, goal, run=sngan, ranks=8).best.fits_memory
    with pytest.raises(UsageError, match=r", or --nets\.checkpointing=true$"):
        plan(named("sync"), play, goal, run=sngan)
    checkpointing = dataclasses.replace(sngan, nets=SNGAN(checkpointing=True))
    assert plan(named("sync"), play, goal, run=checkpointing).best.fits_memory
    with pytest.raises(UsageError, match=r"lanes\)$"):  # networks that do not have it
        plan(named("sync"), play, goal)


def test_one_that_does_not_fit_stands_last():
    def play(run, profile, links, ranks):
        return prediction(0.1 if run.strategy.name == "sync" else 0.05, run.batch, memory=90 if ranks else 0)

    def more(run, profile, links, ranks):
        result = play(run, profile, links, ranks)
        return dataclasses.replace(result, memory_bytes=90 if run.strategy.name == "sync" else 9000)

    result = plan(named("gossip", "sync"), more, Goal(100, memory_bytes=100))
    assert [row.name for row in result.rows] == ["sync", "gossip"]
    assert result.rows[1].reason.startswith("needs ")


def test_sizes_that_a_strategy_refuses_are_left_out():
    result = compare_strategies(
        fake_profiles.make_run(),
        named("sync", "gossip+topology=hypercube"),
        fake_profiles.make_profile(),
        LINKS,
        3,
        Goal(1),
        predict_fn=reported(equivalent=1),
    )
    assert [name for name, _ in result.excluded] == ["gossip+topology=hypercube"]
    with pytest.raises(UsageError, match="no strategy can be planned: gossip"):
        compare_strategies(
            fake_profiles.make_run(),
            named("gossip+topology=hypercube"),
            fake_profiles.make_profile(),
            LINKS,
            3,
            Goal(1),
        )


def test_what_the_run_itself_refuses_is_left_out():
    run = dataclasses.replace(fake_profiles.make_run(), ramp=((10.0, 128),))
    result = compare_strategies(
        run,
        named("gossip", "sync"),
        fake_profiles.make_profile(),
        LINKS,
        4,
        Goal(1),
        predict_fn=reported(equivalent=1),
    )
    assert [row.name for row in result.rows] == ["sync"]
    assert "needs rounds of one size" in dict(result.excluded)["gossip"]


def test_a_ramp_is_predicted_by_its_first_stage_and_reported():
    run = dataclasses.replace(fake_profiles.make_run(), ramp=((10.0, 128), (20.0, 256)))
    warned = compare_strategies(
        run, named("sync"), fake_profiles.make_profile(), LINKS, 4, Goal(1), predict_fn=reported(equivalent=1)
    ).warnings
    assert warned[0].startswith(f"--ramp: only the first stage, --batch {run.batch}, is predicted")
    assert "plan --batch 256" in warned[0]
    few = compare_strategies(
        fake_profiles.make_run(),
        named("sync"),
        fake_profiles.make_profile(),
        LINKS,
        4,
        Goal(1),
        predict_fn=reported(equivalent=1),
    )
    assert not any("ramp" in warning for warning in few.warnings)


def test_larger_batches_need_more_images_where_noise_is_small():
    noisy = fake_profiles.make_profile(noise=64)
    assert batch_images_factor(noisy, 64, 64) == 1
    assert batch_images_factor(noisy, 192, 64) == pytest.approx(2.0)
    assert batch_images_factor(fake_profiles.make_profile(), 4096, 64) == 1
    alike = NoiseScale(0.0, 0.0, 1.0)  # gradients of all lanes
    assert "beyond the noise scale" in noise_warnings(dataclasses.replace(noisy, noise_scale={"G": alike}), 100)[0]
    assert [w.startswith("--batch 100") for w in noise_warnings(noisy, 100)] == [True]  # D's scale is 128


def test_the_batch_follows_the_noise_scale():
    def play(run, profile, links, ranks):
        return prediction(0.1, run.batch)  # larger batches are free

    run, links = fake_profiles.make_run(), LINKS
    few = compare_strategies(
        run,
        named("sync"),
        fake_profiles.make_profile(noise=1),
        links,
        4,
        Goal(1),
        batches=(64, 128, 256),
        predict_fn=play,
    )
    assert {row.batch: round(row.kimg, 2) for row in few.rows} == {64: 1.0, 128: 1.98, 256: 3.95}
    many = compare_strategies(
        run, named("sync"), fake_profiles.make_profile(noise=1e6), links, 4, Goal(1), batches=(64, 128), predict_fn=play
    )
    assert many.best.batch == 128


def test_limits_in_words():
    assert find_limits(parse_strategy("gossip"), 8, 0) == ()
    assert "0.987" in find_limits(parse_strategy("gossip+topology=ring"), 32, 0)[0]
    assert "0.91" in find_limits(parse_strategy("gossip"), 100_000, 0)[0]
    assert "error feedback" in find_limits(parse_strategy("CPOAdam-GQ"), 4, 0)[0]
    assert "never sent" in find_limits(parse_strategy("sync+qsgd"), 4, 0)[0]
    assert "what the topk wire costs in quality was not measured" in find_limits(parse_strategy("sync+topk"), 4, 0)
    assert "plain gradient steps" in find_limits(parse_strategy("DPOSG"), 2, 0)[0]
    assert "periods above 2" in find_limits(parse_strategy("sync+sync_period=4+sync_mode=accumulate"), 1, 0)[0]
    assert find_limits(parse_strategy("sync+int2"), 4, 0) == ()
    assert "3 rounds old" in find_limits(parse_strategy("async+split=2:2+max_lead_rounds=4"), 4, 3.0)[0]
    assert find_limits(parse_strategy("sync+sync_period=64"), 1, 0) == ()
    for field in ("outer=nesterov", "outer_d=nesterov"):
        (limit,) = find_limits(parse_strategy(f"quantized+sync_period=4+{field}"), 4, 0)
        assert limit == "what the outer optimizer costs in quality was not measured"
    streaming = "sync+sync_period=32+fragments=4+delay="
    assert find_limits(parse_strategy(f"{streaming}8"), 4, 0) == ()
    assert find_limits(parse_strategy(f"{streaming}9"), 4, 0) == (
        "a delay of 9 rounds: delays above 8 were not measured",
    )


@pytest.mark.slow
def test_every_candidate_is_predicted():
    profile, links = fake_profiles.make_profile(), parse_links("2 hosts of 2 ranks, 100 Mbit/s, 1 ms")
    options = default_candidates(4, profile, 64)
    result = compare_strategies(fake_profiles.make_run(), options, profile, links, 4, Goal(100))
    assert len(result.rows) == len(options) > 20
    assert not result.excluded
    assert result.best.prediction.images_per_s >= 0.95 * max(
        row.prediction.images_per_s for row in result.rows if not row.limits and row.semantics != "per-label models"
    )
    assert all(row.reason for row in result.rows)


def test_graphs_that_are_one_are_compared_once():
    names = [one.name for one in default_candidates(2, fake_profiles.make_profile(), 64)]
    assert "gossip" in names
    assert "gossip+topology=ring" not in names
    assert "gossip+topology=ring" in [one.name for one in default_candidates(8, fake_profiles.make_profile(), 64)]


def test_computing_hides_the_exact_wire():
    profile, links = fake_profiles.make_profile(g_s=2.0, d_s=2.0), parse_links("4 hosts, 10 Gbit/s, 50 us")
    result = compare_strategies(
        fake_profiles.make_run(), named("sync", "sync+int8", "gossip"), profile, links, 4, Goal(100)
    )
    assert result.best.name == "sync"
    assert "computing hides" in next(row for row in result.rows if row.name == "sync+int8").reason
