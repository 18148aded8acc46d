"""Predictions against what can be worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tiny_run
from paragan.comm.flat_params import bucket_bytes
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import Run
from paragan.config.sections import DataOptions
from paragan.core.schema import apply_overrides, from_dict
from paragan.plan.cost import role_traffic
from paragan.plan.links import Link, Links, parse_links
from paragan.plan.measure_exchange import make_emulated_game
from paragan.plan.predict.event_loop import Process, SimClock
from paragan.plan.predict.network import (
    MAX_IN_FLIGHT,
    MAX_SEGMENTS,
    MessageKey,
    Network,
    all_gather,
    all_reduce,
    all_to_all,
)
from paragan.plan.predict.predict import predict
from paragan.plan.predict.simulated_game import BucketSizes, equal_layers
from paragan.plan.predict.simulated_world import Message, lone_world
from paragan.plan.predict.simulation import Simulation
from paragan.plan.profile.profile import NUM_READY_PARTS, DeviceInfo, MemoryUse, Profile, TurnProfile
from paragan.train.build import build_game, build_networks

RATE = 10e6  # bytes a second


def links(hosts: int, latency: float = 0.0, **more: Any) -> Links:
    return Links(hosts=hosts, up=RATE, latency=latency, **more)  # pyright: ignore


def profile(params: int = 2_400_000, d_s: float = 0.0, g_s: float = 0.0, **more: Any) -> Profile:
    """Turns of two images; every part of a gradient comes at the end of backward."""

    def turn(seconds: float) -> TurnProfile:
        return TurnProfile(2, (seconds,) * NUM_READY_PARTS, seconds, seconds)

    device = DeviceInfo("cpu", "paper", 1, "float32", 1e9, 1 << 30, "", "")
    sizes = (params - params // 2, params // 2)
    free = {"pass": 0.0, "encode": 0.0, "decode": 0.0}
    return Profile("paper", "", device, sizes, 1.0, (turn(g_s),), (turn(d_s),), codec_cost=free, **more)  # pyright: ignore


def run(strategy: str, ranks: int, **fields: Any) -> Run:
    settings = [(f"strategy.{name}", str(value)) for name, value in fields.items()]
    target = from_dict(Run, apply_overrides({"strategy": {"name": strategy}}, settings))
    small = DataOptions(resolution=1, channels=1, labels=False)
    device = dataclasses.replace(target.device, precision="float32")
    return dataclasses.replace(target, batch=2 * ranks, lanes=2 * ranks, data=small, device=device)


# collectives ----------------------------------------------------------------------------------------------------------


Play = Callable[[Network, Sequence[int], int, MessageKey], Process]


def all_reduce_s(nbytes: float, size: int, link: Link) -> float:
    """Seconds of a ring all-reduce: 2 (size - 1) steps, in each of which a chunk passes in segments."""
    return 2 * (size - 1) * ring_step_s(nbytes / size, link)


def all_gather_s(nbytes: float, size: int, link: Link) -> float:
    """Seconds of a ring all-gather of `nbytes` per rank."""
    return (size - 1) * ring_step_s(nbytes, link)


def all_to_all_s(nbytes: float, size: int, link: Link) -> float:
    """Seconds of an all-to-all: a request, then a part of `nbytes` to every other rank at once."""
    return 2 * link.latency + (size - 1) / size * nbytes / link.bandwidth


def ring_step_s(chunk_bytes: float, link: Link) -> float:
    """Seconds of a step of a ring.

    A segment is requested when the one two before it has arrived. The request waits behind the other segment in the
    port, or for its answer.
    """
    segment_s = chunk_bytes / MAX_IN_FLIGHT / link.bandwidth
    return max(MAX_IN_FLIGHT * segment_s + link.latency, segment_s + 2 * link.latency)


def summed(nbytes: int) -> Play:
    return lambda network, ranks, me, key: all_reduce(network, ranks, me, key, nbytes, 0.0)


def gathered(nbytes: int) -> Play:
    return lambda network, ranks, me, key: all_gather(network, ranks, me, key, nbytes)


def transposed(nbytes: int) -> Play:
    return lambda network, ranks, me, key: all_to_all(network, ranks, me, key, nbytes)


def elapsed_s(ranks: int, between: Links, play: Play, folded: bool = False, most: int = MAX_SEGMENTS) -> float:
    clock = SimClock()
    network = Network(clock, between, ranks, folded, most)
    for rank in range(1 if folded else ranks):
        clock.start_process(play(network, range(ranks), rank, ("all", 1)))
    clock.run()
    return clock.now_s


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("folded", [False, True])
def test_a_ring_sum_on_fast_answers_takes_what_its_bytes_take(ranks, folded):
    n = 6_000_000
    seconds = elapsed_s(ranks, links(ranks), summed(n), folded)
    assert seconds == pytest.approx(2 * (ranks - 1) / ranks * n / RATE, rel=0.01 if ranks > 2 else 0.06)


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_short_sum_takes_a_question_and_an_answer_a_hop(ranks):
    seconds = elapsed_s(ranks, links(ranks, 0.02), summed(64 * ranks))
    assert seconds == pytest.approx(2 * (ranks - 1) * 2 * 0.02, rel=0.02)


def test_a_gather_and_a_transposition_take_what_their_bytes_take():
    n, ranks = 1_000_000, 4
    assert elapsed_s(ranks, links(4), gathered(n)) == pytest.approx(3 * n / RATE, rel=0.01)
    assert elapsed_s(ranks, links(4), transposed(n)) == pytest.approx(3 / 4 * n / RATE, rel=0.01)
    assert elapsed_s(ranks, links(4, 0.05), transposed(64)) == pytest.approx(0.1, rel=0.01)
    assert elapsed_s(ranks, links(4, 0.05), gathered(64)) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("latency", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("ranks", [3, 8])
def test_closed_forms_equal_the_simulation(ranks: int, latency: float):
    n, link = 1_200_000, Link(RATE, latency)
    for play, formula in ((summed, all_reduce_s), (gathered, all_gather_s), (transposed, all_to_all_s)):
        played = elapsed_s(ranks, links(ranks, latency), play(n))
        assert played == pytest.approx(formula(n, ranks, link), rel=0.2), formula.__name__


def test_merged_segments_take_as_long():
    for latency in (0.0, 0.01):
        one, some = (elapsed_s(16, links(16, latency), summed(4_000_000), most=most) for most in (256, 8))
        assert some == pytest.approx(one, rel=0.15)


def test_one_slow_host_slows_the_ring():
    slow = Links(hosts=4, up=[RATE / 10, RATE, RATE, RATE], latency=0.0)
    seconds = elapsed_s(4, slow, summed(4_000_000))
    assert seconds == pytest.approx(1.5 * 4_000_000 / (RATE / 10), rel=0.05)


def test_a_slow_pair_slows_only_what_passes_through_it():
    pairs = links(4, pairs={"0-1": "8 Mbit/s, 0 s"})
    assert elapsed_s(4, pairs, summed(4_000_000)) == pytest.approx(6.0, rel=0.05)
    clock = SimClock()
    network = Network(clock, pairs, 4)
    network.send(2, 3, ("all", 1), 1_000_000)
    network.recv(2, 3, ("all", 1))
    clock.run()
    assert clock.now_s == pytest.approx(0.1, rel=0.01)


def test_a_message_waits_for_its_receive():
    clock = SimClock()
    network = Network(clock, links(2, 0.5), 2)
    left = network.send(0, 1, ("all", 1), 8)
    clock.schedule(3.0, lambda: network.recv(0, 1, ("all", 1)) and None)
    clock.run()
    assert left.triggered
    assert clock.now_s == pytest.approx(4.0, rel=0.01)


def sent_after(rests: Sequence[float], nbytes: int, latency: float, window: int | None) -> list[float]:
    """Seconds of messages one after the other, each after a rest."""
    clock = SimClock()
    network = Network(clock, Links(hosts=2, up=1e12, latency=latency, initial_window_bytes=window), 2)
    seconds = list[float]()

    def messages() -> Process:
        for rest in rests:
            yield rest
            start = clock.now_s
            network.send(0, 1, ("all", 1), nbytes)
            yield network.recv(0, 1, ("all", 1))
            seconds.append(clock.now_s - start)

    clock.start_process(messages())
    clock.run()
    return seconds


def test_a_connection_opens_as_tcp_does():
    window, latency = 10_000, 0.05
    (seconds,) = sent_after([0.0], 15 * window, latency, window)  # 1, 2, 4 and 8 windows, each answered but the last
    assert seconds == pytest.approx(2 * latency + 3 * 2 * latency, rel=0.01)
    assert sent_after([0.0], 15 * window, 0.0, window)[0] == pytest.approx(0.0, abs=1e-3)


def test_an_idle_connection_restarts_slow_start():
    window, latency = 10_000, 0.05
    timeout = 0.2 + 2 * latency
    seconds = sent_after([0.0, 0.0, 2.5 * timeout, 60.0], 15 * window, latency, window)
    flights = [round((s - latency) / latency + 1) // 2 for s in seconds]
    assert flights == [4, 1, 2, 4]  # open to 31 windows then, halved twice to 8; ten packets are the least


def test_slow_start_is_off_by_default():
    assert sent_after([0.0, 60.0], 150_000, 0.05, None) == [pytest.approx(0.1, rel=0.01)] * 2


def test_ports_are_shared_and_both_ways_pass_at_once():
    def seconds(*messages: tuple[int, int]) -> float:
        clock = SimClock()
        network = Network(clock, links(3), 3)
        for a, b in messages:
            network.recv(a, b, ("all", 1))
            network.send(a, b, ("all", 1), 10_000_000)
        clock.run()
        return clock.now_s

    assert seconds((0, 1)) == pytest.approx(1.0, rel=0.01)
    assert seconds((0, 1), (1, 0)) == pytest.approx(1.0, rel=0.01)
    assert seconds((0, 1), (1, 2), (2, 0)) == pytest.approx(1.0, rel=0.01)
    assert seconds((0, 1), (0, 2)) == pytest.approx(2.0, rel=0.03)
    assert seconds((0, 2), (1, 2)) == pytest.approx(2.0, rel=0.03)


# what ranks send ------------------------------------------------------------------------------------------------------


def recorded(requested: Run, ranks: int, rank: int = 0, steps: int = 1, params: int = 2_400_000) -> list[Message]:
    """Return what a rank sends in some rounds."""
    return Simulation(requested, profile(params), ranks, range(steps), 0).record(rank)


def test_a_rank_sends_a_message_for_every_bucket():
    sizes = BucketSizes.of(run("sync", 4), profile())
    assert [message.sends for message in recorded(run("sync", 4), 4, 1)] == [
        {1: 4 * numel} for player in (sizes.d, sizes.g) for numel in player
    ]


def test_a_period_begins_with_its_exchange_and_goes_on_without():
    counts = [len(recorded(run("sync", 4, sync_period=3), 4, steps=steps, params=2000)) for steps in range(1, 8)]
    assert counts == [2, 2, 2, 4, 4, 4, 6]


def test_numbers_are_charged_and_not_computed():
    """An int8 all-reduce encodes all of a vector and the mean of the own shard, and decodes all but its own."""
    costs = {"int8/encode": 1e-6, "int8/decode": 0.0, "pass": 0.0}
    of = dataclasses.replace(profile(params=2_000_000), codec_cost=costs)
    requested = run("sync", 4, wire="int8")
    (first, *_) = Simulation(requested, of, 4, range(1), 0).play(links(4, 0.0), 4)
    numel = sum(sum(player) for player in dataclasses.astuple(BucketSizes.of(requested, of)))
    assert first.codec_s == pytest.approx(1.25e-6 * numel, rel=1e-3)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("sync", {}),
    ("sync", {"wire": "int8"}),
    ("sync", {"wire": "sign", "sync_period": 2}),
    ("sync", {"wire": "int8", "sync_period": 4, "fragments": 2, "delay": 3, "outer": "nesterov"}),
    ("quantized", {"wire": "int4"}),
    ("gossip", {}),
    ("gossip", {"topology": "ring", "rounds": 2}),
    ("gossip", {"topology": "exponential", "wire": "int8"}),
    ("DPOSG", {}),
    ("sync", {"shard_optimizer": True}),
    ("async", {"split": "none"}),
    ("async", {"split": "1:3"}),
]


@pytest.mark.parametrize(("name", "fields"), KINDS, ids=lambda value: str(value))
def test_ranks_send_the_strategys_traffic(name, fields):
    """What exchanges predict of their bytes (`Exchange.traffic`) is what is sent in a period."""
    requested = run(name, 4, **fields)
    period = 2 * fields.get("sync_period", 1)
    before = requested.strategy.rounds_in_flight
    timelines = Simulation(requested, profile(), 4, range(before + period), before).play(links(4), 4)
    for rank, timeline in enumerate(timelines):
        world = lone_world(4, rank)
        of_wire = bucket_bytes(requested.strategy.wire)
        game = make_emulated_game(2_400_000, 0.0, 0.5, of_wire, requested.strategy.num_fragments)
        expected = role_traffic(requested.strategy.role(game, world, requested.lanes), game)
        if fields.get("split") != "1:3":  # of which the games' images differ
            assert timeline.sent_bytes / period == pytest.approx(expected.sent_bytes, rel=1e-3)
        assert timeline.messages / period == pytest.approx(expected.messages, rel=0.34)


# predictions ----------------------------------------------------------------------------------------------------------


def step_s(strategy: str, ranks: int, between: Links, of: Profile, **fields: Any) -> float:
    return predict(run(strategy, ranks, **fields), of, between).step_s


def test_one_rank_takes_the_profiled_time():
    result = predict(run("sync", 1), profile(d_s=0.2, g_s=0.1), parse_links("1 hosts, 1 Gbit/s, 0 us"))
    assert result.step_s == pytest.approx(0.3)
    assert result.sent_bytes == 0
    assert result.efficiency == pytest.approx(1.0)


def test_what_cannot_overlap_adds_up():
    """All gradients come at the end of a turn."""
    result = predict(run("sync", 4), profile(d_s=0.2, g_s=0.1), links(4))
    exchange = 1.5 * 4 * 2_400_000 / RATE
    assert result.step_s == pytest.approx(0.3 + exchange, rel=0.01)
    assert result.breakdown_s["bandwidth"] == pytest.approx(exchange, rel=0.02)
    assert result.breakdown_s["compute"] == pytest.approx(0.3)
    assert result.breakdown_s["latency"] == 0.0
    assert result.images_per_s == pytest.approx(8 / result.step_s)


def test_what_overlaps_is_hidden():
    """Gradients come long before backward ends: only the last bucket's sum is seen."""
    early = TurnProfile(2, tuple(0.01 * (i + 1) for i in range(NUM_READY_PARTS)), 20.0, 20.0)
    of = dataclasses.replace(profile(), g=(early,), d=(early,))
    assert step_s("sync", 4, links(4), of) == pytest.approx(40.0, rel=1e-6)
    together = step_s("CPOAdam", 4, links(4), of)
    assert together == pytest.approx(40.0, rel=1e-6)


def test_gossip_sends_under_computing():
    exchange = 4 * 2_400_000 / RATE
    assert step_s("gossip", 4, links(4), profile()) == pytest.approx(exchange, rel=0.01)
    hidden = step_s("gossip", 4, links(4), profile(d_s=exchange, g_s=exchange))
    assert hidden == pytest.approx(2 * exchange, rel=0.01)
    ring = step_s("gossip", 4, links(4), profile(), topology="ring")
    assert ring == pytest.approx(2 * exchange, rel=0.02)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("period", [20, 100])
def test_delayed_messages_travel_while_ranks_compute(period):
    of = profile(d_s=0.1, g_s=0.1)
    exchange = 1.5 * 4 * 2_400_000 / RATE  # takes 7.2 rounds
    assert step_s("sync", 4, links(4), of, sync_period=period, delay=8) == pytest.approx(0.2, rel=1e-3)
    late = step_s("sync", 4, links(4), of, sync_period=period, delay=5)
    assert late == pytest.approx(0.2 + (exchange - 5 * 0.2) / period, rel=0.01)
    last = step_s("sync", 4, links(4), of, sync_period=period, delay=period - 1)
    assert last == pytest.approx(0.2, rel=1e-3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("period", [8, 100])
def test_fragments_share_the_exchange_of_a_period(period):
    of = profile(d_s=0.1, g_s=0.1)
    streamed, whole = (
        predict(run("sync", 4, sync_period=period, fragments=fragments), of, links(4)) for fragments in (4, 1)
    )
    assert streamed.step_s == pytest.approx(0.2 + 1.5 * 4 * 2_400_000 / RATE / period, rel=0.01)
    assert streamed.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-3)
    hidden = step_s("sync", 4, links(4), of, sync_period=period, fragments=4, delay=1)  # each takes 0.18 s
    assert hidden == pytest.approx(0.2, rel=1e-3)


def test_a_period_shares_its_exchange():
    exchange = 1.5 * 4 * 2_400_000 / RATE
    for every in (2, 4, 100):
        result = step_s("sync", 4, links(4), profile(d_s=0.1, g_s=0.1), sync_period=every)
        assert result == pytest.approx(0.2 + exchange / every, rel=0.01)


def test_the_faster_team_waits_for_the_slower():
    of = profile(params=2_000, d_s=1.0, g_s=0.25)
    result = predict(run("async", 2, split="1:1"), of, links(2))
    assert result.step_s == pytest.approx(2.0, rel=0.05)  # D's turn on twice as many images, without making them
    waits = predict(run("async", 2, split="1:1"), dataclasses.replace(of, d=of.g, g=of.d), links(2))
    assert waits.step_s == pytest.approx(2.0, rel=0.05)
    assert result.staleness_rounds <= 1.0


def test_lead_hides_the_latency_between_teams():
    of = profile(params=2_000, d_s=0.1, g_s=0.1)
    near, remote = (step_s("async", 2, links(2, 0.2), of, split="1:1", max_lead_rounds=lead) for lead in (1, 8))
    assert remote < 0.6 * near


def test_lagging_links_delay_no_rank():
    slow, slower = (Links(hosts=4, up=[RATE / times, RATE, RATE, RATE], latency=0.0) for times in (4, 20))
    of = profile(d_s=0.3, g_s=0.3)
    lagging = predict(run("async-gossip", 4), of, slow)
    assert lagging.step_s == pytest.approx(0.6, rel=0.02)
    rounds = run("async-gossip", 4).strategy.max_message_delay + 1
    swap_s = 2 * 2 * 4_800_000 / (RATE / 20)
    assert step_s("async-gossip", 4, slower, of) == pytest.approx(swap_s / rounds, rel=0.05)  # beyond so many
    assert lagging.staleness_rounds > 0.1
    assert step_s("gossip", 4, slow, of, topology="ring") > 5 * lagging.step_s


@pytest.mark.slow
def test_async_gossip_over_slow_links_sends_at_the_link_rate():
    """Two networks of 4.8 MB each, to two neighbors, at 10 MB/s, and rounds of 0.1 s."""
    of = profile(d_s=0.05, g_s=0.05)
    slow = predict(run("async-gossip", 4), of, links(4))
    fast = predict(run("async-gossip", 4), of, Links(hosts=4, up=1e3 * RATE, latency=0.0))
    assert fast.sent_bytes == pytest.approx(2 * 4 * 2_400_000, rel=0.01)
    assert 0.5 * RATE * slow.step_s < slow.sent_bytes <= 1.05 * RATE * slow.step_s
    assert slow.messages < fast.messages


def test_a_slow_pair_delays_distant_neighbors_later():
    slow = links(8, pairs={"0-1": "8 Mbit/s, 0 s"})
    of = profile(params=240_000)
    assert step_s("sync", 8, slow, of) > 5 * step_s("sync", 8, links(8), of)
    played = Simulation(run("gossip", 8, topology="ring"), of, 8, range(2), 0).play(slow, 8)
    first = [one.rounds_s[0] for one in played]
    assert first[0] > 3 * first[4]
    assert first[1] > 3 * first[4]


@pytest.mark.parametrize("strategy", ["sync", "gossip", "quantized"])
def test_more_of_anything_takes_no_less(strategy):
    of, base = profile(d_s=0.1, g_s=0.1), links(4, 0.001)
    usual = step_s(strategy, 4, base, of)
    assert step_s(strategy, 4, links(4, 0.05), of) > usual
    assert step_s(strategy, 4, dataclasses.replace(base, up=RATE / 2), of) > usual
    assert step_s(strategy, 4, base, profile(params=4_800_000, d_s=0.1, g_s=0.1)) > usual
    assert step_s(strategy, 4, base, profile(d_s=0.3, g_s=0.1)) >= usual
    assert step_s(strategy, 4, dataclasses.replace(base, contention_efficiency=0.5), of) > usual


def test_equal_ranks_are_simulated_once():
    of, between = profile(d_s=0.05, g_s=0.05), links(4, 0.01)
    for name, fields in KINDS[:5]:
        once = step_s(name, 4, between, of, **fields)
        uneven = dataclasses.replace(between, up=[RATE, RATE, RATE, RATE * (1 + 1e-12)])  # every rank is played
        assert once == pytest.approx(step_s(name, 4, uneven, of, **fields), rel=1e-6), name


@pytest.mark.parametrize("ranks", [3, 5, 8, 31])
@pytest.mark.parametrize(("params", "moments"), [(2, 0), (10, 7), (200_000, 33)])
def test_sums_of_fewer_numbers_than_segments_are_played(params: int, moments: int, ranks: int):
    measured = profile(params, d_s=0.01, g_s=0.01, moments_numel=(moments, moments))
    once = predict(run("sync", ranks), measured, links(ranks, 0.01))
    if ranks < 31:
        every = predict(run("sync", ranks), measured, links(ranks, 0.01, pairs={"0-1": Link(RATE, 0.01)}))
        assert once.step_s == pytest.approx(every.step_s, rel=0.1)
    assert once.step_s >= 0.02


def test_uninitialised_memory_is_not_read():
    torch.use_deterministic_algorithms(True)  # then `empty` is full of NaN
    try:
        result = predict(run("sync", 3, wire="int8"), profile(10, d_s=0.01, g_s=0.01), links(3, 0.01))
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.step_s > 0.02


def test_hosts_of_several_ranks_share_a_port():
    within = {"intra_host": "80 Gbit/s, 0 s"}
    one, two = (Links(hosts=4, ranks_per_host=each, up=RATE, latency=0.0, **within) for each in (1, 2))  # pyright: ignore
    sync = [predict(run("sync", some.ranks), profile(), some).step_s for some in (one, two)]
    assert sync[1] == pytest.approx(sync[0] * (7 / 8) / (3 / 4), rel=0.03)  # a ring crosses every port once
    gossip = [step_s("gossip", some.ranks, some, profile(), topology="exponential") for some in (one, two)]
    assert gossip[1] > 1.8 * gossip[0]


def test_stragglers_are_the_same_for_the_same_seed_and_cost_more_in_lockstep():
    from paragan.core.philox import philox_generator

    def pace(seed: int):
        return lambda rank, step: math.exp(0.5 * philox_generator(seed, "pace", rank, position=step).standard_normal())

    of = profile(params=2_000, d_s=0.5, g_s=0.5)
    requested = run("sync", 4)
    one, repeated, other = (predict(requested, of, links(4), slowdown=pace(seed), min_rounds=16) for seed in (1, 1, 2))
    assert one == repeated
    assert one.step_s != other.step_s
    assert one.step_s > 1.3
    assert one.breakdown_s["waiting"] > 0.1


def test_moments_of_a_batch_travel_with_the_forward_pass():
    of = dataclasses.replace(profile(params=2_000, d_s=0.1, g_s=0.1), moments_numel=(100, 100))
    assert step_s("sync", 4, links(4, 0.05), of) >= step_s("sync", 4, links(4, 0.05), profile(2_000, 0.1, 0.1))


def test_buckets_are_cut_where_layers_end():
    of = profile()
    sizes = (tuple(equal_layers(of.num_params[0])), (of.num_params[1] - 100, 100))
    buckets = BucketSizes.of(run("sync", 2), dataclasses.replace(of, layer_numels=sizes))
    assert len(buckets.d) == 2
    assert len(buckets.g) > 2


def test_memory_grows_with_the_batch_and_exchange_state():
    some = (MemoryUse(2, 1_000_000), MemoryUse(4, 1_500_000))
    of = profile(memory=some)
    plain, quantized = (predict(run("sync", 4, wire=wire), of, links(4)).memory_bytes for wire in ("exact", "int8"))
    assert plain == 1_000_000
    assert quantized > plain + 4 * 2_400_000


def test_a_sharded_optimizer_takes_less_memory_and_shows_the_gathering_of_parameters():
    of = profile(memory=(MemoryUse(2, 50_000_000),))
    whole, sharded = (predict(run("sync", 4, shard_optimizer=shard), of, links(4)) for shard in (False, True))
    state_bytes = 4 * (2 * sum(of.num_params) + of.num_params[0])
    assert whole.memory_bytes - sharded.memory_bytes == 3 * state_bytes // 4
    assert sharded.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-3)
    even = TurnProfile(2, tuple(float(i + 1) for i in range(NUM_READY_PARTS)), 20.0, 20.0)
    hidden = dataclasses.replace(of, g=(even,), d=(even,))
    seconds = [step_s("sync", 4, links(4), hidden, shard_optimizer=shard) for shard in (False, True)]
    gather_s = 0.75 * 4 * 2_400_000 / RATE
    assert seconds[1] - seconds[0] == pytest.approx(gather_s, rel=0.1)


def test_per_label_games_send_nothing():
    result = predict(run("per-label", 4), profile(d_s=0.1, g_s=0.1), links(4))
    assert result.sent_bytes == 0
    assert result.images_per_s == pytest.approx(4 * 8 / result.step_s)


@pytest.mark.parametrize("name", ["sync", "gossip"])
def test_the_simulated_game_has_the_buckets_and_bytes_of_the_game(name: str):
    """Buckets, batch moments and bytes of a network with batch norm."""
    requested = resolve(
        tiny_run.make_run(f"strategy={name}", "nets.batch_norm=true", "nets.width=16"), tiny_run.make_dataset()
    )
    world = lone_world(4)
    game = build_game(
        requested,
        build_networks(requested, make_spec(requested.data, tiny_run.make_dataset()), world.device),
        tiny_run.make_dataset(),
        world.device,
    )
    layers = tuple(tuple(numel for _, numel in player.flat.slices) for player in game.players)
    moments = (game.g.moments.numel(), game.d.moments.numel())
    counts = (game.g.flat.params.numel(), game.d.flat.params.numel())
    of = dataclasses.replace(profile(), num_params=counts, layer_numels=layers, moments_numel=moments)
    buckets = BucketSizes.of(requested, of)
    for player, sizes in zip(game.players, (buckets.g, buckets.d)):
        assert tuple(bucket.grads.numel() for bucket in player.flat.buckets) == sizes
    expected = role_traffic(requested.strategy.role(game, world, requested.lanes), game)
    periods = 2  # of one-peer gossip on four ranks
    timeline = Simulation(requested, of, 4, range(periods), 0).play(links(4), 4)[0]
    assert timeline.sent_bytes / periods == pytest.approx(expected.sent_bytes, rel=1e-6)
    assert timeline.messages / periods == expected.messages
