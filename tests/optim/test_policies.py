"""Policies set the optimizers of a paper; settings of the user override them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import tiny_run
from advice import advises
from paragan import Config, EvaluationOptions, ScalingManager, with_policy
from paragan.cli import main
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.world import World
from paragan.config.resolve import resolve
from paragan.config.run import to_saved_dict
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.core.schema import from_yaml, to_dict, to_yaml
from paragan.data.dataset import load_data
from paragan.losses.adversarial import Adversarial
from paragan.nets import DCGAN, SNGAN
from paragan.optim.optimizers import SGD, Adam, PlayerOptim
from paragan.optim.policies import MAX_LR_FACTOR, POLICIES, get_policy, lr_factor
from paragan.recipes import build_run, get_recipe
from paragan.train.loop import play_round
from paragan.train.run_dir import RunDir
from paragan.train.run_dir_selection import RunDirRequest
from paragan.train.trainer import TrainJob
from processes import TINY_RUN_ARGS, run_cli, train_tiny, usage_error

every_policy = pytest.mark.parametrize("name", POLICIES)

PUBLISHED = {  # at the batch of the paper: (optimizer, rate, betas, eps) of G and of D, D steps, schedule, optimism
    "ttur": (256, ("adam", 1e-4, (0.0, 0.9), 1e-8), ("adam", 4e-4, (0.0, 0.9), 1e-8), 1, "constant", "auto"),
    "biggan": (2048, ("adam", 5e-5, (0.0, 0.999), 1e-6), ("adam", 2e-4, (0.0, 0.999), 1e-6), 2, "constant", "auto"),
    "sngan": (64, ("adam", 2e-4, (0.0, 0.9), 1e-8), ("adam", 2e-4, (0.0, 0.9), 1e-8), 5, "linear", "auto"),
    "paragan": (
        *(64, ("adabelief", 2e-4, (0.5, 0.999), 1e-12), ("adam", 2e-4, (0.5, 0.999), 1e-8)),
        *(1, "constant", "auto"),
    ),
    "optimistic": (64, ("adam", 1e-4, (0.5, 0.9), 1e-8), ("adam", 1e-4, (0.5, 0.9), 1e-8), 1, "constant", "optimistic"),
    "wcgan": (100, ("adam", 1e-4, (0.5, 0.999), 1e-8), ("adam", 1e-4, (0.5, 0.999), 1e-8), 5, "constant", "auto"),
    "wcgan-gp": (64, ("adam", 1e-4, (0.0, 0.9), 1e-8), ("adam", 1e-4, (0.0, 0.9), 1e-8), 5, "constant", "auto"),
    "dcgan": (128, ("adam", 2e-4, (0.5, 0.999), 1e-8), ("adam", 2e-4, (0.5, 0.999), 1e-8), 1, "constant", "auto"),
    "dposg": (64, ("sgd", 0.1, None, None), ("sgd", 0.01, None, None), 1, "constant", "auto"),
    "dqgan": (64, ("sgd", 0.1, None, None), ("sgd", 0.01, None, None), 1, "constant", "auto"),
}
ALSO = {  # other settings of a policy: (loss, r1, gp, clip), and of the networks
    "wcgan": (("wasserstein", 0, 0, 0.01), {"nets.spectral": False}),
    "wcgan-gp": (("wasserstein", 0, 10, 0), {"nets.spectral": False}),
    "dcgan": (("nonsaturating", 0, 0, 0), {"nets.spectral": False, "nets.batch_norm": True}),
    "dposg": (("wasserstein", 0, 1, 0), {"nets.spectral": False}),
    "dqgan": (("wasserstein", 0, 1, 0), {"nets.spectral": False}),
}


OURS = ("dposg", "dqgan")  # their papers' rates are not known


def facts(side):
    o = side.optimizer
    return o.name, o.lr, getattr(o, "betas", None), getattr(o, "eps", None)


@every_policy
def test_policy_at_its_batch_equals_the_paper(name):
    batch, g, d, d_steps, schedule, optimism = PUBLISHED[name]
    policy = get_policy(name, batch)
    assert (facts(policy.g), facts(policy.d), policy.d_steps) == (g, d, d_steps)
    assert {side.schedule for side in (policy.g, policy.d)} == {schedule}
    assert {side.optimizer_wrapper for side in (policy.g, policy.d)} == {optimism}
    assert policy.reasons[-1] == f"learning rates as {'found' if name in OURS else 'published'}"
    objective, nets = ALSO.get(name, ((), {}))
    words = (f"objective.{word}" for word in ("loss", "r1", "gp", "clip", "r2", "lecam"))
    expected = dict(zip(words, (*objective, 0, 0))) if objective else {}
    assert get_policy(name, batch, nets="dcgan").settings == expected | nets


def test_adabelief_options_depend_on_the_networks():
    small, spectral = (get_policy("paragan", 64, nets=nets).g.optimizer for nets in ("dcgan", "sngan"))
    assert (small.eps, small.rectify) == (1e-12, False)
    assert (spectral.eps, spectral.rectify) == (1e-16, True)


@pytest.mark.parametrize(
    ("batch", "factor"), [(1, 1), (32, 1), (64, 1), (128, 2**0.5), (256, 2), (1 << 20, MAX_LR_FACTOR)]
)
def test_learning_rates_grow_with_the_root_of_the_batch_up_to_a_limit(batch, factor):
    assert lr_factor(batch, 64) == pytest.approx(factor)
    policy = get_policy("sngan", batch)
    assert policy.g.optimizer.lr == pytest.approx(2e-4 * factor)
    assert policy.d.optimizer.lr == pytest.approx(2e-4 * factor)


def test_each_player_is_scaled_by_its_batch():
    policy = get_policy("paragan", 64, g_batch=256)
    assert (policy.g.optimizer.lr, policy.d.optimizer.lr) == (pytest.approx(4e-4), 2e-4)
    assert [line[:2] for line in policy.reasons[-2:]] == ["G:", "D:"]


@every_policy
def test_both_players_train_under_every_policy(name):
    run, _ = build_run(to_dict(tiny_run.make_run()), [], name)
    s = tiny_run.make_session(run)
    before = tiny_run.session_state(s)
    for _ in range(3):
        play_round(s)
    after = tiny_run.session_state(s)
    assert s.clock.images == 3 * run.batch * PUBLISHED[name][3]
    assert all(p.flat.params.isfinite().all() for p in s.game.players)
    for player in ("G/", "D/"):
        assert tiny_run.relative_distance(after, before, player) > 0
    kinds = [type(p.optimizer).__name__ for p in s.game.players]
    g, d = (PUBLISHED[name][i][0] for i in (1, 2))
    assert [kind.lower() for kind in kinds] == [g, d]
    assert ("last_step" in s.game.g.optimizer.state_dict()["state"].get(0, {})) == (name == "optimistic")


@pytest.mark.parametrize("strategy", ["quantized", "CPOAdam-GQ", "gossip", "Rand-DP-OAdam", "async"])
def test_different_optimizers_work_with_every_strategy(pool, strategy):
    run, _ = build_run(to_dict(tiny_run.make_run(f"strategy={strategy}")), [], "paragan")
    states = pool(2, lambda world: tiny_run.play_rounds(run, 3, world))
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("dposg", "DPOSG"), ("dqgan", "DQGAN")],
)
def test_the_papers_updates_have_a_policy(pool, name, strategy):
    run, lines = build_run(to_dict(tiny_run.make_run(f"strategy={strategy}")), [], name)
    assert any("found by a random search on the digits" in line for line in lines)
    states = pool(2, lambda world: tiny_run.play_rounds(run, 3, world))
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.parametrize("name", ["paragan", "ttur"])
def test_strategies_that_need_sgd_reject_a_policy_by_name(name):
    data = to_dict(tiny_run.make_run("strategy=quantized", "strategy.paper_update=true"))
    first = "adabelief" if name == "paragan" else "adam"
    with pytest.raises(
        UsageError, match=rf"--policy {name}: gives G {first} and D adam, .*paper_update=true.*--g.optimizer=sgd"
    ):
        build_run(data, [], name)
    settings = [("g.optimizer", "sgd"), ("d.optimizer", "sgd")]
    run, _ = build_run(data, settings, name)
    assert (run.g.optimizer, run.d.optimizer) == (SGD(), SGD())


def test_user_settings_override_a_policy_and_are_named():
    settings = [("g.optimizer.lr", "1e-3"), ("g.optimizer.rectify", "true"), ("d.warm_up_kimg", "2"), ("batch", "64")]
    run, lines = build_run(to_dict(get_recipe("digits")), settings, "paragan")
    assert (run.g.optimizer.name, run.g.optimizer.lr, run.g.optimizer.rectify) == ("adabelief", 1e-3, True)
    assert (run.d.optimizer.lr, run.d.optimizer.betas, run.d.warm_up_kimg) == (2e-4, (0.5, 0.999), 2.0)
    assert "policy paragan: G adabelief lr 0.001, betas (0.5, 0.999), eps 1e-12, rectified" in lines
    named = next(line for line in lines if "set by hand" in line)
    assert named == "policy paragan: set by hand: g.optimizer.lr, g.optimizer.rectify, d.warm_up_kimg"


def test_policy_replaces_only_g_d_and_d_steps():
    before, (after, _) = get_recipe("digits"), build_run(to_dict(get_recipe("digits")), [], "sngan")
    changed = {name for name, value in to_dict(before).items() if to_dict(after)[name] != value}
    assert changed == {"g", "d", "d_steps", "reasons"}
    reloaded, lines = build_run(from_yaml(to_yaml(after), "run.yaml"), [])
    assert reloaded == after
    assert lines == []


# Other settings of a policy ---------------------------------------------------------------------------


def objective(run):
    o = run.objective
    return o.loss, o.r1, o.gp, o.clip


@pytest.mark.parametrize("name", ALSO)
@pytest.mark.parametrize("of", ["digits", "fashion"])
def test_policy_replaces_the_objective_and_fields_of_the_networks(name, of):
    before = to_dict(get_recipe(of)) | {"objective": to_dict(Adversarial("hinge", r1=2, gp=3, clip=1))}
    after, lines = build_run(before, [], name)
    assert objective(after) == ALSO[name][0]
    nets = to_dict(after.nets)
    assert all(nets[field.removeprefix("nets.")] == value for field, value in ALSO[name][1].items())
    same_kind = after.nets.name == before["nets"]["name"]
    assert same_kind == (name != "dcgan" or of == "digits")
    assert nets["width"] == (before["nets"]["width"] if same_kind else DCGAN().width)
    changed = {field for field, value in to_dict(after).items() if before[field] != value}
    assert changed == {"g", "d", "objective", "nets", "reasons"} | ({"d_steps"} if after.d_steps > 1 else set())
    (besides,) = [line for line in lines if "also sets" in line]
    assert besides.startswith(f"policy {name}: also sets objective.loss={after.objective.loss}, objective.r1=0, ")
    assert f"objective.clip={after.objective.clip:g}, " in besides
    assert "nets.spectral=false" in besides
    assert not any("by hand" in line for line in lines)
    assert build_run(from_yaml(to_yaml(after), "run.yaml"), []) == (after, [])


def test_user_settings_override_the_objective_of_a_policy():
    settings = [("objective.clip", "0.02"), ("nets.width", "16"), ("objective.r1_every", "4")]
    run, lines = build_run(to_dict(get_recipe("digits")), settings, "wcgan")
    assert objective(run) == ("wasserstein", 0, 0, 0.02)
    assert (run.nets.width, run.objective.r1_every) == (16, 4)
    assert "policy wcgan: set by hand: objective.clip" in lines


def test_user_networks_override_those_of_the_policy():
    for settings in ([("nets", "dcgan"), ("nets.width", "16")], [("nets.width", "16"), ("nets.name", "dcgan")]):
        run, lines = build_run(to_dict(get_recipe("fashion")), settings, "wcgan")
        assert run.nets == DCGAN(width=16, spectral=False)
        assert not any("by hand" in line for line in lines)
    run, _ = build_run(to_dict(get_recipe("fashion")), [("nets", "dcgan")], "dcgan")
    assert run.nets == DCGAN(spectral=False, batch_norm=True)


def test_a_policy_leaves_other_networks_unchanged():
    run, lines = build_run(to_dict(get_recipe("digits")), [("nets", "sngan"), ("nets.width", "16")], "dcgan")
    assert run.nets == SNGAN(width=16)
    assert run.objective.loss == "nonsaturating"
    assert "policy dcgan: set by hand: nets" in lines
    assert not any("nets.spectral" in line for line in lines)


def test_fields_of_the_networks_of_a_policy_can_be_set():
    run, _ = build_run(to_dict(get_recipe("fashion")), [("nets.batch_norm", "false")], "dcgan")
    assert run.nets == DCGAN(spectral=False, batch_norm=False)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_from_python_sets_the_objective_but_no_networks(name):
    config = Config(objective=Adversarial(r1=2))
    result = with_policy(config, name, bs=64)
    reasons = [line.removeprefix(f"policy {name}: ") for line in result.reasons]
    if name not in ALSO:
        assert result.objective == config.objective
        assert not any("sets" in line or "networks" in line for line in reasons)
        return
    assert objective(result) == ALSO[name][0]
    assert sum(line.startswith("also sets objective.loss=") for line in reasons) == 1
    assert not any("nets" in line for line in reasons if line.startswith("also sets"))
    (network_reason,) = [line for line in reasons if line.startswith("leaves to your networks: ")]
    assert "nets.spectral=false" in network_reason
    assert ("nets.batch_norm=true" in network_reason) == (name == "dcgan")


# Learning-rate schedules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", (0.0, 0.5, 1.0, 1.0, 1.0, 1.0)),
        ("linear", (0.0, 0.5, 1.0, 0.5, 0.0, 0.0)),
        ("cosine", (0.0, 0.5, 1.0, 0.5, 0.0, 0.0)),
    ],
)
def test_schedules_at_selected_points(kind, expected):
    rate = PlayerOptim(warm_up_kimg=0.2, schedule=kind).lr_schedule(1000)
    assert [rate(images) for images in (0, 100, 200, 600, 1000, 1500)] == pytest.approx(expected)


def test_cosine_is_flat_at_both_ends_and_linear_is_not():
    line, cosine = (PlayerOptim(schedule=kind).lr_schedule(1000) for kind in ("linear", "cosine"))
    assert (line(250), line(750)) == pytest.approx((0.75, 0.25))
    assert (cosine(250), cosine(750)) == pytest.approx((0.5 + 0.5**1.5, 0.5 - 0.5**1.5))
    assert line(0) == cosine(0) == 1


def test_run_shorter_than_its_warm_up():
    rate = PlayerOptim(warm_up_kimg=1.0, schedule="linear").lr_schedule(500)
    assert [rate(images) for images in (0, 250, 500)] == [0, 0.25, 0.5]


def test_exponential_decay_halves_the_rate_after_the_warm_up():
    rate = PlayerOptim(warm_up_kimg=0.2, schedule="exponential", lr_half_life_kimg=0.1).lr_schedule(1000)
    assert [rate(images) for images in (0, 100, 200, 300, 400, 1200)] == pytest.approx([0, 0.5, 1, 0.5, 0.25, 0.5**10])
    decay = PlayerOptim(schedule="exponential", lr_half_life_kimg=math.log(0.5) / math.log(0.999) * 12.5)
    assert decay.lr_schedule(0)(12_500) == pytest.approx(0.999)  # HiFi-GAN: 0.999 an epoch, here of 12,500 clips


def test_an_exponential_schedule_has_a_half_life_and_only_it_has():
    with advises(
        "g.lr_half_life_kimg=0: g.schedule=exponential halves the learning rate in this time. Use "
        "--g.lr_half_life_kimg=100, or another schedule"
    ):
        validate(tiny_run.make_run("g.schedule=exponential"))
    validate(tiny_run.make_run("g.schedule=exponential", "g.lr_half_life_kimg=100"))
    with advises(
        "d.lr_half_life_kimg=3: is of schedule=exponential, not linear. Use --d.schedule=exponential, or leave it out"
    ):
        validate(tiny_run.make_run("d.lr_half_life_kimg=3", "d.schedule=linear"))
    validate(tiny_run.make_run("d.lr_half_life_kimg=3", "d.schedule=exponential"))


def test_players_follow_their_schedules():
    s = tiny_run.make_session(tiny_run.make_run("kimg=0.16", "g.schedule=linear", "d.warm_up_kimg=0.08"))
    factors = []
    for _ in range(10):
        play_round(s)
        factors.append((s.game.g.learning_rate / 2e-3, s.game.d.learning_rate / 2e-3))
    assert [g for g, _ in factors] == pytest.approx([1 - k / 10 for k in range(1, 11)])
    assert [d for _, d in factors] == pytest.approx([min(1, k / 5) for k in range(1, 11)])


def test_six_and_four_rounds_equal_ten_under_schedules(tmp_path):
    settings = [("kimg", "0.16"), ("g.schedule", "cosine"), ("g.warm_up_kimg", "0.032")]
    settings += [("d.schedule", "exponential"), ("d.lr_half_life_kimg", "0.05")]
    run, _ = build_run(to_dict(tiny_run.make_run()), settings, "paragan")
    world = World.solo()
    saved, _ = tiny_run.save_after(run, 6, world, tmp_path)
    s = tiny_run.make_session(run, world, saved)
    for _ in range(4):
        play_round(s)
    uninterrupted = tiny_run.play_rounds(run, 10)
    assert tiny_run.is_equal(tiny_run.session_state(s), uninterrupted)
    constant, _ = build_run(to_dict(tiny_run.make_run()), settings[:1], "paragan")
    assert not tiny_run.is_equal(tiny_run.play_rounds(constant, 10), uninterrupted)


# From the command line and from Python ----------------------------------------------------------------


def test_command_line_prints_the_policy_and_its_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry_run = run_cli("train", *TINY_RUN_ARGS, "--policy=paragan", "-n")
    assert dry_run.status == 0
    lines = [line for line in dry_run.out.splitlines() if line.startswith("# policy paragan: ")]
    assert lines[0] == "# policy paragan: G adabelief lr 0.0002, betas (0.5, 0.999), eps 1e-12"
    assert any("ParaGAN" in line for line in lines)
    assert any("Zhuang et al. 2020" in line for line in lines)
    assert "policy" not in from_yaml(dry_run.out, "")
    ended = run_cli("train", *TINY_RUN_ARGS, "--policy=sngan", "--kimg=0.16", "--run-dir=run")
    assert ended.status == 0
    assert "policy sngan: D adam lr 0.0002, betas (0.0, 0.9), eps 1e-08, linear schedule" in ended.out
    assert "2 steps of G in 0.16 kimg" in ended.out
    record = from_yaml(Path("run/run.yaml").read_text(), "run.yaml")
    assert (record["d_steps"], record["g"]["schedule"]) == (5, "linear")
    extended = run_cli("train", "run/run.yaml", "--kimg=0.32", "--run-dir=run")
    assert extended.status == 0
    assert "g.schedule=linear now ends at 0.32 kimg, not at 0.16: the learning rate continues at 50%" in extended.out


def test_longer_run_without_a_schedule_prints_no_warning(tmp_path):
    train_tiny(tmp_path / "run", "--kimg=0.016")
    longer = run_cli("train", *TINY_RUN_ARGS, "--run-dir", tmp_path / "run", "--kimg=0.032")
    assert longer.status == 0
    assert "resumed from" in longer.out
    assert "schedule" not in longer.out


@pytest.mark.parametrize("setting", ["kimg=2", "output.tick_kimg=0.5", "evaluation.count=16", "strategy.min_ranks=1"])
def test_a_rank_that_joins_has_the_settings_and_the_data_of_the_others(tmp_path, setting):
    images = load_data("digits", resolution=8)
    settings = ("kimg=1", "strategy.peer_timeout_s=3", "evaluation.metrics=[fd]")
    folder = RunDir(tmp_path)
    folder.write_run_config(to_saved_dict(resolve(tiny_run.make_run(*settings), images)))
    name, _, value = setting.partition("=")
    other = TrainJob(tiny_run.make_run(*settings, setting), LaunchInfo(), RunDirRequest(run_dir=tmp_path))
    same = TrainJob(tiny_run.make_run(*settings, "device.threads=1"), LaunchInfo(), RunDirRequest(run_dir=tmp_path))
    with advises("Use the command that started them") as refused:
        other._match_running_run(folder, images.fingerprint)
    assert re.search(rf"other settings: {name} is \S+, not {value}(\.0)?\.", str(refused.value))
    with advises(f"--data digits: not the images that {tmp_path} is trained on. Use those"):
        same._match_running_run(folder, "of other images")
    assert same._match_running_run(folder, images.fingerprint).run_dir is folder
    other.request = RunDirRequest()
    assert other._match_running_run(folder, images.fingerprint) is None  # a numbered folder may be another job's


def test_unknown_policy_lists_the_known_ones():
    error = usage_error("train", *TINY_RUN_ARGS, "--policy=bigan")
    assert "there is no policy bigan" in error
    assert all(name in error for name in POLICIES)
    assert "there is no field g.optimizer.eta" in usage_error(
        "train", *TINY_RUN_ARGS, "--policy=ttur", "--g.optimizer.eta=1"
    )


def test_help_lists_the_policies(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    output = capsys.readouterr().out
    assert "--policy P" in output
    assert all(name in output for name in POLICIES)


def test_policy_from_python_is_printed(capsys):
    config = with_policy(Config(evaluation=EvaluationOptions(count=16)), "ttur", bs=512)
    assert config.g.optimizer == Adam(lr=1e-4 * 2**0.5, betas=(0.0, 0.9))
    with ScalingManager(config, bs=512, num_workers=4) as manager:
        assert manager.run.g.optimizer.lr == pytest.approx(1e-4 * 2**0.5)  # no rule on top
        assert manager.run.d.optimizer.lr == pytest.approx(4e-4 * 2**0.5)
    assert "policy ttur: learning rates x 1.41421" in capsys.readouterr().out
    torch.set_num_threads(1)


@pytest.mark.parametrize("strategy", ["DPOSG", "DQGAN"])
def test_rates_of_another_optimizer_are_named_where_steps_are_plain_gradient_steps(strategy):
    base = to_dict(tiny_run.make_run(f"strategy={strategy}"))
    _, lines = build_run(base, [])
    assert any("--policy dqgan have rates for gradient steps" in line for line in lines)
    _, lines = build_run(base, [], "dqgan")
    assert not any("have rates for gradient steps" in line for line in lines)
