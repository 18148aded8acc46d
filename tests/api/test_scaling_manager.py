"""`ScalingManager` trains, measures and scores an `Estimator` under every strategy, on any number of ranks."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import paragan as pg
import tiny_run
from advice import advises
from paragan.api import scaling_manager
from paragan.core.schema import replace_fields
from paragan.train.build import Networks
from paragan.train.loop import play_round
from paragan.train.session import build_session
from processes import wait_until
from tiny_estimator import Discriminator, Generator, PlainD, PlainG, config, make_manager, make_seeded, untyped


def test_figure_5_runs_as_published(capsys):
    cfg = config()
    scale_mgr = pg.ScalingManager(config=cfg, bs=64, num_workers=8)
    gan = pg.Estimator(Generator(), Discriminator())
    for _step in cfg.max_steps:
        scale_mgr.train(gan)
    score = scale_mgr.eval(metric="fid")
    scale_mgr.close()
    assert score.name in ("fd_pixels", "fid")
    assert scale_mgr._session.clock.step == 5
    out = capsys.readouterr().out
    assert "learning rate" in out
    assert "not FID" in out or score.name == "fid"


def test_workers_are_virtual(pool):
    """The same script gives the same training on one rank and on two."""
    tiny_run  # noqa: B018 - registered by value

    def job(world):
        scale_mgr = pg.ScalingManager(config(), 32, 4)
        scale_mgr.world = world
        gan = pg.Estimator(make_seeded(Generator), make_seeded(Discriminator))
        for _ in range(5):
            scale_mgr.train(gan)
        return torch.cat([p.flatten() for p in gan.generator.parameters()])

    one = job(tiny_run.World.solo())
    for several in pool(2, job):
        torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-6)


def test_ranks_start_from_the_weights_of_rank_0(pool):
    def job(world):
        torch.manual_seed(world.rank)
        scale_mgr = pg.ScalingManager(config(), 32, 4)
        scale_mgr.world = world
        gan = pg.Estimator(Generator(), Discriminator())
        scale_mgr.train(gan)
        return torch.cat([p.flatten() for p in gan.generator.parameters()])

    a, b = pool(2, job)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: pg.Estimator(nn.Identity(), PlainD()), "no parameters"),
        (lambda: pg.ScalingManager(config(), bs=30, num_workers=8), "does not divide"),
        (lambda: pg.ScalingManager(config(), bs=0, num_workers=8), "bs=0: .* equal to 1"),
        (lambda: pg.ScalingManager(config(), bs=untyped(64.5), num_workers=8), "bs=64.5: .* integer"),
        (lambda: pg.ScalingManager(config(), bs=untyped(None), num_workers=8), "bs=None: .* integer"),
        (lambda: pg.ScalingManager(config(), bs=64, num_workers=untyped(float("nan"))), "num_workers=nan"),
    ],
)
def test_mistakes_raise_clear_errors(mistake, message):
    with pytest.raises(pg.UsageError, match=message):
        mistake()


def test_values_of_another_type_are_refused_and_those_of_the_advice_accepted():
    with advises("config: is of type dict. Use paragan.Config(...)"):
        pg.ScalingManager(untyped({"data": "digits"}), bs=32, num_workers=4)
    images = np.zeros((64, 8, 8, 1), np.uint8)
    with advises("dataset: is of type ndarray. Use what paragan.from_arrays(x, labels) returns"):
        pg.ScalingManager(config(), bs=32, num_workers=4, dataset=untyped(images))
    with advises("generator: is neither an nn.Module nor an object with model_fn. Use a torch.nn.Module"):
        pg.Estimator(object(), PlainD())
    dataset = pg.from_arrays(images, np.arange(64) % 2)
    with pg.ScalingManager(config(latent=8), bs=32, num_workers=4, dataset=dataset) as scale_mgr:
        for network in (None, PlainD()):
            for use in (scale_mgr.train, scale_mgr.profile):
                with advises(f"gan: is of type {type(network).__name__}. Use paragan.Estimator(generator, discrim"):
                    use(untyped(network))
        assert scale_mgr.train(pg.Estimator(PlainG(), PlainD()))["Progress/step"] == 1


def test_scores_and_networks_follow_the_advice_on_their_order():
    gan, other = pg.Estimator(PlainG(), PlainD()), pg.Estimator(PlainG(), PlainD())
    with make_manager() as scale_mgr, make_manager() as other_mgr:
        with advises("eval: nothing was trained yet. Call train first"):
            scale_mgr.eval("fd")
        scale_mgr.train(gan)
        assert scale_mgr.eval("fd").value > 0
        with advises("already trains another Estimator. Use a ScalingManager for each"):
            scale_mgr.train(other)
        assert other_mgr.train(other)["Progress/step"] == 1


STRATEGIES = {
    "quantized": "quantized",
    "delayed outer steps": {"name": "sync", "sync_period": 3, "fragments": 2, "delay": 2, "outer": "nesterov"},
    "gossip": "gossip",
    "async": "async",
    "paper's DQGAN": {"name": "quantized", "paper_update": True},
    "local SGD": {"name": "sync", "sync_period": 2},
    "DPOSG": "DPOSG",
    "asynchronous gossip": "async-gossip",
}


@pytest.mark.slow(after=4)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_an_estimator_is_trained_and_scored_under_every_strategy(pool, strategy):
    """It is trained as the trainer does it: the same networks, in a session of the same run, end with the same bits."""
    tiny_run  # noqa: B018 - registered by value

    def job(world):
        scale_mgr = pg.ScalingManager(config(strategy=untyped(strategy)), 32, 4)
        scale_mgr.world = world
        gan = pg.Estimator(make_seeded(Generator), make_seeded(Discriminator))
        for _ in range(5):
            scale_mgr.train(gan)
        score = scale_mgr.eval("fd", count=32)
        copy = pg.Estimator(make_seeded(Generator), make_seeded(Discriminator))
        networks = Networks(copy.generator, copy.discriminator, 8, is_user_defined=True)
        session = build_session(scale_mgr.run, world, scale_mgr.dataset, networks)
        for _ in range(5):
            play_round(session)
        if session.role.drain:
            session.role.drain()
        player, expected = (s.role.trained_players[0] for s in (scale_mgr._session, session))
        depends_on_timing = strategy == "async-gossip"
        return score.value, depends_on_timing or torch.equal(player.flat.params, expected.flat.params)

    (score, same), (other_score, other_same) = pool(2, job)
    assert score == other_score
    assert same
    assert other_same


def test_per_label_runs_have_no_estimator():
    with advises(
        "an Estimator is one game. Use sync, quantized, gossip or async, or `paragan train custom --nets=module:Class "
        "--strategy per-label`"
    ):
        make_manager(strategy=untyped("per-label"))
    for name in ("sync", "quantized", "gossip", "async"):
        with make_manager(strategy=untyped(name)) as scale_mgr:
            assert scale_mgr.run.strategy.name == name


@pytest.mark.slow
def test_profile_decides_batch_and_strategy_if_they_are_open(capsys):
    auto = {"name": "auto", "strategies": ("sync", "async"), "measure_s": 1}
    cfg = config(strategy=untyped(auto), base_bs=8)
    with pg.ScalingManager(cfg, bs="auto", num_workers=4) as scale_mgr:
        gan = pg.Estimator(Generator(), Discriminator())
        assert scale_mgr.has_open_settings
        with advises(
            'bs="auto": the profile has no noise scale. Use profile(gan, noise_kimg=10), or a number of images'
        ):
            scale_mgr.profile(gan, seconds=1, noise_kimg=0)
        profile = scale_mgr.profile(gan, seconds=1)
        assert not scale_mgr.has_open_settings
        assert scale_mgr.run.batch in (8, 16, 32, 64, 128)
        assert scale_mgr.run.strategy.name in ("sync", "async")
        assert scale_mgr.train(gan)["Progress/step"] == 1
    out = capsys.readouterr().out
    assert re.search(rf"batch {scale_mgr.run.batch} of 8, 16, 32, 64, 128: the noise scale of [GD]'s gradient", out)
    assert "learning rate" in out
    assert f"strategy: {scale_mgr.run.strategy.name}: " in out
    assert {turn.batch for turn in profile.d} == {2, 8, 128}


@pytest.mark.slow
def test_profile_changes_nothing_that_was_set_also_between_steps():
    with pg.ScalingManager(config(), bs=16, num_workers=4) as scale_mgr:
        before = scale_mgr.run
        assert not scale_mgr.has_open_settings
        gan = pg.Estimator(Generator(), Discriminator())
        scale_mgr.profile(gan, seconds=1)
        scale_mgr.train(gan)
        weights = [p.clone() for p in gan.generator.parameters()]
        scale_mgr.profile(gan, seconds=1, remeasure=True)
        assert scale_mgr.run is before
        assert all(torch.equal(a, b) for a, b in zip(weights, gan.generator.parameters()))
        scale_mgr.train(gan)


def test_an_open_layout_is_decided_before_the_first_round(monkeypatch):
    """The tuner itself is tested in tests/plan/tune."""
    seen = []

    def decide(run, dataset, world, console):
        seen.append(run.nets.generator(None))
        return replace_fields(run, {"device.precision": "bf16", "device.lanes_per_pass": 1})

    monkeypatch.setattr(scaling_manager, "decide_new_layout", decide)
    monkeypatch.setattr(scaling_manager, "parse_profile", lambda text, name: None)
    monkeypatch.setattr(pg.ScalingManager, "_measure_profile", lambda *args: None)
    monkeypatch.setattr(scaling_manager, "profile_to_yaml", lambda profile: "")
    with make_manager(device=pg.DeviceOptions(tune="measured")) as scale_mgr:
        gan = pg.Estimator(PlainG(), PlainD())
        assert scale_mgr.train(gan)["Progress/step"] == 1
        assert (scale_mgr.run.device.precision, scale_mgr.run.device.lanes_per_pass) == ("bf16", 1)
        assert scale_mgr.run.strategy.name == "sync"
    assert torch.equal(seen[0].state_dict()["layers.net.weight"], seen[0].layers.net.weight)
    assert seen[0] is not gan.generator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "foo"}, "metrics=foo: is none of"),
        ({"metric": "fidelity"}, "metrics=fidelity: is none of"),
        ({"metric": None}, "metrics.*None"),
        ({"metric": "fd", "count": 0}, "count=0"),
        ({"metric": "fd", "count": "many"}, "count=many"),
    ],
)
def test_invalid_scores_raise_clear_errors(arguments, message):
    with make_manager() as scale_mgr:
        scale_mgr.train(pg.Estimator(PlainG(), PlainD()))
        with pytest.raises(pg.UsageError, match=message):
            scale_mgr.eval(**arguments)


def test_a_game_that_diverged_is_not_scored():
    def train_until_divergence():
        with make_manager(g=pg.PlayerOptim(pg.Adam(lr=3e38))) as scale_mgr:
            gan = pg.Estimator(PlainG(), PlainD())
            for _ in range(100):
                scale_mgr.train(gan)

    with pytest.raises(pg.RunError, match="diverged"):
        train_until_divergence()


def test_scoring_restores_every_buffer():
    class Counting(PlainG):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, z, y):
            self.calls += 1
            return super().forward(z, y)

    with make_manager() as scale_mgr:
        g = Counting()
        scale_mgr.train(pg.Estimator(g, PlainD()))
        before = {name: value.clone() for name, value in g.named_buffers()}
        scale_mgr.eval("fd")
        assert all(torch.equal(before[name], value) for name, value in g.named_buffers())
        assert g.training


def test_readers_stop_after_an_error(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "set.npz", images=images)
    data = pg.DataOptions(path=str(tmp_path / "set.npz"), cache="stream")

    def run_failing_script():
        cfg = pg.Config(data=data, max_steps=5, evaluation=pg.EvaluationOptions(metrics=("fd",), count=64), latent=8)
        with pg.ScalingManager(cfg, bs=32, num_workers=4) as scale_mgr:
            scale_mgr.train(pg.Estimator(PlainG(), PlainD()))
            raise ZeroDivisionError

    before = reader_threads()
    with pytest.raises(ZeroDivisionError):
        run_failing_script()
    wait_until(lambda: reader_threads() <= before, 10, "all readers are gone")


def reader_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("paragan data")}
