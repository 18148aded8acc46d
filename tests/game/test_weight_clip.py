"""Weight clipping of D is rejected together with other bounds, and the error names what works."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.core.errors import UsageError
from paragan.train.build import Networks, build_networks
from paragan.train.session import build_session
from processes import TINY_RUN_ARGS, run_cli, usage_error

SPECTRAL = (
    "paragan: objective.clip=0.01: clips weights that spectral norm rescales. Use a D without it "
    "(--nets.spectral=false), or objective.clip=0.\n"
)
PENALISED = (
    "paragan: objective.clip=0.02: objective.gp=10 bounds the slopes of D too. Use objective.gp=0, or "
    "objective.clip=0\n"
)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("settings", "message", "remedies"),
    [
        (("--objective.clip=0.01",), SPECTRAL, ("--nets.spectral=false", "--objective.clip=0")),
        (("--nets=sngan", "--nets.width=4", "--objective.clip=0.01"), SPECTRAL, ("--nets.spectral=false",)),
        (
            ("--objective.clip=0.02", "--objective.gp=10", "--nets.spectral=false"),
            PENALISED,
            ("--objective.gp=0", "--objective.clip=0"),
        ),
    ],
    ids=["spectral norm", "spectral norm of another D", "gradient penalty"],
)
def test_clip_with_another_bound_is_rejected_before_writing(tmp_path, settings, message, remedies):
    command = ["train", *TINY_RUN_ARGS, *settings, "--kimg=0.016", f"--run-dir={tmp_path / 'run'}"]
    assert usage_error(*command) == usage_error(*command, "-n") == message
    assert not (tmp_path / "run").exists()
    for remedy in remedies:
        assert run_cli(*command, remedy, "-n").status == 0
    assert run_cli(*command, remedies[0]).status == 0


def test_gp_rejects_a_discriminator_that_mixes_images(tmp_path):
    command = ["train", *TINY_RUN_ARGS, "--objective.gp=10", "--kimg=0.016", f"--run-dir={tmp_path / 'run'}"]
    message = usage_error(*command, "--nets.batch_norm=true")
    assert usage_error(*command, "--nets.batch_norm=true", "-n") == message
    assert message.startswith("paragan: objective.gp=10: penalises each image alone, and D normalises")
    assert "--nets.batch_norm=false" in message
    assert not (tmp_path / "run").exists()
    assert run_cli(*command).status == 0


@pytest.mark.parametrize("form", [spectral_norm, nn.utils.spectral_norm], ids=["parametrization", "hook"])
def test_spectral_norm_in_a_user_discriminator_is_detected(form):
    images = tiny_run.make_dataset()
    world = World.solo()
    run = resolve(tiny_run.make_run("objective.clip=0.01", "nets.spectral=false"), images)
    pair = build_networks(run, make_spec(run.data, images), world.device)
    networks = Networks(pair.g, nn.Sequential(nn.Flatten(), nn.Sequential(form(nn.Linear(64, 1)))), pair.latent)
    with pytest.raises(UsageError, match=r"objective\.clip=0\.01: clips weights that spectral norm rescales"):
        build_session(run, world, images, networks)
    build_session(run, world, images, Networks(form(nn.Linear(8, 64)), pair.d, pair.latent))  # allowed for G


@pytest.mark.parametrize("value", ["-0.01", ".inf", "much"])
def test_clip_must_be_positive(value):
    assert "objective.clip=" in usage_error("train", *TINY_RUN_ARGS, f"--objective.clip={value}", "-n")
