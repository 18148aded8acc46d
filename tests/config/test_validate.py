"""Objectives that do not fit their run are refused with what would."""

from __future__ import annotations

import numpy as np
import pytest

import tiny_run
from advice import advises
from fake_datasets import random_images
from paragan.config import validate as validation
from paragan.config.resolve import resolve
from paragan.config.validate import check_d_conditioning, validate
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.train.prepare import prepare

INVALID = {
    "objective.bcr=10: already includes objective.cr=5": ("objective.cr=5", "objective.bcr=10"),
    "objective.classifier=1: D has one head": ("objective.classifier=1", "objective.contrastive=1"),
    "objective.loss=relativistic is none": ("objective.augment=ada", "objective.loss=relativistic"),
    "objective.loss=wasserstein is none": ("objective.augment=ada", "objective.loss=wasserstein"),
    "--strategy async D trains on the images of G's own turn": ("objective.zcr=5", "strategy=async"),
    "D trains on the images of G's own turn. Use": (
        "objective.zcr_g=5",
        "strategy=per-label",
        "strategy.per_label_strategy=async",
    ),
    "--g_batch 32 must be --batch 16": ("objective.loss=relativistic", "g_batch=32"),
    "Use --lanes 2": ("objective.contrastive=1", "batch=8"),
    "each D sees one": ("objective.classifier=1", "strategy=per-label"),
    "--data.labels=false hides them": ("objective.classifier=1", "data.labels=false"),
}


@pytest.mark.parametrize(("words", "settings"), INVALID.items(), ids=INVALID)
def test_contradictory_settings_raise(words, settings):
    with pytest.raises(UsageError) as raised:
        resolve(tiny_run.make_run(*settings), tiny_run.make_dataset())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_pairs_of_a_batch_of_their_size_are_fine():
    resolve(tiny_run.make_run("objective.loss=relativistic", "g_batch=16"), tiny_run.make_dataset())


@pytest.mark.parametrize(
    ("weights", "conditioning"),
    [
        ({"classifier": 1.0}, "projection"),
        ({"classifier": 1.0}, "contrastive"),
        ({}, "classifier"),
        ({}, "contrastive"),
    ],
)
def test_a_head_requires_its_weight(weights, conditioning):
    from paragan.losses.adversarial import Adversarial

    with pytest.raises(UsageError, match=r"nets\.d_conditioning="):
        check_d_conditioning(Adversarial(**weights), conditioning)
    for name in ("classifier", "contrastive"):
        check_d_conditioning(Adversarial(**{name: 1.0}), name)
    check_d_conditioning(Adversarial(), "projection")


def test_a_device_of_one_rank_has_one_rank():
    with advises("--device.kind=mps: is one device, and 2 ranks were started. Start one, or use cpu."):
        validate(tiny_run.make_run("device.kind=mps"), 2)
    validate(tiny_run.make_run("device.kind=mps"), 1)
    validate(tiny_run.make_run("device.kind=cpu"), 2)


@pytest.mark.parametrize("strategy", ["gossip", "per-label"])
def test_settings_are_not_measured_for_ranks_that_come_and_go(strategy):
    with advises(
        f"for all ranks, and with --strategy {strategy} they come and go. "
        "Take the fields that `paragan plan --tune` names"
    ):
        validate(tiny_run.make_run("device.tune=measured", f"strategy={strategy}"))
    validate(tiny_run.make_run("device.channels_last=false", "device.precision=bf16", f"strategy={strategy}"))


def test_settings_are_not_measured_together_with_the_strategy():
    with advises(
        "Take the fields that `paragan plan --tune` names, or the strategy that `paragan plan` does",
    ):
        validate(tiny_run.make_run("device.tune=measured", "strategy=auto"))
    validate(tiny_run.make_run("device.channels_last=false", "device.precision=bf16", "strategy=auto"))
    validate(tiny_run.make_run("device.tune=measured", "strategy=sync"))


def test_passes_are_captured_on_one_rank(monkeypatch):
    monkeypatch.setattr(validation, "find_cpp_compiler", lambda: "g++")
    settings = ("device.kind=cpu", "device.capture_passes=true")
    validate(tiny_run.make_run(*settings), 1)
    with advises("is for one rank: with 2, gradients are sent during backward. Leave it false"):
        validate(tiny_run.make_run(*settings), 2)
    validate(tiny_run.make_run(*settings[:1]), 2)


def test_concat_real_fake_defaults_to_false_on_a_cpu():
    run = resolve(tiny_run.make_run(), tiny_run.make_dataset())
    assert run.device.concat_real_fake is False
    assert (
        resolve(tiny_run.make_run("device.concat_real_fake=true"), tiny_run.make_dataset()).device.concat_real_fake
        is True
    )


def test_a_contrastive_family_is_played_label_by_label_without_its_head():
    """Each game has one class and tells nobody: a head for labels is not built, so nothing is unheard."""
    images = Dataset(random_images(20, 32), np.arange(20) % 2, ("a", "b"), "")
    settings = ("nets=contragan", "nets.width=4", "nets.latent=8", "evaluation.metrics=[]", "strategy=per-label")
    assert prepare(tiny_run.make_run(*settings), dataset=images).run.per_label
    with pytest.raises(UsageError, match=r"Use --objective\.contrastive=1"):
        prepare(tiny_run.make_run(*settings[:-1]), dataset=images)
