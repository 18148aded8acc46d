"""A batch that grows: a function of the images seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tiny_run
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.core.schema import from_yaml
from paragan.train.build import lr_schedule
from paragan.train.loop import play_round
from processes import final_tensors, run_cli, train_args, usage_error

RAMP = "ramp=0.05:32,0.12:64"  # of 16 images at first: from 64 images on 32, from 128 on 64
OF_A_RUN = ("--ramp=0.05:32,0.12:64", "--kimg=0.4")


def played(run, rounds, start=None):
    session = tiny_run.make_session(run, checkpoint_dir=start)
    progress = list[tuple[int, int]]()
    for _ in range(rounds):
        before = session.clock.images
        play_round(session)
        progress.append((before, session.clock.images - before))
        assert session.clock.last_round_images == session.clock.images - before
    return session, progress


def test_stages_begin_at_round_boundaries():
    run = tiny_run.make_run(RAMP, "d_steps=2", "kimg=1")
    assert run.stages == [(0, 16), (64, 32), (128, 64)]
    assert [run.current_round_images(at) for at in (0, 63, 64, 127, 128, 10**6)] == [32, 32, 64, 64, 128, 128]


@pytest.mark.parametrize(("kimg", "images", "rounds"), [(0.05, 64, 4), (0.06, 64, 4), (0.1, 128, 6), (0.2, 256, 8)])
def test_a_run_ends_at_a_round_boundary(kimg, images, rounds):
    run = tiny_run.make_run(RAMP, f"kimg={kimg}")
    assert (run.total_images, run.total_rounds) == (images, rounds)
    session, _ = played(run, rounds)
    assert session.clock.images == images
    assert session.clock.is_done


def test_without_a_ramp_the_batch_is_constant():
    run = tiny_run.make_run("kimg=0.1")
    assert (run.total_images, run.total_rounds, run.current_round_images(50)) == (112, 7, 16)


def test_lanes_grow_and_no_image_is_left_out():
    session, progress = played(tiny_run.make_run(RAMP, "data.mirror=true"), 9)
    assert [round_images for _, round_images in progress] == [16] * 4 + [32] * 2 + [64] * 3
    lanes = session.lanes
    (micro_batch,) = lanes.micro_batches
    assert len(micro_batch.images) == 64
    assert micro_batch.rng.per_lane == 8
    indices = [int(i) for at, _ in progress for lane in range(8) for i in lanes.lane_indices(at, lane)]
    assert sorted(indices[:300]) == list(range(300))  # an epoch of 300 images


def test_rates_follow_the_batch_by_their_rule():
    run = tiny_run.make_run(RAMP, "g.lr_scaling=linear", "d.lr_scaling=none", "g.warm_up_kimg=0.032")
    g, d = lr_schedule(run, run.g), lr_schedule(run, run.d)
    assert [g(at) for at in (16, 32, 64, 96, 128, 192)] == [0.5, 1, 1, 2, 2, 4]
    assert [d(at) for at in (16, 64, 96, 192)] == [1, 1, 1, 1]
    assert lr_schedule(run, dataclasses.replace(run.d, lr_scaling="sqrt"))(192) == 2
    session, _ = played(run, 7)
    assert session.game.g.learning_rate == pytest.approx(4 * run.g.optimizer.lr)


def test_a_stage_is_what_a_run_of_its_batch_is():
    """From the same state, at the same position."""
    ramp, _ = played(tiny_run.make_run(RAMP, "g.lr_scaling=none", "d.lr_scaling=none"), 4)
    plain, _ = played(tiny_run.make_run("g.lr_scaling=none", "d.lr_scaling=none"), 4)
    assert tiny_run.is_equal(tiny_run.session_state(ramp), tiny_run.session_state(plain))
    play_round(ramp)
    larger, _ = played(tiny_run.make_run("batch=32"), 0)
    for mine, reference in zip(larger.game.players, plain.game.players):
        mine.net.load_state_dict(reference.net.state_dict())
        mine.optimizer.load_state_dict(reference.optimizer.state_dict())
    larger.game.g.ema.params.copy_(plain.game.g.ema.params)
    larger.clock.images, larger.clock.step, larger.lanes._next_position = 64, 4, 64
    play_round(larger)
    assert tiny_run.is_equal(tiny_run.session_state(ramp), tiny_run.session_state(larger))


def test_ranks_agree_with_one(pool):
    run = tiny_run.make_run(RAMP, "nets.batch_norm=true")
    one = tiny_run.play_rounds(run, 8)

    def job(world):
        return tiny_run.play_rounds(run, 8, world)

    for several in pool(3, job):
        for name, value in one.items():
            torch.testing.assert_close(several[name], value, rtol=2e-4, atol=2e-6, msg=name)


def test_a_run_goes_on_exactly_from_within_a_stage(tmp_path):
    run = tiny_run.make_run(RAMP)
    reference, _ = played(run, 8)
    saved, _ = tiny_run.save_after(run, 5, tiny_run.World.solo(), tmp_path)
    resumed, progress = played(run, 3, start=saved)
    assert [round_images for _, round_images in progress] == [32, 64, 64]
    assert tiny_run.is_equal(tiny_run.gather_owner_state(resumed), tiny_run.gather_owner_state(reference))


def test_streamed_images_are_the_same(tmp_path):
    held, streamed = tmp_path / "held", tmp_path / "streamed"
    for folder, hold in ((held, "memory"), (streamed, "stream")):
        ended = run_cli(*train_args(folder, *OF_A_RUN, f"--data.cache={hold}"))
        assert ended.status == 0, ended
    a, b = final_tensors(held), final_tensors(streamed)
    weights = [name for name in a if "model.safetensors" in name]
    assert weights
    assert all(a[name] == b[name] for name in weights)


def test_a_command_that_stopped_ends_where_it_would_have(tmp_path):
    assert run_cli(*train_args(tmp_path / "whole", *OF_A_RUN)).status == 0
    assert run_cli(*train_args(tmp_path / "parts", OF_A_RUN[0], "--kimg=0.1")).status == 0
    assert run_cli(*train_args(tmp_path / "parts", *OF_A_RUN)).status == 0
    assert (
        final_tensors(tmp_path / "parts")["model/model.safetensors"]
        == final_tensors(tmp_path / "whole")["model/model.safetensors"]
    )
    record = from_yaml((tmp_path / "parts/run.yaml").read_text(), "")
    assert record["ramp"] == [[0.05, 32], [0.12, 64]]
    repeated = run_cli("train", tmp_path / "parts/run.yaml", f"--run-dir={tmp_path}/again")
    assert repeated.status == 0, repeated
    assert "holds another run: ramp was" in usage_error(*train_args(tmp_path / "parts", "--ramp=0.05:64"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ramp=100:31",), "31 does not divide into --lanes 2"),
        (("--ramp=100:32,50:64",), "times must increase"),
        (("--ramp=100",), "a ramp is KIMG:BATCH"),
        (("--ramp=a:b",), "ramp.0.0=a"),
        (("--ramp=5:-8",), "ramp.0.1=-8"),
        (("--ramp=100:32", "--strategy=async"), "--strategy async needs rounds of one size"),
        (("--ramp=100:32", "--strategy=gossip"), "--strategy gossip"),
        (("--ramp=100:32", "--strategy=per-label"), "--strategy per-label"),
        (("--ramp=100:32", "--objective.augment=ada", "--objective.loss=hinge"), "objective.augment=ada"),
        (("--ramp=100:24", "--g_batch=18"), "--g_batch 18 does not grow with 24"),
    ],
)
def test_runs_that_cannot_grow_raise(tmp_path, arguments, message):
    assert message in usage_error(*train_args(tmp_path / "run", "--kimg=0.1", *arguments))


def test_the_cost_of_a_ramp_is_that_of_its_largest_batch():
    small = run_cli(*train_args("x", "--kimg=0.448", "-n")).out
    ramp = run_cli(*train_args("x", *OF_A_RUN, "-n")).out
    assert "28 rounds" in small
    assert "11 rounds" in ramp

    def total(out):
        return next(line for line in out.splitlines() if "TFLOP in all" in line).split(", ")[1].split(";")[0]

    assert total(small) == total(ramp)


def test_a_stage_beyond_the_end_is_reported_and_ignored(tmp_path):
    output = run_cli(
        "train", "digits", "--batch=16", "--lanes=2", "--nets.width=4", "--ramp=0.1:1024", "--kimg=0.05", "-n"
    )
    without_ramp = run_cli("train", "digits", "--batch=16", "--lanes=2", "--nets.width=4", "--kimg=0.05", "-n")
    assert output.status == 0, output.err
    assert "# --ramp 0.112:1024 begins after the end, --kimg 0.05\n" in output.out
    assert output.out.splitlines()[-3:] == without_ramp.out.splitlines()[-3:]
    ended = run_cli(*train_args(tmp_path / "run", "--ramp=0.1:32,0.4:64", "--kimg=0.2"))
    assert "--ramp 0.4:64 begins after the end, --kimg 0.2" in ended.out


def test_a_ramp_on_a_graph_raises_by_name():
    with pytest.raises(UsageError, match=r"device\.capture_passes"):
        validate(tiny_run.make_run(RAMP, "device.capture_passes=true"))
