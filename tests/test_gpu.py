"""What a GPU must not change: the same training, the same draws, the same files."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import cuda_syncs
import paragan as pg
import tiny_run
from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.core.rng import LaneRng
from paragan.eval import ClassLabels, evaluate, pixels
from paragan.train.checkpoint import Checkpoints
from paragan.train.loop import play_round

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SETTINGS = {
    "hinge": (),
    "r1": ("objective.r1=1", "objective.loss=nonsaturating"),
    "gp": ("objective.gp=10", "objective.loss=wasserstein", "nets.batch_norm=false"),
    "unconditional": ("data.labels=false",),
    "lane by lane": ("device.lanes_per_pass=1",),
}


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Without TF32, which rounds a convolution's inputs to 10 bits."""
    with backend_of(GPU).full_precision_convs():
        yield


def close(a, b, tolerance=2e-3):
    """Relative distance of the parameters of both players and of the average, wherever they lie."""
    a, b = ({name: value.cpu() for name, value in state.items()} for state in (a, b))
    for prefix in ("G/", "D/", "G/average"):
        assert tiny_run.relative_distance(a, b, prefix) < tolerance, prefix


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_three_rounds_equal_those_on_the_cpu(settings):
    run = tiny_run.make_run("nets.batch_norm=true", *settings)
    close(tiny_run.play_rounds(run, 3, World.solo(GPU)), tiny_run.play_rounds(run, 3))


@pytest.mark.parametrize("settings", [(), ("d_steps=2", "strategy.fake_lags=[1]", "objective.r1=1")])
def test_two_players_on_two_streams_play_as_on_the_cpu(settings):
    """Both players are slow in turn, so that one that does not wait for the other's images or steps is caught."""
    run = tiny_run.make_run("strategy=async", "nets.batch_norm=true", *settings)
    s = tiny_run.make_session(run, World.solo(GPU))
    for player in s.game.players:
        player.net.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
    for _ in range(6):
        play_round(s)
    close(tiny_run.session_state(s), tiny_run.play_rounds(run, 6))


def test_bf16_is_finite_and_close_to_float32():
    run = tiny_run.make_run("device.precision=bf16", "objective.r1=1")
    result, exact = (
        tiny_run.play_rounds(run, 3, World.solo(GPU)),
        tiny_run.play_rounds(tiny_run.make_run("objective.r1=1"), 3),
    )
    assert all(value.isfinite().all() for value in result.values())
    assert all(value.dtype == exact[name].dtype for name, value in result.items())
    close(result, exact, tolerance=0.05)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path):
    run = tiny_run.make_run("nets.batch_norm=true")
    s = tiny_run.make_session(run, World.solo(GPU))
    for _ in range(3):
        play_round(s)
    clock = {"step": s.clock.step, "images": s.clock.images, "seconds": 0.0}
    saved = Checkpoints(tmp_path, s.world).save(s.game.players, clock, {}, s.role)

    then = tiny_run.make_session(run, World.solo(CPU), saved)
    assert tiny_run.is_equal(
        tiny_run.session_state(then), {name: value.cpu() for name, value in tiny_run.session_state(s).items()}
    )
    play_round(then)
    close(tiny_run.session_state(then), tiny_run.play_rounds(run, 4))


@pytest.mark.parametrize("settings", [(), ("objective.r1=1",)], ids=["both", "G alone, for R1 differentiates D twice"])
@pytest.mark.filterwarnings("default")  # of the compiler, about itself
def test_compiled_networks_play_the_same(settings):
    run = tiny_run.make_run(*settings)
    compiled = tiny_run.make_run(*settings, "device.compile=true")
    close(tiny_run.play_rounds(compiled, 3, World.solo(GPU)), tiny_run.play_rounds(run, 3, World.solo(GPU)))


def test_draws_are_the_same_on_both():
    on_cpu, on_gpu = (LaneRng(3, 640, (0, 5), 4, device) for device in (CPU, GPU))
    assert on_gpu.normal("latent/G", 16).device.type == GPU.type
    assert torch.equal(on_cpu.normal("latent/G", 16), on_gpu.normal("latent/G", 16).cpu())
    assert torch.equal(on_cpu.uniform("any", 2, 3), on_gpu.uniform("any", 2, 3).cpu())
    labels = tiny_run.make_dataset().labels
    assert torch.equal(on_cpu.choice("label/D", labels), on_gpu.choice("label/D", labels).cpu())


def test_lanes_bring_the_same_images():
    run = tiny_run.make_run("data.mirror=true")
    for a, b in zip(*(micro_batches(run, device) for device in (CPU, GPU)), strict=True):
        assert torch.equal(a.images, b.images.cpu())
        assert torch.equal(a.labels, b.labels.cpu())


def micro_batches(run, device):
    s = tiny_run.make_session(run, World.solo(device))
    return [s.lanes.next_micro_batches()[0] for _ in range(3)]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_recorded_rounds_equal_those_that_are_played(settings, precision):
    run = tiny_run.make_run("nets.batch_norm=true", *settings, f"device.precision={precision}")
    recorded = tiny_run.make_run(
        "nets.batch_norm=true", *settings, f"device.precision={precision}", "device.capture_passes=true"
    )
    close(tiny_run.play_rounds(recorded, 8, World.solo(GPU)), tiny_run.play_rounds(run, 8, World.solo(GPU)), 1e-3)


def test_scores_are_those_of_the_cpu():
    reals = np.random.default_rng(0).integers(0, 256, (400, 8, 8, 1), np.uint8)
    labels = ClassLabels(("a", "b"), np.arange(400) % 2, lambda rows: np.arange(rows.start, rows.stop) % 2)
    fakes = torch.from_numpy(reals).permute(0, 3, 1, 2).roll(1, 3)
    options = {"space": pixels(8, 1), "metrics": ["fd", "kid", "prdc", "intra_fd"], "count": 300, "labels": labels}

    def scores(device):
        return [s.value for s in evaluate(lambda rows: fakes[rows.start : rows.stop], reals, device=device, **options)]

    assert scores(GPU) == pytest.approx(scores(CPU), rel=1e-6)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_replica_takes_the_steps_of_a_plain_loop(max_norm):
    """In float16 under a GradScaler, one step of which overflows."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(GPU)
    net = copy.deepcopy(plain)
    optimizer, scaler = torch.optim.Adam(plain.parameters(), 1e-2), torch.amp.GradScaler("cuda", 1024.0)
    replica = pg.Replica(net, torch.optim.Adam(net.parameters(), 1e-2), max_norm=max_norm, world=World.solo(GPU))
    its_scaler = torch.amp.GradScaler("cuda", 1024.0)
    for step in range(4):
        x = torch.randn(16, 8, device=GPU) * (float("inf") if step == 2 else 1)
        with torch.autocast("cuda", torch.float16):
            loss = plain(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        with replica.turn(scaler=its_scaler):
            with torch.autocast("cuda", torch.float16):
                loss = net(x).float().square().mean()
            its_scaler.scale(loss).backward()
        its_scaler.update()
    assert its_scaler.get_scale() == scaler.get_scale() == 512
    for p, expected in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [(), SETTINGS["r1"], ("strategy.order=simultaneous",), ("strategy=async",)])
def test_a_steady_round_does_not_wait_for_the_card(settings):
    s = tiny_run.make_session(tiny_run.make_run("nets.batch_norm=true", *settings), World.solo(GPU))
    for _ in range(3):
        play_round(s)
    with cuda_syncs.forbidden():
        for _ in range(3):
            play_round(s)
