"""The watcher names what is wrong, is silent where nothing is, and changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch

import tiny_run
from paragan.config.sections import HealthOptions
from paragan.core.jsonl import read_jsonl
from paragan.game.update_norm import UpdateNorm
from paragan.train.health.rules import detect
from paragan.train.health.signals import HealthSignals, find_roughest_label, texture_variances, within_label_variance
from paragan.train.loop import play_round
from processes import on_step, run_cli, train_args, usage_error

LIMITS = HealthOptions()


def rows(ticks: int = 20, **last: list[float]) -> list[dict[str, float]]:
    """Lines of a healthy run, the last of which have other values."""
    rng = np.random.default_rng(0)
    usual = {
        "Health/G/gradient": 5.0,
        "Health/D/gradient": 3.0,
        "Health/G/update_norm": 0.05,
        "Health/D/update_norm": 0.1,
        "Health/D/step": 0.05,
        "Health/G/diversity": 0.7,
        "Health/D/accuracy": 0.8,
        "Loss/G/loss": 0.5,
        "Loss/D/loss": 1.0,
        "Health/G/replica_drift": 0.0,
        "Health/label/roughness": 0.6,
        "Health/label/others": 0.5,
        "Health/label/number": 3.0,
        "Consensus/G": 0.02,
    }
    history = [
        {"Progress/step": float(10 * t)} | {key: x * (1 + 0.2 * rng.standard_normal()) for key, x in usual.items()}
        for t in range(1, ticks + 1)
    ]
    for key, values in last.items():
        for row, value in zip(history[-len(values) :], values, strict=True):
            row[key.replace("__", "/")] = value
    return history


def kinds(lines, limits: HealthOptions = LIMITS) -> list[str]:
    return [finding.kind for finding in detect(lines, limits)]


def test_a_healthy_run_has_no_findings():
    for ticks in range(1, 60):
        assert kinds(rows(ticks)) == []


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("nonfinite", {"Loss__G__loss": [math.nan]}),
        ("overshoot", {"Health__D__step": [3.0]}),
        ("divergence", {"Health__D__gradient": [400.0, 900.0, 2e3]}),
        ("divergence", {"Loss__D__loss": [-300.0, -900.0, -2e3]}),
        ("collapse", {"Health__G__diversity": [0.1, 0.08, 0.05]}),
        ("d_saturated", {"Health__D__accuracy": [1.0, 1.0, 1.0], "Health__D__gradient": [0.0, 0.02, 0.01]}),
        ("stalled", {"Health__G__gradient": [0.05, 0.05, 0.04], "Health__D__accuracy": [0.8] * 3}),
        ("no_update", {"Health__G__update_norm": [0.0, 0.0, 0.0]}),
        ("drift", {"Health__G__replica_drift": [0.3]}),
        ("consensus", {"Consensus__G": [0.7, 0.8, 0.8]}),
        ("noisy_label", {"Health__label__roughness": [1.0, 0.97, 1.02], "Health__label__others": [0.5] * 3}),
    ],
)
def test_each_kind_is_detected_after_patience_ticks(kind, last):
    (finding,) = detect(rows(**last), LIMITS)
    assert finding.kind == kind
    assert finding.advice
    assert finding.key in rows(**last)[-1]
    if kind not in ("nonfinite", "drift", "overshoot"):
        assert finding.last_good_step == 170  # the line before the first of the three
        shorter = {key: [rows()[0][key.replace("__", "/")], *values[1:]] for key, values in last.items()}
        assert kinds(rows(**shorter)) == []
        assert kinds(rows(**last), dataclasses.replace(LIMITS, patience_ticks=4)) == []


def test_a_line_read_back_has_the_same_findings(tmp_path):
    from paragan.core.jsonl import JsonlFile

    JsonlFile(tmp_path / "s.jsonl").append(rows(Loss__G__loss=[math.nan])[-1])
    assert kinds(read_jsonl(tmp_path / "s.jsonl")) == ["nonfinite"]


def test_a_short_history_is_not_compared():
    assert kinds(rows(4, Health__G__gradient=[0.01, 0.01, 0.01], Health__G__diversity=[0.01] * 3)) == []


@pytest.mark.parametrize(
    "settings", [(), ("objective.bcr=1", "objective.lecam=0.1"), ("strategy=async",), ("data.labels=false",)]
)
def test_measuring_changes_no_state(settings):
    of = tiny_run.make_run(*settings)
    measured, reference, signs = tiny_run.make_session(of), tiny_run.make_session(of), HealthSignals()
    for _ in range(4):
        play_round(measured)
        line = signs(measured)
        play_round(reference)
        assert all(math.isfinite(value) for value in line.values())
    assert tiny_run.is_equal(tiny_run.session_state(measured), tiny_run.session_state(reference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signals_equal_numpy(dtype):
    """Against numpy, from what the game itself makes."""
    s, signs = tiny_run.make_session(tiny_run.make_run(), dtype=dtype), HealthSignals()
    play_round(s)
    before = s.game.d.flat.params.clone()
    signs(s)
    with longest_step(s.game.d) as steps:
        play_round(s)
    line, d = signs(s), s.game.d.flat
    assert line["Health/D/step"] == pytest.approx(max(steps), rel=1e-5)
    assert signs(s)["Health/D/step"] == 0  # of no step
    assert line["Health/D/gradient"] == pytest.approx(float(d.grads.double().norm()), rel=1e-6)
    step = -(-len(d.params) // 1024)
    sample, former = d.params[::step].double(), before[::step].double()
    assert line["Health/D/update_norm"] == pytest.approx(float((sample - former).norm() / sample.norm()), rel=1e-9)
    assert 0 <= line["Health/D/accuracy"] <= 1
    assert "Health/D/replica_drift" not in line  # one rank


@contextlib.contextmanager
def longest_step(player):
    """A list that fills with how far each step moves the weights that are sampled, relative to them."""
    step_norms, step = [], player.optimizer.step

    def recorded(closure=None):
        before = player.flat.params.clone()
        step(closure)
        every = -(-len(before) // 1024)
        went = (player.flat.params - before)[::every].double().norm()
        step_norms.append(float(went / before[::every].double().norm()))

    player.optimizer.step = recorded
    yield step_norms
    player.optimizer.step = step


def test_the_first_step_from_zero_weights_is_no_overshoot():
    stride = UpdateNorm(params := torch.zeros(5))
    with stride.measuring_step():
        params += 1
    assert stride.pop_max() == 0
    with stride.measuring_step():
        params += 1
    with stride.measuring_step():
        params += 0.2
    assert float(stride.pop_max()) == pytest.approx(1)


def test_within_label_variance_equals_numpy():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 3)), np.array([0, 0, 0, 2, 2, 2, 2, 5, 5, 5, 5, 5])
    expected = sum(((x[y == k] - x[y == k].mean(0)) ** 2).sum() for k in (0, 2, 5)) / (12 - 3)
    assert float(within_label_variance(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected)
    assert float(within_label_variance(torch.tensor(x), None)) == pytest.approx(x.var(0, ddof=1).sum())


def test_noise_has_roughness_one_and_digits_less():
    rng, digits = np.random.default_rng(0), tiny_run.make_dataset()
    noise = torch.from_numpy(rng.uniform(-1, 1, (400, 1, 8, 8)))
    pixel_variances, neighbor_variances = texture_variances(noise)
    assert float(neighbor_variances.sum() / pixel_variances.sum()) == pytest.approx(1.0, abs=0.03)
    sums = torch.zeros(3, 10, dtype=torch.float64)
    images = torch.from_numpy(digits.images.transpose(0, 3, 1, 2) / 127.5 - 1)
    images[digits.labels == 4] = noise[: int((digits.labels == 4).sum())]
    pixel_variances, neighbor_variances = texture_variances(images)
    sums.index_add_(
        1,
        torch.from_numpy(digits.labels),
        torch.stack([torch.ones_like(pixel_variances), pixel_variances, neighbor_variances]),
    )
    roughest = find_roughest_label(sums)
    assert roughest["Health/label/number"] == 4
    assert roughest["Health/label/roughness"] > 0.9
    assert roughest["Health/label/others"] < 0.6


def test_replica_drift_is_equal_on_all_ranks(pool):
    def measure(world):
        of, drifts = tiny_run.make_run(), []
        for seed in (0, world.rank):
            s = tiny_run.make_session(of if seed == 0 else dataclasses.replace(of, seed=seed), world)
            play_round(s)
            drifts.append(HealthSignals()(s)["Health/G/replica_drift"])
        return drifts

    (zero, drift), (zero_1, drift_1) = pool(2, measure)
    assert zero == zero_1 == 0
    assert drift == drift_1 > 0.01


def test_every_strategy_can_be_measured(pool):
    def measure(world):
        lines = []
        for settings in (
            ["strategy=gossip", "strategy.peer_timeout_s=0"],
            ["strategy=async"],
            ["strategy=quantized"],
        ):
            s, signs = tiny_run.make_session(tiny_run.make_run(*settings), world), HealthSignals()
            for _ in range(2):
                play_round(s)
                if s.role.barrier:
                    s.role.barrier()
                line = signs(s)
            lines.append(line)
            if s.role.drain:
                s.role.drain()
        return lines

    first, second = pool(2, measure)
    assert first == second
    gossip, asynchronous, quantized = first
    assert "Health/G/replica_drift" not in gossip
    assert quantized["Health/G/replica_drift"] == 0
    assert "Health/D/accuracy" not in asynchronous
    assert asynchronous["Health/G/diversity"] > 0


# In runs --------------------------------------------------------------------------------------------------


def freeze_g(session):
    session.game.g.optimizer.step = lambda closure=None: None


def test_a_run_warns_once_and_logs_the_finding(tmp_path):
    with on_step(2, freeze_g):
        ended = run_cli(*train_args(tmp_path / "run", "--kimg=0.16"))
    assert ended.status == 0
    (row,) = [row for row in read_jsonl(tmp_path / "run" / "health.jsonl") if row["kind"] == "no_update"]
    assert {"kimg", "step", "kind", "message", "key", "value", "limit", "action"} <= row.keys()
    assert (row["key"], row["action"], row["step"]) == ("Health/G/update_norm", "warned", 5)
    assert ended.out.count("the weights of G do not change") == 1
    assert "no_update" in run_cli("status", tmp_path / "run").out


def raise_learning_rate(session):
    player = session.game.d
    player._base_lrs = [100 * rate for rate in player._base_lrs]


def test_a_too_large_learning_rate_is_detected_at_the_next_line(tmp_path):
    with on_step(2, raise_learning_rate):
        ended = run_cli(*train_args(tmp_path / "run", "--kimg=0.16"))
    assert ended.status == 0
    row = read_jsonl(tmp_path / "run" / "health.jsonl")[0]
    assert (row["kind"], row["key"], row["step"]) == ("overshoot", "Health/D/step", 3)
    assert row["value"] > 2 * row["limit"]
    assert ended.out.count("a step of D changed its weights") == 1


def test_health_off_takes_no_measurements(tmp_path):
    with on_step(2, freeze_g):
        ended = run_cli(*train_args(tmp_path / "run", "--kimg=0.16", "--health=off"))
    assert ended.status == 0
    assert not (tmp_path / "run" / "health.jsonl").exists()
    assert not any(key.startswith("Health/") for key in read_jsonl(tmp_path / "run" / "stats.jsonl")[-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--on-divergence=rollback", "--health=off"], "--health=off"),
        (["--on-divergence=back"], "on_divergence"),
        (["--on_divergence.max_rollbacks=0"], "on_divergence.max_rollbacks"),
        (["--on_divergence.lr_factor=2"], "on_divergence.lr_factor"),
        (["--health.patience_ticks=0"], "health.patience_ticks"),
        (["--health.max_update=0"], "health.max_update"),
        (["--health=sometimes"], "health.enabled"),
    ],
)
def test_bad_health_fields_raise_usage_errors(settings, message, tmp_path):
    assert message in usage_error(*train_args(tmp_path / "run", *settings))
