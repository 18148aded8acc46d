import dataclasses
import math

import numpy as np
import pytest

import fake_profiles
from advice import advises
from paragan.comm.compression.compressors import Exact
from paragan.plan.large_scale.fleet import FleetConfig, simulate_fleet
from paragan.plan.large_scale.round_time import AllReduceModel, make_worker_round, ring_all_reduce_s
from paragan.plan.links import Link, parse_links
from paragan.plan.predict.predict import predict
from paragan.plan.select.candidates import parse_strategy

CASES = {
    "4 hosts, 100 Mbit/s, 0 ms": 1_000_000,
    "4 hosts, 100 Mbit/s, 10 ms": 300_000,
    "16 hosts, 20 Mbit/s, 40 ms": 300_000,
    "16 hosts, 1 Gbit/s, 50 us": 1_000_000,
}
# how near the simulation comes to the prediction of a small uniform world
NEAR = {
    "sync": 0.05,
    "sync+int8": 0.12,
    "sync+sync_period=4": 0.09,
    "gossip": 0.06,
    "gossip+int8": 0.05,
    "gossip+topology=ring": 0.04,
    "gossip+topology=random-ring": 0.14,
}


def home(workers, **more):
    return FleetConfig(workers, up_rate=2.5e6, down_rate=12.5e6, latency_s=0.04, **more)


def job(workers=8, params=300_000):
    return make_worker_round(
        fake_profiles.make_run(batch=16 * workers, lanes=workers), fake_profiles.make_profile(params=params), workers
    )


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("text", CASES)
def test_small_worlds_are_as_predicted(text, name):
    links, profile = parse_links(text), fake_profiles.make_profile(params=CASES[text])
    run = dataclasses.replace(fake_profiles.make_run(lanes=16, batch=128), strategy=parse_strategy(name))
    crowd = FleetConfig(links.hosts, *links.port_rates(0), links.link_between(0, 1).latency)
    observed = simulate_fleet(run.strategy, make_worker_round(run, profile, links.hosts), crowd, rounds=16)
    assert observed.images_per_s == pytest.approx(predict(run, profile, links).images_per_s, rel=NEAR[name])


def test_a_ring_takes_a_round_trip_for_every_two_segments():
    assert ring_all_reduce_s(1e9, 4, Link(1e6, 0.0)) == pytest.approx(2 * 3 / 4 * 1e9 / 1e6, rel=1e-3)  # bytes alone
    assert ring_all_reduce_s(1, 1000, Link(1e12, 0.01)) == pytest.approx(2 * 999 * 2 * 0.01, rel=1e-3)  # latency alone
    assert ring_all_reduce_s(1e6, 1, Link(1e6, 1.0)) == 0


def test_a_rank_that_never_waits_runs_at_its_own_speed():
    observed = simulate_fleet(parse_strategy("per-label"), job(100), home(100), rounds=10)
    assert observed.images_per_s == pytest.approx(100 * 16 / job(100).compute_s)
    assert observed.compute_share == pytest.approx(1.0)
    assert (observed.sent_bytes_per_h, observed.replica_drift) == (0.0, math.inf)


@pytest.mark.parametrize("field", ["fragments=2", "delay=1"])
def test_fragments_and_delays_are_for_the_simulation_of_all_ranks(field):
    with advises("cannot be simulated for a fleet. Use fragments=1 and delay=0"):
        simulate_fleet(parse_strategy(f"sync+sync_period=2+{field}"), job(8), home(8))
    simulate_fleet(parse_strategy("sync+sync_period=2+outer=nesterov"), job(8), home(8))


def test_all_wait_for_the_slowest():
    fast, even = (
        FleetConfig(64, 1e12, 1e12, 0.0),
        simulate_fleet(parse_strategy("sync"), job(64), FleetConfig(64, 1e12, 1e12, 0.0)),
    )
    uneven = simulate_fleet(parse_strategy("sync"), job(64), dataclasses.replace(fast, speed_sigma=0.3))
    spread = np.exp(0.3 * np.sqrt(2 * np.log(64)))  # the largest of 64, roughly
    assert even.rounds_per_h / uneven.rounds_per_h == pytest.approx(spread, rel=0.25)


def test_the_seed_decides():
    crowd = home(500, rate_sigma=0.3, speed_sigma=0.3, jitter_sigma=0.1, churn_per_h=0.5)
    first, repeated = (simulate_fleet(parse_strategy("gossip"), job(500), crowd, rounds=20) for _ in range(2))
    other = simulate_fleet(parse_strategy("gossip"), job(500), dataclasses.replace(crowd, seed=1), rounds=20)
    assert first == repeated != other


def test_rounds_with_losses_match_renewal_theory():
    crowd = home(32, churn_per_h=20.0, regroup_s=5.0)
    full = simulate_fleet(parse_strategy("sync"), job(32), dataclasses.replace(crowd, churn_per_h=0.0), rounds=4)
    observed = simulate_fleet(parse_strategy("sync"), job(32), crowd, rounds=400, hours=1e3)
    takes, rate = full.seconds / full.rounds, crowd.losses_per_s
    forming = crowd.regroup_s + 2 * crowd.latency_s + job(32).state_bytes / crowd.up_rate
    assert observed.seconds / observed.rounds == pytest.approx(
        (math.exp(rate * takes) - 1) * (1 / rate + forming), rel=0.15
    )
    assert observed.failed_attempts == pytest.approx(math.exp(rate * takes) - 1, rel=0.15)


def test_a_ring_of_100_000_never_comes_round():
    observed = simulate_fleet(parse_strategy("sync"), job(), home(100_000, churn_per_h=0.01))
    assert (observed.rounds, observed.images_per_s) == (0, 0.0)
    assert observed.failed_attempts > 1000


def test_100_000_gossip_within_a_minute():
    observed = simulate_fleet(
        parse_strategy("gossip+int8"),
        job(),
        home(100_000, rate_sigma=0.3, jitter_sigma=0.1, churn_per_h=0.01),
        rounds=24,
    )
    assert observed.rounds == 24
    assert 0.5 < observed.replica_drift < 3
    assert observed.joiners_bytes_per_h == pytest.approx(0.01 * job().state_bytes)
    assert observed.sent_bytes_per_h < 3600 * 2.5e6 * 1.1


def test_mixing_preserves_the_mean_and_contracts_distances():
    near = simulate_fleet(parse_strategy("gossip+topology=random-ring"), job(256), home(256)).replica_drift
    ring = simulate_fleet(parse_strategy("gossip+topology=ring"), job(256), home(256), rounds=200).replica_drift
    separate = simulate_fleet(parse_strategy("gossip+sync_period=8"), job(256), home(256)).replica_drift
    assert near < separate < 4
    assert near < ring
    assert simulate_fleet(parse_strategy("gossip"), job(256), home(256)).mixing_rounds == 8
    assert simulate_fleet(parse_strategy("gossip+topology=ring"), job(256), home(256), rounds=4).mixing_rounds > 10_000


def test_links_that_lag_are_not_waited_for():
    slow = FleetConfig(64, up_rate=2.5e5, down_rate=2.5e5, latency_s=0.04)
    waits, lags = (
        simulate_fleet(parse_strategy(name), job(64), slow) for name in ("gossip+topology=ring", "async-gossip")
    )
    assert lags.images_per_s > 5 * waits.images_per_s
    assert 1 < lags.staleness_rounds <= 16
    assert lags.replica_drift > waits.replica_drift


def test_sites_that_sum_first_take_fewer_hops():
    flat = AllReduceModel(Exact()).all_reduce_s(1e5, 1024, Link(1e8, 0.01))
    sites = AllReduceModel(Exact(), group_size=32, intra_host=Link(1e8, 0.01)).all_reduce_s(1e5, 1024, Link(1e8, 0.01))
    assert sites == pytest.approx(flat * (31 + 31) / 1023, rel=0.01)  # rings of 32 ranks and of 32 sites: hops are all


def test_unsupported_strategies_are_refused_with_others_that_are_not():
    def simulate(name):
        return simulate_fleet(parse_strategy(name), job(16), home(16), rounds=2)

    usable = ("ring", "hypercube", "exponential", "one-peer", "matching", "random-ring")
    with advises(f"strategy.topology=torus: it cannot be simulated. Use {', '.join(usable)}"):
        simulate("gossip+topology=torus")
    assert all(simulate(f"gossip+topology={name}") for name in usable)
    with advises("topology=hypercube: strategy.staleness is only simulated on a ring. Use strategy.topology=ring"):
        simulate("async-gossip+topology=hypercube")
    assert simulate("async-gossip+topology=ring")
    with advises("strategy=auto: it cannot be simulated. Name the strategies to compare"):
        simulate("auto")
    assert simulate("sync")
