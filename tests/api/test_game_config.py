"""The settings of a game: `Config` and `with_policy`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml

import paragan as pg
from advice import advises
from paragan.api.scaled_run import build_scaled_run
from paragan.core.schema import from_dict, to_yaml
from tiny_estimator import config


def test_max_steps_is_a_number_that_can_be_iterated():
    assert list(config().max_steps) == [0, 1, 2, 3, 4]
    assert config().max_steps * 2 == 10
    with pytest.raises(pg.UsageError, match="max_steps=0"):
        from_dict(pg.Config, {"max_steps": 0})


def test_a_config_can_be_written_as_yaml():
    cfg = pg.Config(max_steps=3)
    assert list(cfg.max_steps) == [0, 1, 2]
    assert yaml.safe_load(yaml.safe_dump(dataclasses.asdict(cfg)["max_steps"])) == 3
    assert from_dict(pg.Config, yaml.safe_load(to_yaml(cfg))) == cfg


def test_learning_rates_follow_lr_scaling():
    cfg = dataclasses.replace(config(g_lr_scaling="linear", d_lr_scaling="none", warm_up_steps=10), max_steps=1000)
    run = build_scaled_run(cfg, 256, 8)
    assert run.g.optimizer.lr == pytest.approx(8e-4)
    assert run.d.optimizer.lr == pytest.approx(2e-4)
    assert run.g.warm_up_kimg == pytest.approx(10 * 2 * 256 / 1000)
    assert run.d.warm_up_kimg == 0


def test_a_policy_with_an_objective_of_its_own_is_refused_beside_yours():
    class Own:
        second_order = False
        generator = discriminator = staticmethod(lambda *batches: pg.Loss(torch.zeros(())))

    objective = Own()
    own = config(objective=objective)
    with advises(
        "policy wcgan: sets objective.loss=wasserstein, objective.r1=0, objective.r2=0, objective.gp=0, "
        "objective.clip=0.01, objective.lecam=0, but config.objective is your own. Use one"
    ):
        pg.with_policy(own, "wcgan", 64)
    assert pg.with_policy(config(), "wcgan", 64).objective.clip == 0.01
    assert pg.with_policy(own, "ttur", 64).objective is objective


MISTAKES = {  # message -> wrong fields of a Config, and fields that the message names as right
    "strategy: there is no foo; there are: sync, quantized, ": ({"strategy": "foo"}, {"strategy": "quantized"}),
    "strategy.wire: there is no int3; did you mean int8?": (
        {"strategy": {"name": "quantized", "wire": "int3"}},
        {"strategy": {"name": "quantized", "wire": "int8"}},
    ),
    "max_steps=0: input should be greater than or equal to 1": ({"max_steps": 0}, {"max_steps": 1}),
    "there is no field steps; did you mean max_steps": ({"steps": 9}, {"max_steps": 9}),
    "device.kind=tpu: input should be 'auto', 'cpu'": ({"device": {"kind": "tpu"}}, {"device": {"kind": "cpu"}}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_wrong_value_is_refused_in_one_line_as_in_a_file(message):
    wrong, right = MISTAKES[message]
    with pytest.raises(pg.UsageError) as from_file:
        from_dict(pg.Config, wrong)
    with pytest.raises(pg.UsageError) as from_python:
        pg.Config(**wrong)
    assert str(from_python.value) == str(from_file.value)
    assert str(from_python.value).startswith(message)
    assert "\n" not in str(from_python.value)
    pg.Config(**right)
