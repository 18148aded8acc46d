"""What one worker is measured to do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fake_profiles
import paragan as pg
import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import resolve, spec_of
from paragan.config.run import on_lanes
from paragan.core.clock import Clock
from paragan.core.errors import Unusable
from paragan.core.rng import CPU
from paragan.core.schema import plain, to_yaml
from paragan.plan.measure_exchange import emulated
from paragan.plan.memory import foresee
from paragan.plan.profile import profile_cache, profiler
from paragan.plan.profile.hardware import Resident, described, peak_flops
from paragan.plan.profile.op_breakdown import kind_of, shares, time_by_kind
from paragan.plan.profile.profile import PARTS, read_profile, written_profile
from paragan.plan.profile.profile_cache import network_digest, refuse_other, structure_of
from paragan.plan.profile.profiler import Asked, Bench, local_batches, profile_of
from paragan.plan.profile.table import lines, share_of_peak
from paragan.plan.profile.turn_timing import Kind, Samples, kinds_of, time_rounds
from paragan.plan.round_cost import few, one_round
from paragan.train.build import build_nets
from paragan.train.loop import play_round
from paragan.train.session import seat
from processes import call, refused

TINY = ("digits", "--nets.width=4", "--nets.latent=8", "--batch=16", "--lanes=4", "--seconds=1", "--device.threads=1")
FAST = Asked(seconds=1, noise_kimg=0.1)


def measured(run, asked=FAST):
    images = tiny_run.images()
    run = resolve(run, images)
    return profile_of(run, images, lambda: build_nets(run, spec_of(run, images), CPU), CPU, asked)


@pytest.fixture(scope="module")
def profile():
    return measured(tiny_run.run("d_steps=2", "g_batch=32", "device.threads=1"))[0]


def test_every_part_of_a_profile_is_there(profile):
    assert [turn.batch for turn in profile.d] == [turn.batch for turn in profile.g] == [2, 4, 8, 16]
    for turn in (*profile.g, *profile.d):
        assert len(turn.ready) == PARTS
        assert list(turn.ready) == sorted(turn.ready)
        assert 0 < turn.ready[0] <= turn.ready[-1] <= turn.backward <= turn.whole
    assert sum(profile.kinds.values()) == pytest.approx(1, abs=1e-4)  # as written
    assert profile.kinds["convolution"] > 0.01
    assert (profile.d_steps, profile.ratio) == (2, 2.0)
    assert [one.batch for one in profile.memory] == [2, 4, 8, 16]
    assert set(profile.noise) == {"G", "D"}
    assert all(one.kimg >= 0.1 for one in profile.noise.values())
    assert profile.device.peak_flops > 1e8
    assert [sum(sizes) for sizes in profile.layers] == list(profile.params)
    assert profile.moments == (26, 0)  # of G's batch norms, of 8 and of 4 channels
    assert profile.handling["int8/encode"] > 0
    assert 0 < share_of_peak(profile, 16) < 1


def test_a_profile_reads_as_a_table(profile):
    told = lines(profile)
    assert [line.split()[0] for line in told if line.startswith("  ")] == ["batch", "2", "4", "8", "16"]
    assert any("more images save few steps" in line or "larger batches pay" in line for line in told)


@pytest.mark.parametrize("settings", [(), ("objective.r1=1",), ("objective.gp=10",)])
def test_memory_is_what_is_foreseen_without_playing(settings):
    images = tiny_run.images()
    run = resolve(tiny_run.run("nets.width=16", *settings), images)
    bench = Bench(tiny_run.session(run), images, 1.0)
    (found,) = bench.memory([8], Resident(CPU))

    def two_rounds():
        session = one_round(on_lanes(run, 4), few(images))
        play_round(session)
        return session

    assert found.foreseen == pytest.approx(foresee(two_rounds).peak_bytes, rel=0.05)


def test_batches_that_would_not_fit_are_left_out(monkeypatch):
    run = tiny_run.run("nets.width=16", "batch=128")
    bench = Bench(tiny_run.session(run), tiny_run.images(), 1.0)
    needs = [one.foreseen for one in bench.memory([16, 32, 64, 128], Resident(CPU))]
    little = dataclasses.replace(described(CPU, ""), memory=int(needs[2] / profiler.FULL * 1.02))
    monkeypatch.setattr(profiler, "described", lambda *_: little)
    assert [one.batch for one in bench.memory([16, 32, 64, 128], Resident(CPU))] == [16, 32, 64]


def test_parts_of_a_gradient_are_ready_when_their_layers_have_them():
    """Of a network each of whose layers takes its time."""
    layer_s = 0.5 * 0.002 / 4 / 24  # of an image's forward pass through G
    game = emulated(100_000, 0.002, 0.5, 1 << 20)
    session = seat(tiny_run.run("batch=8"), World.solo(), tiny_run.images(), game, Clock(1))
    samples = Samples(8, [Kind(1, 1.0)])
    time_rounds(session, 0.1, samples)
    ready = samples.medians().g.ready
    asleep = 8 * 2 * layer_s  # backward of a layer; three of them are two parts
    assert all(b - a >= 0.99 * 3 * asleep for a, b in itertools.pairwise(ready[::2]))
    passes = 8 * 24 * layer_s  # forward through G, in both turns
    assert all(passes < turn.made < turn.backward for turn in (samples.medians().g, samples.medians().d))
    assert not any(p._post_accumulate_grad_hooks for p in game.g.flat.parameters)
    assert not game.g.net._forward_hooks


def test_lazy_penalties_count_as_often_as_they_come():
    assert kinds_of(pg.Adversarial(r1=1, r1_every=4)) == [Kind(0, 0.25), Kind(1, 0.75)]
    assert kinds_of(pg.Adversarial()) == [Kind(0, 1.0)]
    both = kinds_of(pg.Adversarial(r1=1, r1_every=2, r2=1, r2_every=3))
    assert [kind.share for kind in both] == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6])


def test_a_turn_is_the_mean_over_kinds_of_steps():
    samples = Samples(4, [Kind(0, 0.25), Kind(1, 0.75)], waits=[0.5, 0.1, 0.3])
    for step, seconds in ((0, (8.0, 1.0, 100.0)), (1, (4.0, 4.0, 4.0))):
        for name in "GD":
            samples.turns[step, name] = [(*[0.0] * PARTS, s / 2, s, s / 8) for s in seconds]
    rounds = samples.medians()
    assert (rounds.d.whole, rounds.g.backward, rounds.wait) == (5.0, 2.5, 0.3)


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
    assert kind_of(names) == kind


def test_shares_of_time():
    a = torch.randn(400, 400)
    seconds = time_by_kind(lambda: a @ a @ a, CPU)
    assert max(seconds, key=seconds.__getitem__) == "products"
    found = shares({"products": 3.0, "copies": 1.0}, 8.0)
    assert found == {"other": 0.5, "products": 0.375, "copies": 0.125}
    assert sum(shares({"products": 3.0, "copies": 1.0}, 2.0).values()) == 1


def test_a_device_that_multiplies():
    assert peak_flops(CPU, "float32", 0.01) > 1e8
    assert described(CPU, "bf16").memory > 1e8


def test_batches_are_whole_lanes():
    run = tiny_run.run("batch=48", "lanes=6")
    assert local_batches(run) == [8, 16, 32, 48]
    assert local_batches(run, [96, 8, 8]) == [8, 96]
    with pytest.raises(Unusable, match=r"--batches 12 is no multiple of a lane's 8 images .* try 8 or 16"):
        local_batches(run, [12])


def digest(*settings):
    return network_digest(resolve(tiny_run.run(*settings), tiny_run.images()))


def test_a_digest_is_of_what_is_computed():
    base = digest()
    for same in ("seed=3", "kimg=7", "strategy.wire=int8", "output.keep=5", "device.threads=2", "data.hold=stream"):
        assert digest(same) == base, same
    assert digest("batch=32", "lanes=16") == base
    for other in ("batch=32", "nets.width=8", "objective.r1=1", "d_steps=2", "g.optimizer=sgd", "device.merge=1"):
        assert digest(other) != base, other


def test_networks_of_ones_own_have_a_structure():
    a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, stride=2)
    assert structure_of(a) == structure_of(nn.Conv2d(3, 4, 3)) != structure_of(b)


def test_a_profile_of_something_else_is_refused(profile, tmp_path):
    here = profile.device
    refuse_other(profile, profile.network, dataclasses.replace(here, peak_flops=1.0, memory=1), "remake")
    for field, value in (
        ("name", "Abacus"),
        ("threads", 64),
        ("torch", "1.0"),
        ("paragan", "9"),
        ("precision", "bf16"),
    ):
        with pytest.raises(
            Unusable, match=f"profile: it is of {field} .*, here {value}: `bench step digits` makes one"
        ):
            refuse_other(profile, profile.network, dataclasses.replace(here, **{field: value}), "bench step digits")
    with pytest.raises(Unusable, match="another network"):
        refuse_other(profile, "0" * 16, here, "remake")


def test_what_was_measured_is_found_again(monkeypatch):
    run = tiny_run.run("nets.width=3")
    first, file = measured(run)
    monkeypatch.setattr(profiler, "measured", lambda *_: pytest.fail("measured again"))
    again, same = measured(dataclasses.replace(run, seed=5))
    assert (same, again.g[0].batch) == (file, first.g[0].batch)
    assert again.round_s(16) == pytest.approx(first.round_s(16), rel=1e-3)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measured(run, dataclasses.replace(FAST, seconds=2))  # which the one before was not
    file.write_text("no profile")
    assert profile_cache.found(file) is None


def test_a_run_per_label_has_many_games():
    with pytest.raises(Unusable, match=r"--data\.only=0"):
        measured(tiny_run.run("strategy=per-label"))


def test_noise_can_be_left_out_and_one_lane_has_it_too():
    assert measured(tiny_run.run("nets.width=3"), Asked(seconds=1, noise_kimg=0))[0].noise == {}
    noise = measured(tiny_run.run("lanes=1", "batch=4"), Asked(batches=(4,), seconds=1, noise_kimg=0.01))[0].noise
    assert noise["D"].low <= noise["D"].batch <= noise["D"].high <= math.inf


# the command


def test_the_command_writes_what_it_kept(tmp_path):
    out = tmp_path / "profile.yaml"
    arguments = ("bench", "step", *TINY, "--batches=4,8", "--noise-kimg=0.05")
    ended = call(*arguments, f"--out={out}")
    assert ended.status == 0, ended
    kept = ended.out.splitlines()[-1].removeprefix("kept in ")
    profile = read_profile(out)
    assert [turn.batch for turn in profile.g] == [4, 8]
    assert read_profile(Path(kept)) == profile
    again = call(*arguments)
    assert again.out == ended.out
    assert ended.err == "one worker is measured: about 1 s\n"
    assert again.err == "one worker was measured before, for 1 s\n"


def test_what_cannot_be_kept_is_not_said_to_be(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ended = call("bench", "step", *TINY, "--batches=4", "--noise-kimg=0")
    assert ended.status == 0, ended
    assert ended.out.splitlines()[-1].startswith(f"not kept, since {tmp_path}/file/paragan/profiles")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--batches=0", "--batches 0: numbers of images, 1 or more"),
        ("--batches=-8", "--batches -8"),
        ("--batches=many", "--batches many"),
        ("--batches=6", "--batches 6 is no multiple of a lane's 4 images"),
        ("--seconds=0", "--seconds=0"),
        ("--seconds=nan", "--seconds=nan"),
        ("--noise-kimg=-1", "--noise-kimg=-1"),
        ("--out=/proc/nope/x", "its folder is not there"),
        ("--nets.widht=3", "did you mean nets.width"),
    ],
)
def test_what_cannot_be_profiled_is_refused(argument, said):
    assert said in refused("bench", "step", *TINY, argument)


def test_a_file_that_is_no_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(Unusable, match="bench step RECIPE --out"):
        read_profile(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("recipe: digits\n")
    with pytest.raises(Unusable, match=r"bad.yaml: network is missing"):
        read_profile(tmp_path / "bad.yaml")


def test_a_file_of_what_no_worker_did_is_refused(tmp_path):
    sound = fake_profiles.profile(noise=64, memory=((16, 10), (64, 20)))
    path = tmp_path / "p.yaml"
    for fields, told in (
        ({"g": ()}, "g must have turns"),
        ({"d": sound.d[::-1]}, "d must have turns, of rising batches"),
        ({"d": (sound.d[0], sound.d[0])}, "d must have turns, of rising batches"),
        ({"g": (dataclasses.replace(sound.g[0], ready=()),)}, "g.ready must be 16 rising numbers"),
        ({"g": (dataclasses.replace(sound.g[0], ready=sound.g[0].ready[::-1]),)}, "g.ready must be 16 rising numbers"),
        ({"g": (fake_profiles.turn(16, 0.0),)}, "g: a turn takes time"),
        ({"memory": sound.memory[:1] * 2}, "memory must be of rising batches"),
    ):
        path.write_text(written_profile(dataclasses.replace(sound, **fields)))
        with pytest.raises(Unusable, match=told):
            read_profile(path)
    for field, value in (("flops", math.nan), ("ratio", 0), ("moments", [-1, 0]), ("handling", {"pass": -1})):
        path.write_text(to_yaml(plain(sound) | {field: value}))
        with pytest.raises(Unusable, match=field):
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
    config = pg.Config(max_steps=4, evaluation=pg.Evaluation(metrics=("fd",), count=64))
    with pg.ScalingManager(config, bs=16, num_workers=4) as manager:
        for step in range(4):
            if profiled and step in (0, 2):
                profile = manager.profile(gan, seconds=1, noise_kimg=0.05)
                assert profile.params == (9 * 64, 65)
                assert len(profile.d) == 3
            manager.train(gan)
        return torch.cat([p.flatten() for net in (gan.generator, gan.discriminator) for p in net.parameters()])


def test_profiling_an_estimator_leaves_its_training_alone():
    assert torch.equal(trained(True), trained(False))


def test_what_an_estimator_asks_is_checked():
    config = pg.Config(evaluation=pg.Evaluation(metrics=("fd",), count=64))
    with pg.ScalingManager(config, bs=16, num_workers=4) as manager, pytest.raises(Unusable, match="batches"):
        manager.profile(pg.Estimator(OwnG(8, 64), OwnD(64, 1)), batches=(-4,))
