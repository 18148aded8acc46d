"""Every strategy, and games with a reconstruction, compute on a GPU what they compute on the CPU, up to rounding."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cuda_syncs
import tiny_run
from benchmarks.lib.session_fixture import make_endless_run, make_session
from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.data.dataset import Dataset
from paragan.train.loop import play_round
from paragan.train.session import set_process_options


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
table = load("table")
GAMES = load("test_reconstruction").GAMES

pytestmark = pytest.mark.gpu
every_strategy = pytest.mark.parametrize("name", table.STRATEGIES)
GPU = torch.device("cuda")
ROUNDS = 4
TOLERANCE = 5e-3  # relative, of parameters: Adam divides a small gradient by its own size
# A number that rounds to the other side of a quantizer's step moves by a whole step.
LOSSY_TOLERANCE = 0.05
WAITS = ("DQGAN sign",)  # the host asks whether the gradient may be quantized


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with backend_of(GPU).full_precision_convs():
        yield


def run_of(name, *more):
    return tiny_run.make_run("nets.batch_norm=true", *table.STRATEGIES[name], *more)


def tolerance_of(run):
    return TOLERANCE if getattr(run.strategy, "wire", "exact") == "exact" else LOSSY_TOLERANCE


def close(actual, expected, tolerance):
    actual, expected = ({key: value.cpu() for key, value in state.items()} for state in (actual, expected))
    assert actual.keys() == expected.keys()
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(actual, expected, prefix) < tolerance, prefix


@every_strategy
def test_one_rank_computes_what_it_computes_on_the_cpu(name):
    run = run_of(name)
    close(tiny_run.play_rounds(run, ROUNDS, World.solo(GPU)), tiny_run.play_rounds(run, ROUNDS), tolerance_of(run))


@pytest.mark.parametrize("name", [name for name in table.STRATEGIES if name not in WAITS])
def test_a_steady_round_does_not_wait_for_the_card(name):
    s = tiny_run.make_session(run_of(name), World.solo(GPU))
    for _ in range(3):
        play_round(s)
    with cuda_syncs.forbidden():
        for _ in range(3):
            play_round(s)


@pytest.mark.parametrize("variant", table.VARIANTS)
def test_variants_compute_what_they_compute_on_the_cpu(variant):
    run = run_of("sync", *table.VARIANTS[variant])
    close(tiny_run.play_rounds(run, 3, World.solo(GPU)), tiny_run.play_rounds(run, 3), TOLERANCE)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    set_process_options(tiny_run.make_run("device.deterministic=true").device, World.solo(GPU))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@every_strategy
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    run = run_of(name)
    whole = tiny_run.play_rounds(run, ROUNDS, World.solo(GPU))
    saved, _ = tiny_run.save_after(run, 2, World.solo(GPU), tmp_path)
    s = tiny_run.make_session(run, World.solo(GPU), saved)
    while s.clock.step < ROUNDS:
        play_round(s)
    resumed = tiny_run.gather_owner_state(s)
    assert {key for key, value in whole.items() if not torch.equal(value, resumed[key])} == set()


@pytest.mark.parametrize("game", GAMES)
def test_reconstructions_compute_what_they_compute_on_the_cpu(game):
    run = tiny_run.make_run(*GAMES[game])
    on_gpu, on_cpu = tiny_run.play_rounds(run, 6, World.solo(GPU)), tiny_run.play_rounds(run, 6)
    if game != "Gaussian":  # torch's generators of the two devices draw different noise
        close(on_gpu, on_cpu, TOLERANCE)
    assert all(value.isfinite().all() for value in on_gpu.values())


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("recipe", ["tokenizer", "super-resolution", "vocoder"])
def test_recipes_that_are_given_data_compute_the_same_bits_again(recipe, tmp_path):
    torch.manual_seed(0)
    data = (
        Dataset((torch.rand(64, 1, 1024) - 0.5).numpy(), None, (), "waves")
        if recipe == "vocoder"
        else Dataset(torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8).numpy(), None, (), "images")
    )
    settings = ("batch=8", "d.start_kimg=0") if recipe != "vocoder" else ("batch=8", "data.segment=1024")
    run = make_endless_run(recipe, data, *settings, "device.kind=cuda")
    states = []
    for _ in range(2):
        s = make_session(run, data, World.solo(GPU))
        for _ in range(3):
            play_round(s)
        states.append(tiny_run.session_state(s))
    assert tiny_run.is_equal(*states)


@pytest.mark.parametrize("game", GAMES)
def test_a_steady_round_of_a_reconstruction_does_not_wait_for_the_card(game):
    s = tiny_run.make_session(tiny_run.make_run(*GAMES[game]), World.solo(GPU))
    for _ in range(6):
        play_round(s)
    with cuda_syncs.forbidden():
        for _ in range(3):
            play_round(s)
