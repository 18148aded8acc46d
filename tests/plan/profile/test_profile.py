"""What one worker is measured to do."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import fake_profiles
import paragan as pg
import tiny_run
from advice import Case, advises
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import with_lanes
from paragan.config.sections import InputFingerprints
from paragan.core.clock import Clock
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.core.schema import to_dict, to_yaml
from paragan.plan.measure_exchange import make_emulated_game
from paragan.plan.memory import estimate
from paragan.plan.profile import profile_cache, profiler
from paragan.plan.profile.hardware import PeakMemory, describe_device, measure_peak_flops
from paragan.plan.profile.op_breakdown import op_kind, op_shares, time_by_op_kind
from paragan.plan.profile.profile import NUM_READY_PARTS, profile_to_yaml, read_profile
from paragan.plan.profile.profile_cache import check_profile_matches, network_digest, structure_digest
from paragan.plan.profile.profiler import ProfileOptions, WorkerProfiler, local_batches, profile_run
from paragan.plan.profile.table import format_profile, peak_flops_share
from paragan.plan.profile.turn_timing import RoundSamples, StepKind, step_kinds, time_rounds
from paragan.plan.round_cost import blank_dataset, play_one_round
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import rebind_to_world
from processes import run_cli, usage_error

TINY = ("digits", "--nets.width=4", "--nets.latent=8", "--batch=16", "--lanes=4", "--seconds=1", "--device.threads=1")
FAST = ProfileOptions(seconds=1, noise_kimg=0.1)


def measured(run, requested=FAST):
    images = tiny_run.make_dataset()
    run = resolve(run, images)
    return profile_run(run, images, lambda: build_networks(run, make_spec(run.data, images), CPU), CPU, requested)


@pytest.fixture(scope="module")
def profile():
    return measured(tiny_run.make_run("d_steps=2", "g_batch=32", "device.threads=1"))[0]


@pytest.mark.slow
def test_a_profile_is_complete(profile):
    assert [turn.batch for turn in profile.d] == [turn.batch for turn in profile.g] == [2, 4, 8, 16]
    for turn in (*profile.g, *profile.d):
        assert len(turn.grads_ready_s) == NUM_READY_PARTS
        assert list(turn.grads_ready_s) == sorted(turn.grads_ready_s)
        assert 0 < turn.grads_ready_s[0] <= turn.grads_ready_s[-1] <= turn.backward_s <= turn.total_s
    assert sum(profile.op_shares.values()) == pytest.approx(1, abs=1e-4)  # as written
    assert profile.op_shares["convolution"] > 0.01
    assert (profile.d_steps, profile.g_batch_ratio) == (2, 2.0)
    assert [one.batch for one in profile.memory] == [2, 4, 8, 16]
    assert set(profile.noise_scale) == {"G", "D"}
    assert all(one.kimg > 0 for one in profile.noise_scale.values())
    assert profile.device.peak_flops > 1e8
    assert [sum(sizes) for sizes in profile.layer_numels] == list(profile.num_params)
    assert profile.moments_numel == (26, 0)  # of G's batch norms, of 8 and of 4 channels
    assert profile.codec_cost["int8/encode"] > 0
    assert 0 < peak_flops_share(profile, 16) < 1


def test_a_profile_reads_as_a_table(profile):
    reported = format_profile(profile)
    assert [line.split()[0] for line in reported if line.startswith("  ")] == ["batch", "2", "4", "8", "16"]
    assert any("more images save few steps" in line or "larger batches pay" in line for line in reported)


@pytest.mark.parametrize("settings", [(), ("objective.r1=1",), ("objective.gp=10",)])
def test_measured_memory_equals_the_estimate(settings):
    images = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run("nets.width=16", *settings), images)
    bench = WorkerProfiler(tiny_run.make_session(run), images, 1.0)
    (result,) = bench.measure_memory([8], PeakMemory(CPU))

    def two_rounds():
        session = play_one_round(with_lanes(run, 4), blank_dataset(images))
        play_round(session)
        return session

    assert result.estimated_bytes == pytest.approx(estimate(two_rounds).peak_bytes, rel=0.05)


def test_batches_that_would_not_fit_are_left_out(monkeypatch):
    run = tiny_run.make_run("nets.width=16", "batch=128")
    bench = WorkerProfiler(tiny_run.make_session(run), tiny_run.make_dataset(), 1.0)
    needs = [one.estimated_bytes for one in bench.measure_memory([16, 32, 64, 128], PeakMemory(CPU))]
    little = dataclasses.replace(
        describe_device(CPU, ""), memory_bytes=int(needs[2] / profiler.MAX_MEMORY_SHARE * 1.02)
    )
    monkeypatch.setattr(profiler, "describe_device", lambda *_: little)
    assert [one.batch for one in bench.measure_memory([16, 32, 64, 128], PeakMemory(CPU))] == [16, 32, 64]


def test_gradient_buckets_are_ready_in_layer_order():
    """Of a network each of whose layers takes its time."""
    layer_s = 0.5 * 0.002 / 4 / 24  # of an image's forward pass through G
    game = make_emulated_game(100_000, 0.002, 0.5, 1 << 20)
    session = rebind_to_world(tiny_run.make_run("batch=8"), World.solo(), tiny_run.make_dataset(), game, Clock(1))
    samples = RoundSamples(8, [StepKind(1, 1.0)])
    time_rounds(session, 0.1, samples)
    ready = samples.medians().g.grads_ready_s
    asleep = 8 * 2 * layer_s  # backward of a layer; three of them are two parts
    assert all(b - a >= 0.99 * 3 * asleep for a, b in itertools.pairwise(ready[::2]))
    passes = 8 * 24 * layer_s  # forward through G, in both turns
    assert all(passes < turn.g_forward_s < turn.backward_s for turn in (samples.medians().g, samples.medians().d))
    assert not any(p._post_accumulate_grad_hooks for p in game.g.flat.parameters)
    assert not game.g.net._forward_hooks


def test_lazy_penalties_count_by_their_interval():
    assert step_kinds(pg.Adversarial(r1=1, r1_every=4)) == [StepKind(0, 0.25), StepKind(1, 0.75)]
    assert step_kinds(pg.Adversarial()) == [StepKind(0, 1.0)]
    both = step_kinds(pg.Adversarial(r1=1, r1_every=2, r2=1, r2_every=3))
    assert [kind.share for kind in both] == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6])


def test_a_turn_is_the_mean_over_kinds_of_steps():
    samples = RoundSamples(4, [StepKind(0, 0.25), StepKind(1, 0.75)], data_waits_s=[0.5, 0.1, 0.3])
    for step, seconds in ((0, (8.0, 1.0, 100.0)), (1, (4.0, 4.0, 4.0))):
        for name in "GD":
            samples.turn_times[step, name] = [(*[0.0] * NUM_READY_PARTS, s / 2, s, s / 8) for s in seconds]
    rounds = samples.medians()
    assert (rounds.d.total_s, rounds.g.backward_s, rounds.data_wait_s) == (5.0, 2.5, 0.3)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::mkldnn_convolution", "aten::conv2d"], "convolution"),
        (["aten::copy_", "aten::convolution"], "copies"),
        (["aten::as_strided", "aten::convolution_backward"], "convolution"),
        (["aten::native_batch_norm"], "normalisation"),
        (["aten::addmm", "aten::linear"], "products"),
        (["aten::mul"], "elementwise"),
        (["aten::mul_", "Optimizer.step#RMSprop.step"], "optimizer"),
        (["autograd::engine::evaluate_function: MulBackward0"], "other"),
    ],
)
def test_operations_have_kinds(names, kind):
    assert op_kind(names) == kind


def test_shares_of_time():
    a = torch.randn(400, 400)
    seconds = time_by_op_kind(lambda: a @ a @ a, CPU)
    assert max(seconds, key=seconds.__getitem__) == "products"
    result = op_shares({"products": 3.0, "copies": 1.0}, 8.0)
    assert result == {"other": 0.5, "products": 0.375, "copies": 0.125}
    assert sum(op_shares({"products": 3.0, "copies": 1.0}, 2.0).values()) == 1


def test_a_device_that_multiplies():
    assert measure_peak_flops(CPU, "float32", 0.01) > 1e8
    assert describe_device(CPU, "bf16").memory_bytes > 1e8


def test_batches_are_multiples_of_a_lane():
    run = tiny_run.make_run("batch=48", "lanes=6")
    assert local_batches(run) == [8, 16, 32, 48]
    assert local_batches(run, [96, 8, 8]) == [8, 96]
    with pytest.raises(UsageError, match=r"--batches 12: is no multiple of a lane's 8 images .* Use 8 or 16"):
        local_batches(run, [12])


def digest(*settings):
    return network_digest(resolve(tiny_run.make_run(*settings), tiny_run.make_dataset()))


def test_a_digest_is_of_what_is_computed():
    base = digest()
    for same in (
        "seed=3",
        "kimg=7",
        "strategy.wire=int8",
        "output.max_checkpoints=5",
        "device.threads=2",
        "data.cache=stream",
    ):
        assert digest(same) == base, same
    assert digest("batch=32", "lanes=16") == base
    for other in (
        "batch=32",
        "nets.width=8",
        "objective.r1=1",
        "d_steps=2",
        "g.optimizer=sgd",
        "device.lanes_per_pass=1",
    ):
        assert digest(other) != base, other


def test_a_digest_is_of_the_teacher_and_of_user_code(monkeypatch):
    run = resolve(tiny_run.make_run("distill_from=a"), tiny_run.make_dataset())
    taught = dataclasses.replace(run, fingerprints=InputFingerprints(distill_from="1"))
    shifted = dataclasses.replace(taught, distill_from="b")
    other = dataclasses.replace(taught, fingerprints=InputFingerprints(distill_from="2"))
    assert network_digest(taught) == network_digest(shifted) != network_digest(other)
    before = network_digest(taught)
    monkeypatch.setattr(profile_cache, "user_code_digest", lambda *_: "changed")
    assert network_digest(taught) != before


@pytest.mark.slow
def test_a_profile_of_other_data_is_measured_again(monkeypatch):
    run = tiny_run.make_run("nets.width=3")
    _, file = measured(run)
    other = dataclasses.replace(tiny_run.make_dataset(), fingerprint="other")
    monkeypatch.setattr(tiny_run, "make_dataset", lambda: other)
    assert measured(run)[1] != file


def test_user_networks_have_a_structure_digest():
    a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, stride=2)
    assert structure_digest(a) == structure_digest(nn.Conv2d(3, 4, 3)) != structure_digest(b)


def test_a_profile_of_something_else_is_refused(profile, tmp_path):
    local = profile.device
    check_profile_matches(
        profile, profile.network_digest, dataclasses.replace(local, peak_flops=1.0, memory_bytes=1), "remake"
    )
    for field, value in (
        ("name", "Abacus"),
        ("threads", 64),
        ("torch_version", "1.0"),
        ("paragan_version", "9"),
        ("precision", "bf16"),
    ):
        with advises(f"profile: it is of {field} {getattr(local, field)}, not {value}. Use `bench step digits`"):
            check_profile_matches(
                profile, profile.network_digest, dataclasses.replace(local, **{field: value}), "bench step digits"
            )
    with pytest.raises(UsageError, match="other networks"):
        check_profile_matches(profile, "0" * 16, local, "remake")


def test_profiles_are_cached(monkeypatch):
    run = tiny_run.make_run("nets.width=3")
    first, file = measured(run)
    monkeypatch.setattr(profiler, "measure_profile", lambda *_: pytest.fail("measured again"))
    repeated, same = measured(dataclasses.replace(run, seed=5))
    assert (same, repeated.g[0].batch) == (file, first.g[0].batch)
    assert repeated.round_s(16) == pytest.approx(first.round_s(16), rel=1e-3)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measured(run, dataclasses.replace(FAST, seconds=2))  # which the one before was not
    file.write_text("no profile")
    assert profile_cache.read_cached_profile(file) is None


def test_a_run_per_label_has_many_games():
    with pytest.raises(UsageError, match=r"--data\.only=0"):
        measured(tiny_run.make_run("strategy=per-label"))


@pytest.mark.slow
def test_noise_can_be_left_out_and_one_lane_has_it_too():
    assert measured(tiny_run.make_run("nets.width=3"), ProfileOptions(seconds=1, noise_kimg=0))[0].noise_scale == {}
    noise = measured(tiny_run.make_run("lanes=1", "batch=4"), ProfileOptions(batches=(4,), seconds=1, noise_kimg=0.01))[
        0
    ].noise_scale
    assert noise["D"].low <= noise["D"].images <= noise["D"].high <= math.inf


# the command


@pytest.mark.slow
def test_the_command_writes_its_profile(tmp_path, monkeypatch, check_advice):
    out = tmp_path / "profile.yaml"
    arguments = ("bench", "step", *TINY, "--batches=4,8", "--noise-kimg=0.05")
    with monkeypatch.context() as launcher:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
            launcher.setenv(name, value)
        check_advice(Case(shlex.join(arguments), "bench step: measures one worker. Start it without a launcher", ()))
    ended = run_cli(*arguments, f"--out={out}")
    assert ended.status == 0, ended
    stored = ended.out.splitlines()[-1].removeprefix("cached in ")
    profile = read_profile(out)
    assert [turn.batch for turn in profile.g] == [4, 8]
    assert read_profile(Path(stored)) == profile
    repeated = run_cli(*arguments)
    assert repeated.out == ended.out
    assert ended.err == "profiling one worker: about 1 s\n"
    assert repeated.err == "using the profile of one worker that an earlier measurement of 1 s wrote\n"


def test_an_unwritable_cache_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ended = run_cli("bench", "step", *TINY, "--batches=4", "--noise-kimg=0")
    assert ended.status == 0, ended
    assert ended.out.splitlines()[-1].startswith(f"not cached: {tmp_path}/file/paragan/profiles")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--batches=0", "--batches 0: they must be numbers of images, 1 or more"),
        ("--batches=-8", "--batches -8"),
        ("--batches=many", "--batches many"),
        ("--batches=6", "--batches 6: is no multiple of a lane's 4 images"),
        ("--seconds=0", "--seconds=0"),
        ("--seconds=nan", "--seconds=nan"),
        ("--noise-kimg=-1", "--noise-kimg=-1"),
        ("--out=/proc/nope/x", "the folder does not exist"),
        ("--nets.widht=3", "did you mean nets.width"),
    ],
)
def test_invalid_profiles_are_refused(argument, expected):
    assert expected in usage_error("bench", "step", *TINY, argument)


def test_a_file_that_is_no_profile_names_the_command(tmp_path):
    with pytest.raises(UsageError, match="bench step RECIPE --out"):
        read_profile(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("recipe: digits\n")
    with pytest.raises(UsageError, match=r"bad.yaml: network_digest is missing"):
        read_profile(tmp_path / "bad.yaml")


def test_an_impossible_profile_is_refused(tmp_path):
    sound = fake_profiles.make_profile(noise=64, memory=((16, 10), (64, 20)))
    path = tmp_path / "p.yaml"
    for fields, reported in (
        ({"g": ()}, "g must be turns"),
        ({"d": sound.d[::-1]}, "d must be turns with increasing batches"),
        ({"d": (sound.d[0], sound.d[0])}, "d must be turns with increasing batches"),
        ({"g": (dataclasses.replace(sound.g[0], grads_ready_s=()),)}, "g.grads_ready_s must be 16 increasing numbers"),
        (
            {"g": (dataclasses.replace(sound.g[0], grads_ready_s=sound.g[0].grads_ready_s[::-1]),)},
            "g.grads_ready_s must be 16 increasing numbers",
        ),
        ({"g": (fake_profiles.make_turn_profile(16, 0.0),)}, "g.backward_s must be above 0"),
        ({"memory": sound.memory[:1] * 2}, "memory must have increasing batches"),
        ({"layer_numels": ((5,), (7,))}, "layer_numels of g must add up to its num_params, [0-9]+, not to 5"),
        (
            {"d": (dataclasses.replace(sound.d[0], grads_ready_s=(9e5,) * NUM_READY_PARTS),)},
            "d.grads_ready_s must be at most backward_s",
        ),
    ):
        path.write_text(profile_to_yaml(dataclasses.replace(sound, **fields)))
        with pytest.raises(UsageError, match=reported):
            read_profile(path)
    for field, value in (
        ("flops_per_image", math.nan),
        ("g_batch_ratio", 0),
        ("data_wait_s", 1e308),
        ("moments_numel", [-1, 0]),
        ("codec_cost", {"pass": -1}),
    ):
        path.write_text(to_yaml(to_dict(sound) | {field: value}))
        with pytest.raises(UsageError, match=field):
            read_profile(path)


# from Python


class Flat(nn.Module):
    def __init__(self, size_in, size_out):
        super().__init__()
        self.layer = nn.Linear(size_in, size_out)


class OwnG(Flat):
    latent = 8

    def forward(self, z, y):
        return self.layer(z).tanh().view(-1, 1, 8, 8)


class OwnD(Flat):
    def forward(self, x, y):
        return self.layer(x.flatten(1))


def trained(profiled):
    torch.manual_seed(0)
    gan = pg.Estimator(OwnG(8, 64), OwnD(64, 1))
    config = pg.Config(max_steps=4, evaluation=pg.EvaluationOptions(metrics=("fd",), count=64))
    with pg.ScalingManager(config, bs=16, num_workers=4) as manager:
        for step in range(4):
            if profiled and step in (0, 2):
                profile = manager.profile(gan, seconds=1, noise_kimg=0.05)
                assert profile.num_params == (9 * 64, 65)
                assert len(profile.d) == 3
            manager.train(gan)
        return torch.cat([p.flatten() for net in (gan.generator, gan.discriminator) for p in net.parameters()])


@pytest.mark.slow
def test_profiling_an_estimator_does_not_change_its_training():
    assert torch.equal(trained(True), trained(False))


def test_profile_options_of_an_estimator_are_checked():
    config = pg.Config(evaluation=pg.EvaluationOptions(metrics=("fd",), count=64))
    with pg.ScalingManager(config, bs=16, num_workers=4) as manager, pytest.raises(UsageError, match="batches"):
        manager.profile(pg.Estimator(OwnG(8, 64), OwnD(64, 1)), batches=(-4,))
