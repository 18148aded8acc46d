"""Networks whose parameters are float64 or bfloat16: every strategy trains them as it trains float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import tiny_run
from advice import advises
from paragan.plan.cost import player_traffic
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

LOSSY = ("wire=", "strategy=quantized", "CPOAdam-GQ")  # what the settings of a lossy wire contain
EXACT = {name: s for name, s in table.STRATEGIES.items() if not any(word in setting for setting in s for word in LOSSY)}
every_exact_strategy = pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)

ROUNDING = {torch.float64: 1e-4, torch.bfloat16: 2e-2}  # relative distance to a run in float32
PLAIN = ("g.optimizer=sgd", "d.optimizer=sgd", "g.optimizer.lr=0.002", "d.optimizer.lr=0.002")


def play(run, world, dtype):
    s = tiny_run.make_session(run, world, dtype=dtype)
    for _ in range(4):
        play_round(s)
    if s.role.drain:
        s.role.drain()
    return s


def params_of(session):
    """Return the parameters that this rank trains, in float64 and by name."""
    return {
        f"{player.name}/{name.removeprefix('net.')}": p.detach().double().clone()
        for player in session.role.trained_players
        for name, p in player.net.named_parameters()
    }


@pytest.mark.slow(after=4)
@every_dtype
@every_exact_strategy
def test_only_rounding_differs_from_float32(pool, settings, dtype):
    """Adam would amplify rounding where gradients are near 0, so the optimizers are plain gradient descent."""
    run = tiny_run.make_run(*settings, *PLAIN)

    def job(world):
        expected = params_of(play(run, world, None))
        s = play(run, world, dtype)
        assert all(p.flat.params.dtype == dtype for p in s.game.players)
        predicted = [4 * player_traffic(s.role, player).sent_bytes for player in s.game.players]
        assert [p.meter.sent_bytes for p in s.game.players] == predicted
        trained = params_of(s)
        assert trained.keys() == expected.keys()
        return [tiny_run.relative_distance(trained, expected, player.name) for player in s.role.trained_players]

    for distances in pool(2, job):
        assert max(distances) < ROUNDING[dtype]


@pytest.mark.slow(after=4)
@every_dtype
@every_exact_strategy
def test_two_rounds_and_one_equal_three(pool, settings, dtype, tmp_path):
    run = tiny_run.make_run(*settings)

    def job(world):
        whole = tiny_run.make_session(run, world, dtype=dtype)
        for _ in range(3):
            play_round(whole)
        if whole.role.drain:
            whole.role.drain()
        folder, _ = tiny_run.save_after(run, 2, world, tmp_path, dtype)
        resumed = tiny_run.make_session(run, world, folder, dtype=dtype)
        play_round(resumed)
        if resumed.role.drain:
            resumed.role.drain()
        return tiny_run.is_equal(params_of(whole), params_of(resumed))

    assert all(pool(2, job))


@pytest.mark.parametrize("name", ["sync int4", "sync, user wire", "quantized", "gossip int8"])
def test_lossy_wires_are_refused_by_name(name):
    run = tiny_run.make_run(*table.STRATEGIES[name])
    with advises("G has bfloat16 parameters. Use --strategy.wire=exact"):
        tiny_run.make_session(run, dtype=torch.bfloat16)
    play(tiny_run.make_run(*table.STRATEGIES[name], "strategy.wire=exact"), None, torch.bfloat16)


def test_an_eps_that_is_0_in_the_dtype_is_refused():
    with advises("--g.optimizer.eps=1e-08: is 0 in float16, the dtype of the parameters of G. Use 6e-05 or more"):
        tiny_run.make_session(tiny_run.make_run(), dtype=torch.float16)
    eps = ("g.optimizer.eps=6e-5", "d.optimizer.eps=6e-5")
    session = play(tiny_run.make_run(*eps), None, torch.float16)
    assert all(p.flat.params.norm().isfinite() for p in session.game.players)


def test_the_average_of_bfloat16_parameters_follows_them():
    """It is kept in float32: its steps are too small for bfloat16."""
    player = play(tiny_run.make_run(), None, torch.bfloat16).game.g
    assert player.ema.params.dtype == torch.float32
    before = player.ema.params.clone()
    player.ema.update(player.flat.params + 1, decay=0.999)
    assert (player.ema.params - before).min() > 0
