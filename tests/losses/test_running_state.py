"""The running state of an objective follows D, and is equal on any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch

import paragan as pg
import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorOutput
from paragan.losses.adversarial import Adversarial
from paragan.losses.running_state import (
    STATE_NAME,
    UPDATE_INTERVAL_STEPS,
    AugmentProbability,
    LeCamEMA,
    ObjectiveState,
    attach_state,
    state_of,
    strip_objective_state,
)
from paragan.models.model import save_model
from paragan.models.model_files import read_consistent
from paragan.train.build import build_networks
from paragan.train.loop import play_round

BOTH = ("objective.augment=ada", "objective.augment.kimg=0.1", "objective.lecam=0.3", "nets.batch_norm=true")
GROWING = "objective.augment.target=-0.9"  # p grows for any output of D
P = f"D/{STATE_NAME}.augment_probability.p"


def state_tensors(state):
    return {name: value for name, value in state.items() if STATE_NAME in name}


def update_once(probability, logits):
    probability.tracking = True
    probability.update(logits)
    probability.apply_moments()


def test_p_changes_every_fourth_step_by_a_fixed_amount():
    probability = AugmentProbability(target=0.6, step_size=0.01)
    sure, unsure = torch.ones(10), torch.tensor([1.0] * 7 + [-1.0] * 3)  # mean signs 1 and 0.4
    for _ in range(3 * UPDATE_INTERVAL_STEPS):
        update_once(probability, sure)
    assert probability.p.item() == pytest.approx(0.12)
    for _ in range(UPDATE_INTERVAL_STEPS - 1):
        update_once(probability, unsure)
    assert probability.p.item() == pytest.approx(0.12)
    update_once(probability, unsure)
    assert probability.p.item() == pytest.approx(0.08)
    for _ in range(10 * UPDATE_INTERVAL_STEPS):
        update_once(probability, unsure)
    assert probability.p == 0


def test_p_goes_from_0_to_1_in_kimg():
    objective = Adversarial(augment={"name": "ada", "kimg": 0.8})
    probability = objective.make_state(16).augment_probability
    for _ in range(int(0.8 * 1000 / 16)):
        update_once(probability, torch.ones(16))
    assert probability.p.item() == pytest.approx(0.96)  # 50 steps: 12 updates of four steps, and two steps pending


def test_lecam_ema_starts_as_a_mean():
    ema = LeCamEMA(0.9)
    decay = 0.9
    ema.tracking = True
    expected = None
    for step in range(1, 40):
        real, fake = torch.randn(8) + step, torch.randn(8)
        ema.update(real[:3], fake[:3])
        ema.update(real[3:], fake[3:])  # another pass of the step
        ema.apply_moments()
        means = torch.stack([real.mean(), fake.mean()])
        rate = max(1 / step, 1 - decay)
        expected = means if expected is None else expected + rate * (means - expected)
        torch.testing.assert_close(ema.means, expected, rtol=1e-5, atol=1e-5)


def test_update_without_tracking_changes_no_state():
    for state, outputs in (
        (LeCamEMA(0.9), (torch.ones(3), torch.ones(3))),
        (AugmentProbability(0.6, 1.0), (torch.ones(3),)),
    ):
        before = copy.deepcopy(state.state_dict())
        state.update(*outputs)
        state.apply_moments()
        assert all(torch.equal(before[name], value) for name, value in state.state_dict().items())


def test_a_d_gets_its_state_as_advised():
    for d in (torch.nn.Linear(2, 1), lambda x, y: x):
        with advises("D has no objective state. Use an nn.Module, and attach_state(state, d)"):
            state_of(d)
    d = torch.nn.Linear(2, 1)
    state = ObjectiveState(LeCamEMA(0.9), None)
    attach_state(state, d)
    assert state_of(d) is state


def test_state_does_not_change_a_sequential_d():
    d = torch.nn.Sequential(torch.nn.Linear(2, 1))
    x = torch.randn(3, 2)
    before = d(x)
    attach_state(ObjectiveState(LeCamEMA(0.9), None), d)
    assert torch.equal(d(x), before)


def test_a_run_uses_and_logs_the_state():
    s = tiny_run.make_session(tiny_run.make_run(*BOTH))
    for _ in range(12):
        play_round(s)
    state = state_of(s.game.d.net)
    line = s.stats.tick(192, 12)
    assert state.augment_probability.p > 0
    assert 0 < line["Loss/D/augment_p"] < state.augment_probability.p
    assert line["Loss/D/lecam"] > 0
    assert state.lecam_ema.means[0] != state.lecam_ema.means[1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_of_n_ranks_equals_that_of_one(pool, ranks):
    run = tiny_run.make_run(*BOTH)
    one = state_tensors(tiny_run.play_rounds(run, 8))
    for several in pool(ranks, lambda world: tiny_run.play_rounds(run, 8, world)):
        several = state_tensors(several)
        assert several.keys() == one.keys()
        assert torch.equal(several[P], one[P])
        for name, value in one.items():
            torch.testing.assert_close(several[name], value, rtol=1e-3, atol=1e-3)


def test_resuming_after_six_rounds_equals_twelve(tmp_path):
    run = tiny_run.make_run(*BOTH)
    world = World.solo()
    saved, _ = tiny_run.save_after(run, 6, world, tmp_path)
    s = tiny_run.make_session(run, world, saved)
    for _ in range(6):
        play_round(s)
    twelve = tiny_run.play_rounds(run, 12)
    assert twelve[P] > 0
    assert tiny_run.is_equal(tiny_run.gather_owner_state(s), twelve)


def test_state_is_sent_to_the_team_of_g(pool):
    run = tiny_run.make_run(*BOTH, GROWING, "strategy=async")

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(14):
            play_round(s)
        s.role.drain()
        return state_tensors(tiny_run.session_state(s)), s.game.d in s.role.trained_players

    (of_g, moves), (of_d, does) = pool(2, job)
    assert (moves, does) == (False, True)
    assert of_d[P] > 0
    assert tiny_run.is_equal(of_g, of_d)


def test_stale_d_has_separate_state():
    s = tiny_run.make_session(tiny_run.make_run(*BOTH, GROWING, "strategy=async", "strategy.critic_lags=[1]"))
    probabilities = []
    for _ in range(14):
        play_round(s)
        critic = s.role.replay_state[1]
        probabilities.append(
            (float(state_of(critic.net).augment_probability.p), float(state_of(s.game.d.net).augment_probability.p))
        )
    assert any(0 < past < now for past, now in probabilities)


def test_model_files_have_no_state(tmp_path):
    run = tiny_run.make_run(*BOTH)
    s = tiny_run.make_session(run)
    play_round(s)
    save_model(tmp_path, s.game.g.net, s.game.d.net, {})
    run, images = resolve(run, tiny_run.make_dataset()), tiny_run.make_dataset()
    fresh = build_networks(run, make_spec(run.data, images), s.world.device).d
    read_consistent(tmp_path).load_into(fresh, "discriminator")
    assert tiny_run.is_equal(fresh.state_dict(), strip_objective_state(s.game.d.net.state_dict()))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the compiler, about itself
def test_state_of_a_compiled_d():
    s = tiny_run.make_session(tiny_run.make_run(*BOTH))
    s.game.d.net.compile(backend="eager")
    for _ in range(2):
        play_round(s)
    assert state_of(s.game.d.net).augment_probability.sign_stats[1] == 32


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["gossip", "sync"])
def test_ranks_resume_their_state(pool, strategy, tmp_path):
    run = tiny_run.make_run(*BOTH, GROWING, "objective.augment.kimg=1", f"strategy={strategy}")

    def job(world):
        saved, _ = tiny_run.save_after(run, 5, world, tmp_path)
        s = tiny_run.make_session(run, world, saved)
        for _ in range(4):
            play_round(s)
        straight = tiny_run.play_rounds(run, 9, world)
        return tiny_run.is_equal(tiny_run.gather_owner_state(s), straight), straight[P]

    for same, p in pool(2, job):
        assert same
        assert p == pytest.approx(2 * UPDATE_INTERVAL_STEPS * 16 / 1000)


class UserG(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 64)

    def forward(self, z, y):
        return self.layer(z).view(-1, 1, 8, 8)


class UserD(torch.nn.Module):
    """Also returns class logits; its logits are those of two patches."""

    def __init__(self, classes=10):
        super().__init__()
        self.layer, self.classes = torch.nn.Linear(64, 2 + classes), classes

    def forward(self, x, y):
        output = self.layer(x.flatten(1))
        return DiscriminatorOutput(output[:, :2], output[:, 2:] if self.classes else None)


def manager(**objective):
    data = pg.DataOptions(path="digits")
    config = pg.Config(data=data, max_steps=5, latent=8, objective=Adversarial(**objective))
    return pg.ScalingManager(config=config, bs=16, num_workers=4)


def test_user_d_with_a_classifier_and_state():
    torch.manual_seed(0)
    with manager(classifier=1.0, lecam=0.1, augment={"name": "ada", "target": -0.9}) as scale_mgr:
        gan = pg.Estimator(UserG(), UserD())
        for _ in range(5):
            scale_mgr.train(gan)
        session = scale_mgr._session
    assert session.run.device.concat_real_fake is False
    assert state_of(session.game.d.net).augment_probability.p > 0


def test_user_d_without_class_logits_raises_before_training():
    with manager(classifier=1.0) as scale_mgr, pytest.raises(UsageError, match="this D returns no class_logits"):
        scale_mgr.train(pg.Estimator(UserG(), UserD(classes=0)))
