"""Every strategy computes on the stand-in accelerator what it computes on the CPU, and does not make the host wait."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import standin
import tiny_run
from paragan.comm.topology import Ring
from paragan.comm.world import World
from paragan.core.devices import BACKENDS, backend_of
from paragan.data.dataset import load_data
from paragan.game.player import Player
from paragan.strategies.gossip_dposg import AsyncGossipLinks
from paragan.train.loop import play_round
from processes import final_tensors, train_tiny

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
every_strategy = pytest.mark.parametrize(
    "name",
    [
        name if name in table.REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow)
        for name in table.STRATEGIES
    ],
)

ROUNDS = 4
FIRST_STEADY = 2  # round
VARIANTS = table.VARIANTS | {
    "bf16": ("device.precision=bf16",),
    "spectral": ("nets.spectral=true",),
    "contiguous": ("device.channels_last=false",),
}

LOSSY_CHECK = {"paragan/comm/compressed_allreduce.py wait": 2.0}  # may the gradient be quantized? once a player
SNAPSHOT = {"paragan/comm/mailbox.py pack": 1.0}  # is sent by gloo

# How often the host waits for the device in a steady round, by strategy and function; not at all where there is none.
WAITS_OF_ONE_RANK: dict[str, dict[str, float]] = {"DQGAN sign": LOSSY_CHECK}
WAITS_OF_TWO_RANKS: dict[str, dict[str, float]] = {
    "sync int4": LOSSY_CHECK,
    "sync, user wire": LOSSY_CHECK,
    "quantized": LOSSY_CHECK,
    "DQGAN sign": LOSSY_CHECK,
    "CPOAdam-GQ": LOSSY_CHECK,
    "sync every 2": {"paragan/comm/compressed_allreduce.py wait": 1.0},
    "quantized, Nesterov": {"paragan/comm/compressed_allreduce.py wait": 1.0},
    "sync, sparse": {"paragan/comm/compressed_allreduce.py wait": 1.0},
    "sync, delayed int8": {"paragan/comm/compressed_allreduce.py wait": 1.5},
    "async teams": SNAPSHOT,
    "async teams int8": SNAPSHOT,
    "per-label, ranks of a label": LOSSY_CHECK,
}


def run_of(name, *more):
    return tiny_run.make_run("nets.batch_norm=true", *table.STRATEGIES[name], *more)


def to_host(state):
    return {name: value.cpu() for name, value in state.items()}


def play(run, world, rounds=ROUNDS):
    """Return the final state, and what made the host wait in the steady rounds."""
    s = tiny_run.make_session(run, world)
    for _ in range(FIRST_STEADY):
        play_round(s)
    with standin.recording() as syncs:
        for _ in range(rounds - FIRST_STEADY):
            play_round(s)
    return to_host(tiny_run.gather_owner_state(s)), syncs


def check(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def count_waits(syncs, rounds=ROUNDS):
    return {place: n / (rounds - FIRST_STEADY) for place, n in Counter(sync.place for sync in syncs).items()}


def solo():
    return World.solo(standin.install())


@functools.cache
def on_the_cpu(run, rounds=ROUNDS):
    return tiny_run.play_rounds(run, rounds)


@every_strategy
def test_one_rank_computes_what_it_computes_on_the_cpu(name):
    run = run_of(name)
    state, syncs = play(run, solo())
    check(state, on_the_cpu(run))
    assert count_waits(syncs) == WAITS_OF_ONE_RANK.get(name, {}), list(map(str, syncs))


@pytest.mark.slow
@every_strategy
def test_two_ranks_compute_what_they_compute_on_the_cpu(pool, name):
    run = run_of(name)

    def job(world):
        return play(run, world)

    for (state, syncs), (expected, _) in zip(pool(2, job, standin.NAME), pool(2, job), strict=True):
        check(state, expected)
        assert count_waits(syncs) == WAITS_OF_TWO_RANKS.get(name, {}), list(map(str, syncs))


WITHOUT_BUFFERS = ("nets.batch_norm=false", "nets.spectral=false")  # G and D may compute on streams of their own
ON_TWO_STREAMS = {
    "sync": ("strategy=sync", "strategy.order=simultaneous"),
    "sync, two steps of D": ("strategy=sync", "strategy.order=simultaneous", "d_steps=2", "objective.r1=1"),
    "quantized": ("strategy=quantized", "strategy.order=simultaneous"),
    "gossip": ("strategy=gossip", "strategy.order=simultaneous"),
    "async, bf16": ("strategy=async", "strategy.split=none", "device.precision=bf16"),
}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("settings", ON_TWO_STREAMS.values(), ids=ON_TWO_STREAMS)
def test_players_on_two_streams_compute_what_they_compute_on_the_cpu(pool, settings):
    run = tiny_run.make_run(*WITHOUT_BUFFERS, *settings)

    def job(world):
        device = backend_of(world.device)
        with mock.patch.object(
            type(device), "side_streams", autospec=True, side_effect=type(device).side_streams
        ) as used:
            state, _ = play(run, world)
        return state, [call.args[2] for call in used.call_args_list]

    for (state, streams), (expected, _) in zip(pool(2, job, standin.NAME), pool(2, job), strict=True):
        check(state, expected)
        assert 2 in streams


@pytest.mark.parametrize("settings", [("nets.batch_norm=true",), WITHOUT_BUFFERS], ids=["one stream", "two streams"])
@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_gossip_through_the_host_is_that_of_the_cpu(pool, wire, settings):
    """As where ranks may be lost (comm/host_staging.py). The host waits once a player."""
    run = tiny_run.make_run("strategy=gossip", f"strategy.wire={wire}", "strategy.order=simultaneous", *settings)

    def job(world):
        world.all_ranks = world.pair_group(1 - world.rank)
        return play(run, world)

    for (state, syncs), (expected, _) in zip(pool(2, job, standin.NAME), pool(2, job), strict=True):
        check(state, expected)
        assert count_waits(syncs) == {"paragan/comm/host_staging.py _copies_to_send": 2.0}


@pytest.mark.slow
def test_teams_of_three_ranks_compute_what_they_compute_on_the_cpu(pool):
    run = tiny_run.make_run(
        "nets.batch_norm=true", "strategy=async", "strategy.split=1:2", "d_steps=2", "strategy.snapshot_wire=bf16"
    )

    def job(world):
        return play(run, world)[0]

    for state, expected in zip(pool(3, job, standin.NAME), pool(3, job), strict=True):
        check(state, expected)


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sync", "async, lags and replay", "gossip"])
def test_parameters_of_another_dtype_are_trained_as_on_the_cpu(name, dtype):
    states = []
    for world in (solo(), World.solo()):
        s = tiny_run.make_session(run_of(name), world, dtype=dtype)
        for _ in range(3):
            play_round(s)
        states.append(to_host(tiny_run.session_state(s)))
    check(*states)


@pytest.mark.slow
def test_asynchronous_gossip_of_a_device_is_that_of_the_cpu(pool):
    """Without staleness its numbers do not depend on time."""

    def job(world):
        links = AsyncGossipLinks(Ring(), world, 0)
        torch.manual_seed(world.rank)
        player = Player("G", nn.Linear(30, 7).to(world.device), lambda p: torch.optim.SGD(p, lr=0.1))
        exchange = links.make_exchange(player)
        for step in range(5):
            with player.flat.exchanging(exchange, step):
                pass
            player.flat.finish()
            player.flat.params.mul_(1.1).add_(0.1 * world.rank)
        return player.flat.params.cpu()

    for params, expected in zip(pool(3, job, standin.NAME), pool(3, job), strict=True):
        assert torch.equal(params, expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_compute_what_they_compute_on_the_cpu(variant):
    run = run_of("sync", *VARIANTS[variant])
    rounds = 3
    state, syncs = play(run, solo(), rounds)
    check(state, on_the_cpu(run, rounds))
    assert not syncs


# Checkpoints travel ---------------------------------------------------------------------------------------------------


def resume(run, world, folder):
    """Return the state after the rest of the rounds."""
    s = tiny_run.make_session(run, world, folder)
    while s.clock.step < ROUNDS:
        play_round(s)
    return to_host(tiny_run.gather_owner_state(s))


@every_strategy
def test_one_rank_goes_on_with_a_checkpoint_of_the_other_device(name, tmp_path):
    """To the device and from it by turns; both ways with what checkpoints hold of earlier rounds."""
    run = run_of(name)
    ways = ((World.solo(), solo()), (solo(), World.solo()))
    if name != "async, lags and replay":
        ways = (ways[list(table.STRATEGIES).index(name) % 2],)
    for first, second in ways:
        folder, _ = tiny_run.save_after(run, 2, first, tmp_path / first.device.type)
        check(resume(run, second, folder), on_the_cpu(run))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync int4", "async teams int8", "gossip int8"])
@pytest.mark.parametrize("devices", [("cpu", standin.NAME), (standin.NAME, "cpu")], ids=" then ".join)
def test_two_ranks_go_on_with_a_checkpoint_of_the_other_device(pool, name, devices, tmp_path):
    run = run_of(name)

    def save(world):
        return tiny_run.save_after(run, 2, world, tmp_path)[0]

    first, second = devices
    folder = pool(2, save, first)[0]
    expected = pool(2, lambda world: tiny_run.play_rounds(run, ROUNDS, world))
    for state, other in zip(pool(2, lambda world: resume(run, world, folder), second), expected, strict=True):
        check(state, other)


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """A folder of 24 images of two classes: an epoch ends inside the second batch."""
    rng = np.random.default_rng(0)
    for i, pixels in enumerate(rng.integers(0, 256, (24, 8, 8), np.uint8)):
        folder = tmp_path / "photos" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i:03d}.png")
    return tmp_path / "photos"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("lanes_per_pass", [0, 2])
def test_streamed_images_are_those_in_memory(photos, monkeypatch, lanes_per_pass):
    """They are decoded into page-locked memory, and copied on a stream of their own while a step computes."""
    run = run_of("sync", f"data.path={photos}", "data.mirror=true", f"device.lanes_per_pass={lanes_per_pass}")

    def play_with(cache, world):
        monkeypatch.setattr(tiny_run, "make_dataset", lambda: load_data(str(photos), resolution=8, cache=cache))
        s = tiny_run.make_session(run, world)
        with contextlib.closing(s.lanes):
            for _ in range(FIRST_STEADY):
                play_round(s)
            with standin.recording() as syncs:
                for _ in range(ROUNDS - FIRST_STEADY):
                    play_round(s)
            return to_host(tiny_run.session_state(s)), syncs

    expected, _ = play_with("memory", World.solo())
    check(play_with("memory", solo())[0], expected)
    state, syncs = play_with("stream", solo())
    check(state, expected)
    assert set(count_waits(syncs)) <= {"paragan/data/loader/device_transfer.py _start_copy"}


# Labels ---------------------------------------------------------------------------------------------------------------


def test_a_generator_for_each_label_is_that_of_the_cpu(advice_inputs, tmp_path, monkeypatch):
    settings = ("--strategy=per-label", "--kimg=0.032", "--device.concat_real_fake=false")
    arguments = (f"--data={advice_inputs}/two.npz", *settings)
    expected = train_tiny(tmp_path / "cpu", *arguments, "--device.kind=cpu")
    monkeypatch.setitem(BACKENDS, "cuda", backend_of(standin.install()))
    trained = train_tiny(tmp_path / "standin", *arguments, "--device.kind=cuda")
    for label in ("0000", "0001"):
        assert final_tensors(trained / "labels" / label) == final_tensors(expected / "labels" / label)
