"""Games with a reconstruction keep the contracts: a NamedTuple from G, an EMA codebook, weights that follow gradients,
a late start of D, one forward pass of G for both turns."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.train.build import build_networks
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

TOKENIZER = (
    *("nets=vq-autoencoder", "nets.width=4", "nets.downsample=1", "nets.codes=16", "nets.code_dim=4"),
    *("nets.d_width=4", "nets.d_layers=1"),
    *("objective=reconstruction", "objective.outputs={commitment: 0.25}", "objective.feature_matching=0.1"),
    "objective.adversarial_weight=0.5",
)
LATE = ("d.start_kimg=0.032", "d.weight_warm_up_kimg=0.048")  # two rounds without D, then three of warm-up
GAMES = {
    "adaptive, late": (*TOKENIZER, "objective.weighting=adaptive", *LATE),
    "balanced, late": (*TOKENIZER, "objective.weighting=balanced", "objective.l2=0.5", *LATE),
    "adaptive": (*TOKENIZER, "objective.weighting=adaptive", "objective.adversarial.r1=1"),
    "lane by lane": (*TOKENIZER, "objective.weighting=adaptive", "device.lanes_per_pass=1"),
    "Gaussian": (*TOKENIZER[:4], "nets.quantizer=kl", *TOKENIZER[5:8], "objective.outputs={kl: 0.001}"),
}
LOCKSTEP = ("sync", "sync simultaneous", "CPOAdam")


def make_run(strategy: str, game: str):
    return tiny_run.make_run(*GAMES[game], *table.STRATEGIES[strategy])


@pytest.mark.slow(after=3)
@pytest.mark.parametrize(
    ("strategy", "game"),
    [
        *[(strategy, "adaptive, late") for strategy in LOCKSTEP],
        *[("sync", game) for game in ("balanced, late", "adaptive", "lane by lane")],
        *[(strategy, "adaptive") for strategy in ("async", "async teams")],
    ],
)
def test_n_ranks_equal_one(pool, strategy, game):
    run = make_run(strategy, game)
    one = tiny_run.play_rounds(run, 6)
    other = pool(3, lambda world: tiny_run.play_rounds(run, 6, world))[0]
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "game"),
    [
        *[(strategy, "adaptive, late") for strategy in ("sync", "sync int4", "quantized")],
        *[(strategy, "adaptive") for strategy in ("async", "async teams", "async, lags and replay")],
        ("sync", "balanced, late"),
        ("sync", "Gaussian"),
    ],
)
def test_six_and_four_rounds_equal_ten(pool, strategy, game, ranks, tmp_path):
    check_resume(pool, make_run(strategy, game), ranks, tmp_path, rounds=4)


def check_resume(pool, run, ranks, tmp_path, rounds):
    def same(world):
        ten = tiny_run.play_rounds(run, 10, world)
        saved, _ = tiny_run.save_after(run, 10 - rounds, world, tmp_path)
        s = tiny_run.make_session(run, world, saved)
        for _ in range(rounds):
            play_round(s)
        return tiny_run.is_equal(ten, tiny_run.gather_owner_state(s))

    assert all([same(World.solo())] if ranks == 1 else pool(ranks, same))


def test_a_run_resumes_before_d_has_started(pool, tmp_path):
    check_resume(pool, make_run("sync", "adaptive, late"), 1, tmp_path, rounds=9)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["gossip", "gossip int8", "sync every 2"])
def test_ranks_with_players_of_their_own_have_a_late_start_too(pool, strategy, tmp_path):
    run = tiny_run.make_run(*GAMES["adaptive, late"], "nets.quantizer=fsq", *table.STRATEGIES[strategy])
    check_resume(pool, run, 2, tmp_path, rounds=4)


@pytest.mark.parametrize("strategy", ["gossip", "sync every 2"])
def test_a_codebook_needs_all_ranks_in_every_step(strategy):
    run = make_run(strategy, "adaptive")
    with advises(
        f"--strategy={run.strategy.name}: quantizer of G has buffers that all ranks sum in every step, and here ranks "
        "train players of their own. Use --strategy=sync --strategy.sync_period=1, or a quantizer without such buffers "
        "(--nets.quantizer=fsq)"
    ):
        tiny_run.make_session(run)
    tiny_run.make_session(make_run("sync", "adaptive"))
    tiny_run.make_session(tiny_run.make_run(*GAMES["adaptive"], *table.STRATEGIES[strategy], "nets.quantizer=fsq"))


def test_before_d_starts_it_does_not_train_and_does_not_judge():
    s = tiny_run.make_session(make_run("sync", "adaptive, late"))
    before = s.game.d.flat.params.clone()
    names = []
    for _ in range(6):
        play_round(s)
        names.append({name for name in s.stats.copy_tick().sums if name.startswith("Loss/")})
        s.stats._tick.sums.clear()
        names[-1].add("D moved") if not torch.equal(before, s.game.d.flat.params) else None
    assert all("Loss/G/adversarial" not in n and "Loss/D/loss" not in n and "D moved" not in n for n in names[:2])
    assert {"Loss/D/loss", "D moved"} <= names[2]
    assert "Loss/G/adversarial" not in names[2]  # the weight is 0 in the first round of the warm-up
    assert all({"Loss/G/adversarial", "Loss/G/adaptive_weight", "Loss/D/loss"} <= n for n in names[3:])


@pytest.mark.parametrize("game", ["adaptive", "adaptive, late"])
def test_one_forward_pass_of_g_gives_what_two_give(game):
    states, counts = [], []
    for shares_forward in (True, False):
        s = tiny_run.make_session(make_run("sync", game))
        assert s.game.shares_forward
        if not shares_forward:
            s = dataclasses.replace(
                s, role=s.run.strategy.role(dataclasses.replace(s.game, shares_forward=False), s.world, s.run.lanes)
            )
        calls = []
        s.game.g.net.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(5):
            play_round(s)
        states.append(tiny_run.session_state(s))
        counts.append(len(calls))
    assert tiny_run.is_equal(*states)
    assert counts == ([5, 10] if game == "adaptive" else [5, 8])


def test_a_round_equals_a_plain_loop():
    """VQGAN's step in plain PyTorch, with the adaptive weight of the step before."""
    run = make_run("sync", "adaptive")
    s = tiny_run.make_session(run)
    networks = build_networks(run, make_spec(run.data, tiny_run.make_dataset()), torch.device("cpu"))
    g, d = networks.g, networks.d
    opt = {net: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9)) for net in (g, d)}
    weight = torch.zeros(())
    for _ in range(4):
        play_round(s)
        x = s.lanes.micro_batches[0].images
        real = x.clone().requires_grad_(True)
        on_real, on_fake = d(real).logits, d(g(x).images.detach()).logits
        (slope,) = torch.autograd.grad(on_real.mean(1).sum(), real, create_graph=True)
        loss = (F.relu(1 - on_real) + F.relu(1 + on_fake)).mean() + slope.flatten(1).square().sum(1).mean() / 2
        opt[d].zero_grad(), loss.backward(), opt[d].step()
        g.quantizer.counts.zero_(), g.quantizer.sums.zero_()  # of the pass for D
        y = g(x)
        judged, target = d(y.images), d(x)
        matching = sum((a - b.detach()).abs().mean() for a, b in zip(judged.features, target.features))
        distance, adversarial = (y.images - x).abs().mean(), -judged.logits.mean() + 0.1 / 0.5 * matching
        norms = [torch.autograd.grad(v, g.last_layer, retain_graph=True)[0].norm() for v in (distance, adversarial)]
        loss = distance + 0.5 * weight * adversarial + 0.25 * y.commitment
        opt[g].zero_grad(), loss.backward(), opt[g].step()
        g.quantizer.apply_synchronised()
        weight = norms[0] / (norms[1] + 1e-4)
    trained = tiny_run.session_state(s)
    mine = {f"G/{k}": v for k, v in g.state_dict().items()} | {f"D/{k}": v for k, v in d.state_dict().items()}
    for prefix in ("G/encoder", "G/decoder", "G/quantizer", "D/"):
        assert tiny_run.relative_distance(mine, trained, prefix) < 1e-4


def codebook_after(world, dtype, steps=200):
    """The codebook of a quantizer that follows rows of all lanes, without networks around it."""
    from paragan.core.rng import LaneRng
    from paragan.core.types import Batch
    from paragan.game.player import Player
    from paragan.game.turn import Turn, play_turns
    from paragan.nets.codebook import VectorQuantizer
    from paragan.strategies.base import assign_lanes

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 4), "quantizer": VectorQuantizer(16, 4)}).to(dtype)
    player = Player("G", net, lambda p: torch.optim.SGD(p, lr=1e-2), lane_batch=8)
    share = assign_lanes(8, world.rank, world.size)
    exchange = tiny_run.make_run().strategy.player_exchange(player, world, share.weight)

    def loss(batch, step):
        output = net["quantizer"](net["encoder"](batch.images))
        return SimpleNamespace(total=(output.quantized - batch.images).square().mean() + output.commitment, parts={})

    turn = Turn(player, loss, exchange.exchange, exchange.team, exchange.weight)
    for step in range(steps):
        rng = LaneRng(0, step * 64, share.lanes, 8)
        player.start_exchange(turn.exchange, step)
        play_turns((turn,), [Batch(rng.normal("rows", 4).to(dtype), None, rng)], step, 64 * (step + 1), 64)
    return net["quantizer"].codebook


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_codebook_is_the_same_on_any_number_of_ranks(pool, dtype, tolerance):
    one = codebook_after(World.solo(), dtype)
    assert len(one.unique(dim=0)) == 16
    for ranks in (2, 4):
        books = pool(ranks, lambda world: codebook_after(world, dtype))
        assert all(torch.equal(book, books[0]) for book in books)
        assert float((books[0] - one).norm() / one.norm()) < tolerance
