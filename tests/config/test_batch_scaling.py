"""Settings that are right for one batch, carried to another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import paragan as pg
from paragan.api.scaled_run import build_scaled_run
from paragan.config.batch_scaling import scale_to_batch
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import from_yaml, to_dict
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.optim.optimizers import Adam, Lookahead, PlayerOptim
from paragan.recipes import build_run
from processes import run_cli, train_args, usage_error


def run(**fields):
    base = Run(
        batch=64,
        kimg=1000,
        g=PlayerOptim(Adam(lr=1e-3)),
        d=PlayerOptim(Adam(lr=4e-3)),
        ema=EMAConfig(half_life_kimg=10),
    )
    return dataclasses.replace(base, **fields)


def test_each_network_has_its_scaling_rule():
    scaled = scale_to_batch(
        run(
            batch=256,
            g=PlayerOptim(Adam(lr=1e-3), lr_scaling="linear"),
            d=PlayerOptim(Adam(lr=4e-3), lr_scaling="none"),
        ),
        64,
    )
    assert (scaled.g.optimizer.lr, scaled.d.optimizer.lr) == (pytest.approx(4e-3), 4e-3)
    assert (scaled.g.warm_up_kimg, scaled.d.warm_up_kimg) == (100 * 2 * 256 / 1000, 0)
    assert scale_to_batch(run(batch=256), 64).g.optimizer.lr == pytest.approx(2e-3)
    assert scale_to_batch(run(batch=16), 64).d.optimizer.lr == pytest.approx(2e-3)  # back as well
    assert scale_to_batch(run(batch=16), 64).d.warm_up_kimg == 0


def test_the_warm_up_grows_with_the_batch_and_leaves_a_run():
    kimg = [scale_to_batch(run(batch=batch), 64).g.warm_up_kimg for batch in (64, 128, 512, 2048)]
    assert kimg == [0, 12.8, 153.6 if 153.6 < 100 else 100, 100]
    assert scale_to_batch(run(batch=128, g=PlayerOptim(warm_up_kimg=50)), 64).g.warm_up_kimg == 50
    assert scale_to_batch(run(batch=128, d_steps=2), 64).g.warm_up_kimg == 25.6


def test_a_half_life_is_in_images_unless_it_is_a_few_rounds():
    assert scale_to_batch(run(batch=1000, lanes=8), 64).ema.half_life_kimg == 10
    assert scale_to_batch(run(batch=2048), 64).ema.half_life_kimg == 20.48
    short = run(batch=2048, ema=EMAConfig(half_life_kimg=0.128))  # two rounds, as was right for 64 images
    assert scale_to_batch(short, 64).ema.half_life_kimg == pytest.approx(2 * 2.048)
    assert scale_to_batch(run(batch=64, ramp=((100, 4096),)), 64).ema.half_life_kimg == 40.96


def test_penalties_are_scaled_only_on_request():
    before = run(batch=256, objective=Adversarial(r1=8, r1_every=4))
    assert scale_to_batch(before, 64).objective == before.objective
    scaled = scale_to_batch(before, 64, scale_penalties=True)
    assert (scaled.objective.r1, scaled.objective.r1_every, scaled.objective.r2) == (2, 4, 0)
    assert "Karras et al. 2020" in scaled.reasons[-1]
    fixed = scale_to_batch(before, 64, scale_penalties=True, fixed_fields={"objective.r1"})
    assert fixed.objective.r1 == 8
    assert any("objective.r1 stays at 8" in line for line in fixed.reasons)
    assert "no R1" in scale_to_batch(run(), 32, scale_penalties=True).reasons[-1]


def test_user_settings_are_not_scaled():
    fixed = {"g.optimizer.lr", "d.warm_up_kimg", "ema.half_life_kimg"}
    scaled = scale_to_batch(run(batch=2048), 64, fixed_fields=fixed)
    assert (scaled.g.optimizer.lr, scaled.d.warm_up_kimg, scaled.ema.half_life_kimg) == (1e-3, 0, 10)
    assert "G: learning rate 0.001, set by hand" in scaled.reasons
    slow = PlayerOptim(Lookahead(inner=Adam(lr=1e-3)))
    assert scale_to_batch(run(batch=256, g=slow), 64).g.optimizer.lr == pytest.approx(2e-3)
    assert scale_to_batch(run(batch=256, g=slow), 64, fixed_fields={"g.optimizer.inner.lr"}).g.optimizer.lr == 1e-3


def test_every_choice_has_its_line():
    lines = scale_to_batch(run(batch=2048, reasons=("before",)), 64).reasons
    assert lines[0] == "before"
    assert lines[1] == "batch 2048 over 8 lanes of 256 images, settings for 64"
    assert lines[2] == "G: learning rate 0.00566 = 0.001 x sqrt(32): Krizhevsky 2014; for Adam Malladi et al. 2022"
    assert [line.split(":")[0] for line in lines[2:]] == ["G", "G", "D", "D", "average"]
    with pytest.raises(UsageError, match="1 or more"):
        scale_to_batch(run(), 0)


def test_a_command_carries_the_settings_of_its_recipe():
    data = to_dict(run())
    scaled, lines = build_run(
        data, [("batch", "256"), ("g.lr_scaling", "linear"), ("d.optimizer.lr", "1e-3")], batch_scaling="rates"
    )
    assert (scaled.g.optimizer.lr, scaled.d.optimizer.lr) == (pytest.approx(4e-3), 1e-3)
    assert list(scaled.reasons) == lines
    rebuilt, _ = build_run(to_dict(scaled), [])
    assert rebuilt == scaled
    with pytest.raises(UsageError, match="Leave --batch-scaling rates out"):
        build_run(data, [], "sngan", "rates")
    with pytest.raises(UsageError, match="--batch-scaling some"):
        build_run(data, [], batch_scaling="some")


def test_reasons_are_in_the_record_and_the_report_and_no_obstacle(tmp_path):
    arguments = train_args(tmp_path / "run", "--batch=32", "--batch-scaling=all", "--kimg=0.064")
    ended = run_cli(*arguments)
    assert ended.status == 0, ended
    assert "G: learning rate 0.0005 = 0.001 x sqrt(0.25)" in ended.out
    record = from_yaml((tmp_path / "run/run.yaml").read_text(), "")
    assert record["reasons"][0] == "batch 32 over 2 lanes of 16 images, settings for 128"
    assert record["g"]["optimizer"]["lr"] == pytest.approx(5e-4)
    page = (tmp_path / "run/report.html").read_text()
    assert "Why these settings" in page
    assert "<li>G: learning rate 0.0005 = 0.001 x sqrt(0.25)" in page
    plainly = train_args(
        tmp_path / "run", "--batch=32", "--kimg=0.128", "--g.optimizer.lr=5e-4", "--d.optimizer.lr=1e-3"
    )
    assert run_cli(*plainly).status == 0  # the same run, however it was asked for
    assert "batch was 32, is 16" in usage_error(*train_args(tmp_path / "run", "--batch-scaling=all"))


def test_a_run_without_reasons_has_no_such_section(finished):
    assert "Why these settings" not in Path(finished / "report.html").read_text()


def test_a_scaling_manager_prints_the_same_reasons():
    config = pg.Config(
        base_bs=64, objective=Adversarial(r1=4), scale_penalties=True, reasons=("mine",), g_lr_scaling="none"
    )
    scaled = build_scaled_run(config, 256, 8)
    assert scaled.reasons[0] == "mine"
    assert scaled.objective.r1 == 1
    assert scaled.g.optimizer.lr == config.g.optimizer.lr
    assert (
        scaled.reasons[1:]
        == scale_to_batch(dataclasses.replace(scaled, g=config.g, reasons=()), 64).reasons[:1] + scaled.reasons[2:]
    )
