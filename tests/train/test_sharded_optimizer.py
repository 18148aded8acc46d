"""A sharded optimizer (ZeRO-1) trains what an unsharded one does, bit for bit; each rank keeps a part of its state."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch

import paragan as pg
import tiny_run
from advice import advises
from paragan.config.validate import validate
from paragan.core.jsonl import read_jsonl
from paragan.plan.cost import estimate_run_cost, player_traffic
from paragan.plan.round_cost import blank_dataset, build_roles, estimate_round
from paragan.train import build
from paragan.train.averaged_model import averaged_sampler
from paragan.train.checkpoint import Checkpoints, read_checkpoint
from paragan.train.loop import play_round
from processes import final_tensors, train_tiny

SHARDED = ("strategy.shard_optimizer=true",)
NETS = ("nets.batch_norm=true", "nets.spectral=true")
CASES = {  # optimizers of the two players, and what a step does besides
    "Adam, SGD with momentum": ("d.optimizer=sgd", "d.optimizer.momentum=0.9", "d_steps=2"),
    "Adam and AdaBelief, optimistic": (
        *("g.optimizer_wrapper=optimistic", "d.optimizer=adabelief", "d.optimizer.lr=1e-3"),
        *("strategy.order=simultaneous", "objective.r1=1"),
    ),
    "RMSprop and Lookahead, clipped weights": (
        *("g.optimizer=rmsprop", "g.optimizer.lr=1e-4", "d.optimizer=lookahead", "d.optimizer.k=2"),
        *("objective.loss=wasserstein", "objective.clip=0.01", "nets.spectral=false"),
    ),
    "groups, one of them frozen": (
        "g.groups=[{pattern: 'start.*', lr_factor: 0.5}, {pattern: 'ups.*', freeze_from_kimg: 0.032}]",
        *("d.groups=[{pattern: 'body.0.*', lr_factor: 0.5}]", "d.optimizer.weight_decay=0.1"),
        *("d.decay_norms_and_biases=false", "d.schedule=cosine", "g.warm_up_kimg=0.05"),
    ),
    "accumulated": ("strategy.sync_period=2", "strategy.sync_mode=accumulate", "g.optimizer_wrapper=extragradient"),
}


def small_buckets(wire, single_bucket):
    """Let a tiny network have several buckets, some of them too small for a part of every rank."""
    return 256


def play_and_save(settings, rounds, world, folder, saved=None):
    """Play rounds, from a checkpoint if there is one, and return the checkpoint after them."""
    with patch.object(build, "bucket_bytes", small_buckets):
        s = tiny_run.make_session(tiny_run.make_run(*NETS, *settings), world, saved)
    assert all(len(player.flat.buckets) > 2 for player in s.game.players)
    for _ in range(rounds):
        play_round(s)
    clock = {"step": s.clock.step, "images": s.clock.images, "seconds": 0.0}
    return Checkpoints(folder, world).save(s.game.players, clock, {}, s.role)


def assert_same_tensors(path, other):
    tensors, others = (read_checkpoint(folder, 0, 1).tensors for folder in (path, other))
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype
        assert torch.equal(tensor, others[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_checkpoints_are_those_of_an_unsharded_run(pool, settings, tmp_path):
    """Of 2, 3 and 4 ranks."""

    def job(world):
        name = str(world.size)
        whole = play_and_save(settings, 4, world, tmp_path / "whole" / name)
        return whole, play_and_save((*settings, *SHARDED), 4, world, tmp_path / "sharded" / name)

    for ranks in (2, 3, 4):
        whole, sharded = pool(ranks, job)[0]
        assert_same_tensors(sharded, whole)


@pytest.mark.slow
def test_a_run_continues_sharded_or_not_on_any_number_of_ranks(pool, tmp_path):
    settings = CASES["groups, one of them frozen"]
    begun = pool(3, lambda world: play_and_save((*settings, *SHARDED), 2, world, tmp_path / "begun"))[0]
    again = {}
    for ranks in (3, 2):
        for kind, fields in (("whole", ()), ("sharded", SHARDED)):
            folder = tmp_path / f"{kind}-{ranks}"
            again[kind, ranks] = pool(
                ranks,
                lambda world: play_and_save((*settings, *fields), 2, world, folder, begun),  # noqa: B023
            )[0]
    assert_same_tensors(again["sharded", 3], again["whole", 3])
    assert_same_tensors(again["sharded", 2], again["whole", 2])
    at_once = pool(3, lambda world: play_and_save(settings, 4, world, tmp_path / "at once"))[0]
    assert_same_tensors(again["sharded", 3], at_once)


def test_clipped_gradients_agree_up_to_the_rounding_of_their_norm(pool):
    free = tiny_run.make_run(*NETS, "d.optimizer=sgd", "g.optimizer=sgd")
    run = tiny_run.make_run(*NETS, "d.optimizer=sgd", "g.optimizer=sgd", "g.max_norm=0.05", "d.max_norm=0.05")
    sharded = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, shard_optimizer=True))

    def job(world):
        s = tiny_run.make_session(sharded, world)
        for _ in range(3):
            play_round(s)
        expected = [player_traffic(s.role, player) for player in s.game.players]
        counted = [(player.meter.sent_bytes, player.meter.messages) for player in s.game.players]
        assert counted == [(3 * traffic.sent_bytes, 3 * traffic.messages) for traffic in expected]
        return tiny_run.session_state(s), *(tiny_run.play_rounds(case, 3, world) for case in (run, free))

    clipped, whole, unclipped = pool(3, job)[0]
    for network in ("G/", "D/"):
        assert tiny_run.relative_distance(clipped, whole, network) < 1e-5
        assert tiny_run.relative_distance(unclipped, whole, network) > 1e-3


def test_every_rank_keeps_a_part_and_uses_the_whole_average(pool):
    run = tiny_run.make_run(*NETS)
    sharded = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, shard_optimizer=True))

    def images(session):
        with averaged_sampler(session, tiny_run.make_dataset()) as sampler:
            return sampler.images(range(4), sampler.labels(range(4), 0), 0)

    def job(world):
        kept = []
        drawn = []
        for case in (run, sharded):
            s = tiny_run.make_session(case, world)
            for _ in range(3):
                play_round(s)
            before = s.game.g.flat.params.clone()
            drawn.append(images(s))
            assert torch.equal(s.game.g.flat.params, before)
            states = [entry["exp_avg"].numel() for p in s.game.players for entry in p.optimizer.state.values()]
            kept.append((sum(states), s.game.g.ema.params.numel(), s.role.main_has_all_players))
        assert s.game.g.ema.is_finite()
        if world.rank == 1:
            s.game.g.ema.params[0] = torch.nan
        assert not s.game.g.ema.is_finite()
        return kept, drawn

    results = pool(3, job)
    (states, average, main_has_all), _ = results[0][0]
    assert main_has_all
    assert sum(kept[1][0] for kept, _ in results) == states
    assert sum(kept[1][1] for kept, _ in results) == average
    for kept, (whole, drawn) in results:
        assert not kept[1][2]
        assert kept[1][0] < 0.4 * states
        assert torch.equal(whole, drawn)


@pytest.mark.slow
def test_a_run_of_processes_writes_the_same_files(tmp_path):
    """Samples, scores, models and checkpoints, for which all ranks gather."""
    settings = ("--ranks=2", "--kimg=0.08", "--nets.batch_norm=true")
    whole = train_tiny(tmp_path / "whole", *settings)
    sharded = train_tiny(tmp_path / "sharded", *settings, "--strategy.shard_optimizer=true")
    assert final_tensors(sharded) == final_tensors(whole)
    pictures = sorted(whole.rglob("*.png"))
    assert pictures
    for path in (*pictures, whole / "model" / "model.safetensors", whole / "best" / "model.safetensors"):
        assert (sharded / path.relative_to(whole)).read_bytes() == path.read_bytes()
    scores = [[row["value"] for row in read_jsonl(folder / "metrics.jsonl")] for folder in (whole, sharded)]
    assert scores[0] == scores[1]


def test_memory_is_foreseen():
    run = tiny_run.make_run("nets.width=32", "batch=8")
    sharded = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, shard_optimizer=True))
    blank = blank_dataset(tiny_run.make_dataset())
    states = []
    for case in (run, sharded):
        game, roles = build_roles(case, blank, 4)
        states.append(estimate_run_cost(game, roles, rounds=1, round_flops=0, peak_bytes=0).state_bytes)
    g, d = (player.flat.params.nbytes for player in game.players)
    assert states == [5 * g + 4 * d, 2 * (g + d) + 3 * g // 4 + 2 * d // 4]
    whole, part = (estimate_round(case, blank, 4) for case in (run, sharded))
    assert part.peak_bytes < whole.peak_bytes - d  # of the average and D's moments, three quarters are elsewhere
    assert part.flops == whole.flops


def test_strategies_that_cannot_be_sharded_are_refused():
    def check(*settings):
        validate(tiny_run.make_run("strategy.shard_optimizer=true", *settings), 2)

    with advises("Use --g.optimizer=adam, or --strategy.shard_optimizer=false"):
        check("g.optimizer=lamb")
    check("g.optimizer=adam")
    validate(tiny_run.make_run("g.optimizer=lamb"), 2)
    with advises("Use --strategy.wire=exact, or --strategy.shard_optimizer=false."):
        check("strategy.wire=int8")
    check("strategy.wire=exact")
    with advises("Use --strategy.sync_mode=accumulate, --strategy.sync_period=1, or --strategy.shard_optimizer=false."):
        check("strategy.sync_period=2")
    check("strategy.sync_period=2", "strategy.sync_mode=accumulate")


@pytest.mark.slow
def test_a_replica_is_refused():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with advises("Use shard_optimizer=false"):
        pg.Replica(net, optimizer, exchange="sync+shard_optimizer=true")
    pg.Replica(net, optimizer, exchange="sync+shard_optimizer=false").release()
