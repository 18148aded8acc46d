"""Messages name fields as a Python script types them, and their advice works there."""

from __future__ import annotations

import re

import pytest
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import paragan as pg
from advice import ROOT, advises, messages_with_advice
from paragan.api.field_names import to_python_names
from tiny_estimator import PlainD, PlainG, config, make_manager, untyped

SPELLINGS = {
    "--batch 30: does not divide into --lanes 8. Use --batch 24 or 32, or --lanes 6": "bs=30: does not divide into "
    "num_workers=8. Use bs=24 or 32, or num_workers=6",
    "Use --strategy.wire=exact": "Use strategy.wire=exact",
    "Use objective.zcr=0, or --strategy sync": "Use objective.zcr=0, or strategy=sync",
    "or --data.labels=false hides them": "or data.labels=False hides them",
    "device.compile=true: fails. Use --g.extrapolation=null.": "device.compile=True: fails. Use g.extrapolation=None.",
    "or a larger --kimg.": "or a larger max_steps.",
    "--inception PATH, or --features inception with the file": "evaluation.inception=PATH, or "
    "evaluation.features=inception with the file",
    "Use `paragan train custom --nets=module:Class`, or --d_steps=1": "Use `paragan train custom --nets=module:Class`, "
    "or d_steps=1",
    "low--data 1 -- 2 --- 3": "low--data 1 -- 2 --- 3",
}


@pytest.mark.parametrize("message", SPELLINGS)
def test_an_option_becomes_the_field_or_argument(message):
    assert to_python_names(message) == SPELLINGS[message]


@pytest.mark.parametrize("package", ["config", "data", "game", "strategies"])
def test_no_option_is_left_in_messages_of_checks_that_both_interfaces_share(package):
    messages = [message.text for message in messages_with_advice(ROOT / "paragan" / package)]
    assert any("--" in message for message in messages)
    left = [m for m in map(to_python_names, messages) if re.search(r"(?<![\w-])--\w", re.sub(r"`[^`]*`", "", m))]
    assert not left


class SpectralD(PlainD):
    def __init__(self):
        super().__init__()
        self.net = spectral_norm(self.net)


class NormD(PlainD):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def train_one(make_d=PlainD, **fields):
    with make_manager(**fields) as scale_mgr:
        assert scale_mgr.train(pg.Estimator(PlainG(), make_d()))["Progress/step"] == 1


def test_the_batch_and_the_workers_are_arguments_of_the_manager():
    with advises("bs=30: does not divide into num_workers=8. Use bs=24 or 32, or num_workers=6"):
        pg.ScalingManager(config(), bs=30, num_workers=8)
    for bs, num_workers in ((24, 8), (32, 8), (30, 6)):
        pg.ScalingManager(config(), bs=bs, num_workers=num_workers).close()


def test_fields_of_the_config_are_named_and_changed_as_advised():
    accumulate = {"name": "sync", "sync_period": 9, "sync_mode": "accumulate"}
    with advises("Use strategy.sync_period=5 or less, or a larger max_steps."):
        train_one(strategy=untyped(accumulate))
    train_one(strategy=untyped({**accumulate, "sync_period": 5}))
    with advises("Use d_steps=1, or strategy.sync_mode=parameters."):
        train_one(strategy=untyped({**accumulate, "sync_period": 2}), d_steps=2)
    train_one(strategy=untyped({"name": "sync", "sync_period": 2, "sync_mode": "parameters"}), d_steps=2)


def test_a_bound_of_d_is_left_out_as_advised():
    clip, gp = pg.Adversarial(loss="wasserstein", clip=0.01), pg.Adversarial(loss="wasserstein", gp=10)
    with advises("that spectral norm rescales. Use a D without it, or objective.clip=0."):
        train_one(SpectralD, objective=clip)
    with advises("and D normalises over the batch. Use a D without batch norm, or objective.gp=0."):
        train_one(NormD, objective=gp)
    train_one(objective=clip)
    train_one(objective=gp)
    for make_d in (SpectralD, NormD):
        train_one(make_d, objective=pg.Adversarial(loss="wasserstein"))


def test_a_policy_is_named_by_the_argument():
    with pytest.raises(pg.UsageError, match=r"^name=foo: there is no policy foo"):
        pg.with_policy(config(), "foo", 64)
    assert pg.with_policy(config(), "ttur", 64).base_bs == 64
