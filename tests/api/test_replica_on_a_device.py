"""Replicas on an accelerator (a stand-in): the steps of the CPU, bit for bit, for which no host waits for a device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import paragan as pg
import standin
from paragan.api import joined_world
from paragan.core.errors import RunError

BATCH, Z, X = 12, 4, 6


OPTIONS = (
    {},
    {"max_norm": 0.1, "ema": 0.9},
    {"buffers": "mean"},
    {"buffers": "own"},
    {"turn_options": {"backwards": None}},
    {"turn_options": {"backwards": 4}},
)


def build(device):
    """Return G and D with batch norm; D has a layer that no loss uses."""
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(Z, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, X))
    d = nn.Sequential(nn.Linear(X, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    d[0].unused = nn.Linear(3, 3)
    return g.to(device), d.to(device)


def adam(net):
    return torch.optim.Adam(net.parameters(), 1e-2, betas=(0.5, 0.9), weight_decay=0.1)


def sgd(net):
    return torch.optim.SGD(net.parameters(), 1e-2)


def batches(world, steps):
    """Return this rank's part of every batch: latents and samples, on its device."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        whole = (torch.randn(BATCH, width, generator=generator) for width in (Z, X))
        yield tuple(x[world.rank :: world.size].contiguous().to(world.device) for x in whole)


def replica_tensors(*replicas):
    """Return all that replicas hold, on the host."""
    values = []
    for replica in replicas:
        values += [tensor.detach() for _, tensor in replica.named_tensors()]
        states = [sorted(replica.optimizer.state.get(p, {}).items()) for p in replica.trained]
        values += [value for state in states for _, value in state if torch.is_tensor(value)]
        for flat, average in zip(replica.flats, replica.averages):
            values += [average.params[start : start + size] for start, size in flat.slices]
        values += [v for flat in replica.flats for _, v in sorted(flat.states().items())]
    return [value.cpu() for value in values]


EXCHANGES = (
    *({"wire": wire} for wire in ("bf16", "fp16", "int8", "int4", "int2", "qsgd", "sign", "topk", "randomk")),
    *({"exchange": "sync+sync_period=2"}, {"exchange": "gossip+topology=ring"}, {"exchange": "gossip", "wire": "int8"}),
    *({"exchange": exchange, "optimizer": sgd} for exchange in ("DQGAN", "DPOSG")),
)


def loss_d(g, d, z, x):
    return d(g(z).detach()).mean() - d(x).mean() + d(x).square().mean()


def play(world, steps=4, optimizer=adam, turn_options=None, **options):
    """Play D and G alternately. Returns the replicas, and what made the host wait in the last two steps."""
    g, d = build(world.device)
    gen = pg.Replica(g, optimizer(g), world=world, **options)
    disc = pg.Replica(d, optimizer(d), world=world, **options)
    syncs = []
    for step, (z, x) in enumerate(batches(world, steps)):
        with standin.recording() as recorded:
            with disc.turn(**turn_options or {}):
                loss_d(g, d, z, x).backward()
            with gen.turn(**turn_options or {}):
                d(g(z)).mean().neg().backward()
        if step >= steps - 2:
            syncs += recorded
    return (gen, disc), [str(sync) for sync in syncs]


def play_and_read(world, options):
    replicas, syncs = play(world, **options)
    for replica in replicas:
        replica.release()
    return replica_tensors(*replicas), syncs


def assert_same(results, expected, message=None):
    """Check that all ranks hold the same bits."""
    for a, b in zip(results, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), message


def run_on_both(pool, ranks, job):
    """Return what job(world) returns on the ranks: with a device each, and with CPUs."""
    return pool(ranks, job, standin.NAME), pool(ranks, job)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_those_of_the_cpu_and_no_host_waits(pool, ranks):
    def job(world):
        return [play_and_read(world, options) for options in OPTIONS]

    on_device, on_cpu = run_on_both(pool, ranks, job)
    for options, played, expected in zip(OPTIONS, zip(*on_device), zip(*on_cpu), strict=True):
        assert_same([tensors for tensors, _ in played], [tensors for tensors, _ in expected], options)
        assert [syncs for _, syncs in played] == [[]] * ranks, options


@pytest.mark.slow
def test_every_exchange_equals_that_of_the_cpu(pool):
    def job(world):
        return [play_and_read(world, options) for options in EXCHANGES]

    on_device, on_cpu = run_on_both(pool, 2, job)
    for options, played, expected in zip(EXCHANGES, zip(*on_device), zip(*on_cpu), strict=True):
        assert_same([tensors for tensors, _ in played], [tensors for tensors, _ in expected], options)
        assert not [sync for _, syncs in played for sync in syncs if "paragan/api" in sync], options


@pytest.mark.slow
def test_turns_of_unequal_batches_unused_parameters_and_turns_without_backward(pool):
    def job(world):
        g, d = build(world.device)
        gen, disc = (pg.Replica(net, adam(net), world=world) for net in (g, d))
        with standin.recording() as syncs:
            for step, (z, x) in enumerate([*batches(world, 3)]):
                size = len(x) - world.rank
                with disc.turn(weight=size):
                    loss_d(g, d, z[:size], x[:size]).backward()
                with gen.turn():
                    if step == 1 and world.rank:  # in this step only, and on this rank only
                        d(g(z)).mean().backward()
        unused = [p.grad is None for p in d[0].unused.parameters()]
        return replica_tensors(gen, disc), gen.turns, unused, [str(s) for s in syncs if "batches" not in str(s)]

    on_device, on_cpu = run_on_both(pool, 2, job)
    assert_same([tensors for tensors, *_ in on_device], [tensors for tensors, *_ in on_cpu])
    assert [rest[:2] for _, *rest in on_device] == [[3, [True, True]]] * 2
    assert not [sync for *_, syncs in on_device for sync in syncs if "paragan/api" in sync]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_grad_scaler_that_skips_a_step(pool, dtype):
    def job(world):
        played = []
        for wire in ("exact", "int8"):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(X, 8), nn.Tanh(), nn.Linear(8, 1)).to(world.device)
            replica = pg.Replica(net, adam(net), world=world, wire=wire, max_norm=1.0)
            scaler = torch.amp.GradScaler(world.device.type, init_scale=2.0**10)
            for step, (_, x) in enumerate([*batches(world, 4)]):
                with replica.turn(scaler=scaler), torch.autocast(world.device.type, dtype):
                    factor = torch.inf if step == 1 and world.rank else 1.0
                    scaler.scale(net(x).square().mean() * factor).backward()
                scaler.update()
            replica.release()
            played += [*replica_tensors(replica), torch.tensor(scaler.get_scale())]
        return played

    on_device, on_cpu = run_on_both(pool, 2, job)
    assert_same(on_device, on_cpu)
    assert on_device[0][-1] == 2.0**9


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("options", [{"ema": 0.9}, {"wire": "int8"}, {"exchange": "gossip"}], ids=str)
def test_saves_travel_between_devices(pool, tmp_path, options):
    def play_and_save(world):
        replicas, _ = play(world, **options)
        pg.save(tmp_path / world.device.type, *replicas)

    def load_and_play(world):
        replicas, _ = play(world, 0, **options)
        other = "cpu" if world.device.type == standin.NAME else standin.NAME
        pg.load(tmp_path / other, *replicas)
        gen, disc = replicas
        g, d = (replica.modules[0] for replica in replicas)
        for z, x in batches(world, 2):
            with disc.turn():
                loss_d(g, d, z, x).backward()
            with gen.turn():
                d(g(z)).mean().neg().backward()
        return replica_tensors(*replicas)

    run_on_both(pool, 2, play_and_save)
    assert_same(*run_on_both(pool, 2, load_and_play))


def test_a_group_that_exists_is_adopted_with_its_device(pool, in_foreign_group):
    def job():
        with mock.patch.object(joined_world, "_world", None), pg.join() as world:
            replicas, syncs = play(world)
        return replica_tensors(*replicas), syncs, str(world.device)

    on_device = in_foreign_group(2, job, standin.NAME)
    assert_same([tensors for tensors, *_ in on_device], [t for t, _ in pool(2, lambda w: play_and_read(w, {}))])
    assert [rest for _, *rest in on_device] == [[[], f"{standin.NAME}:0"]] * 2


def test_checks_find_a_difference_between_devices(pool):
    def job(world):
        g, _ = build(world.device)
        gen = pg.Replica(g, adam(g), world=world)
        for z, _ in batches(world, 1):
            with gen.turn():
                g(z).mean().backward()
        with standin.recording() as syncs:
            pg.check_replicas(gen)  # the states of Adam are on the device, but for its counts
        assert len(syncs) <= 3
        with torch.no_grad():
            g[0].weight[0, 0] += world.rank
        with pytest.raises(RunError, match=r"Sequential 0\.weight on rank 1 differs") as error:
            pg.check_replicas(gen)
        return str(error.value)

    on_device, on_cpu = run_on_both(pool, 2, job)
    assert on_device == on_cpu


def test_a_failure_inside_a_turn_reaches_the_other_rank(pool):
    def job(world):
        g, _ = build(world.device)
        gen = pg.Replica(g, adam(g), world=world)
        for step, (z, _) in enumerate(batches(world, 4)):
            with gen.turn():
                g(z).mean().backward()
                if world.rank and step == 2:
                    raise ValueError("no such image")

    with pytest.raises(AssertionError, match="RunError: rank 1: turn 2 of Sequential: ValueError: no such image"):
        pool(2, job, standin.NAME)
