"""Captured passes equal eager ones. Capturing on CUDA needs a GPU (test_gpu)."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.validate import validate
from paragan.core import devices
from paragan.core.errors import RunError, UsageError
from paragan.core.rng import LaneRng
from paragan.game.compiled_pass import compile_pass
from paragan.game.graph_capture import GraphRecorder, StagedRng
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import build_session, rebind_to_world

SETTINGS = {
    "plain": (),
    "batch norm": ("nets.batch_norm=true", "nets.spectral=false", "d_steps=2"),
    "r1 and r2 by finite differences": (
        *("objective.r1=1", "objective.r2=1", "objective.r1_r2_method=finite_difference", "objective.center=0.1"),
        "objective.r2_every=2",
    ),
    "lazy r1": ("objective.r1=1", "objective.r1_every=3"),
    "gp, another batch of G": ("objective.gp=10", "objective.loss=wasserstein", "g_batch=32"),
    "lane by lane": ("device.lanes_per_pass=3",),
    "unconditional": ("data.labels=false",),
}
STATEFUL = {
    "ada, lecam": ("objective.augment=ada", "objective.lecam=0.1"),
    "diffaugment, consistency": ("objective.augment=diffaugment", "objective.cr=1"),
    "nearby": ("objective.bcr=10", "objective.zcr=5", "objective.zcr_g=0.5"),
}


def rerun(action):
    """Stand in for a CUDA graph: run the action again, on the same tensors."""
    return action


def run_operations(action):
    """Stand in for the compiler: run the traced operations of a pass one by one."""
    return compile_pass(action, "eager")


def play_and_log(run, recorder, rounds=8):
    images = tiny_run.make_dataset()
    world = World.solo()
    run = resolve(run, images)
    s = build_session(run, world, images, build_networks(run, make_spec(run.data, images), world.device))
    s = rebind_to_world(run, world, images, dataclasses.replace(s.game, make_recorder=recorder), s.clock)
    for _ in range(rounds):
        play_round(s)
    line = s.stats.tick(s.clock.images, s.clock.step)
    return tiny_run.session_state(s), {name: value for name, value in line.items() if name.startswith("Loss/")}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_captured_rounds_equal_eager_rounds(settings):
    run = tiny_run.make_run(*settings)
    recorders = []

    def recorder():
        recorders.append(GraphRecorder(run.objective.penalties_due, capture=rerun))
        return recorders[-1]

    (a, losses_a), (b, losses_b) = play_and_log(run, lambda: None), play_and_log(run, recorder)
    assert tiny_run.is_equal(a, b)
    assert losses_a == losses_b
    assert any(captured.replay for recorder in recorders for captured in recorder.captured_passes.values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", (STATEFUL | SETTINGS).values(), ids=STATEFUL | SETTINGS)
def test_traced_pass_equals_eager_bit_for_bit(settings):
    run = tiny_run.make_run(*settings)
    (a, losses_a), (b, losses_b) = (
        play_and_log(run, recorder, 5)
        for recorder in (
            lambda: None,
            lambda: GraphRecorder(run.objective.penalties_due, run_operations, warmup_passes=0),
        )
    )
    assert tiny_run.is_equal(a, b)
    assert losses_a == losses_b


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not devices.find_cpp_compiler(), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's compiler, about torch
def test_compiled_run_is_close_to_eager_and_resumes_bit_for_bit(tmp_path):
    plain = tiny_run.make_run("lanes=2", "nets.batch_norm=true", "g.optimizer=sgd", "d.optimizer=sgd")
    run = tiny_run.make_run(
        "device.capture_passes=true", **{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    )
    compiled, eager = tiny_run.play_rounds(run, 3), tiny_run.play_rounds(plain, 3)
    assert not tiny_run.is_equal(compiled, eager)
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-5)
    path, _ = tiny_run.save_after(run, 2, World.solo(), tmp_path)
    resumed = tiny_run.make_session(run, checkpoint_dir=path)
    play_round(resumed)
    assert tiny_run.is_equal(tiny_run.gather_owner_state(resumed), compiled)


def test_tracing_has_no_side_effects():
    passes = []
    for k in range(3):
        values, sums, counts = torch.full((4,), float(k)), torch.zeros(4), torch.zeros(3)
        first = counts[:1]

        def action(values=values, sums=sums, counts=counts, first=first):
            sums.add_(values)
            counts.add_(1.0)
            first.add_(1.0)
            counts[-1].add_(2)
            torch._foreach_add_([counts], 1.0)
            return [values * 2]

        passes.append((compile_pass(action, "eager"), values, sums, counts))
        assert not sums.any()
        assert not counts.any()
    for times in (1, 2):
        for k, (play, values, sums, counts) in enumerate(passes):
            assert torch.equal(play()[0], values * 2)
            assert torch.equal(sums, values * times)
            assert counts.tolist() == [3.0 * times, 2.0 * times, 4.0 * times], k


@pytest.mark.parametrize(
    "rows", [torch.tensor(3), torch.tensor([3, 0, 3, 9]), torch.tensor([[3, 0, 1], [2, 2, 9]])], ids=str
)
@pytest.mark.parametrize("about", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"sizes": 100}], ids=str)
def test_embedding_gradients_equal_torchs(rows, about):
    table = torch.nn.Embedding(about.get("sizes", 10), 5, **{k: v for k, v in about.items() if k != "sizes"})
    weights = torch.randn(*rows.shape, 5)

    def action():
        output = table(rows)
        (output * weights).sum().backward()
        return [output.detach()]

    table.weight.grad = torch.zeros_like(table.weight)
    play = compile_pass(action, "eager")
    (output,) = action()
    slope = table.weight.grad.clone()
    table.weight.grad.zero_()
    assert torch.equal(play()[0], output)
    torch.testing.assert_close(table.weight.grad, slope)


def test_data_dependent_pass_is_rejected():
    x = torch.ones(3)
    line = r"could not be traced .*--device.capture_passes=false"
    with pytest.raises(RunError, match=line):
        compile_pass(lambda: [x * 2 if (x * 1).sum() > 1 else x])
    one = torch.ones(())  # torch would trace its current value as a constant
    for compute in (lambda: x * one.item(), lambda: x * float(one * 1), lambda: x * 2 if one * 1 < 3 else x):
        with pytest.raises(RunError, match=line):
            compile_pass(lambda compute=compute: [compute()])
    with pytest.raises(RunError, match=line):
        compile_pass(lambda: [x * 2 if x.sum() > 1 else x])
    with pytest.raises(RunError, match=line):
        compile_pass(lambda: [x.resize_(4)])


def test_capture_time_is_excluded_from_speed():
    run = tiny_run.make_run()
    images = tiny_run.make_dataset()

    def slow(action):
        time.sleep(0.5)
        return action

    world, run = World.solo(), resolve(run, images)
    s = build_session(run, world, images, build_networks(run, make_spec(run.data, images), world.device))
    game = dataclasses.replace(
        s.game, make_recorder=lambda: GraphRecorder(run.objective.penalties_due, slow, warmup_passes=0)
    )
    s = rebind_to_world(run, world, images, game, s.clock)
    play_round(s)
    line = s.stats.tick(s.clock.images, s.clock.step)
    assert line["Timing/aside_s"] >= 1.0  # of both turns
    assert line["Timing/sec_per_kimg"] * run.batch / 1000 < 0.5


def test_staged_random_numbers_belong_to_their_position():
    staged = StagedRng(0, 0, (0, 1), 4)
    later = LaneRng(0, 64, (0, 1), 4)
    small = dataclasses.replace(staged, per_lane=2)
    first = staged.normal("z", 3), small.normal("z", 3)
    assert torch.equal(first[0], LaneRng(0, 0, (0, 1), 4).normal("z", 3))
    staged.refresh(later)
    assert staged.normal("z", 3) is first[0]
    assert torch.equal(first[0], later.normal("z", 3))
    assert torch.equal(first[1], dataclasses.replace(later, per_lane=2).normal("z", 3))


@pytest.mark.parametrize("settings", [("strategy=gossip",), ("strategy.order=simultaneous",), ("device.compile=true",)])
def test_passes_that_cannot_be_captured_are_rejected(settings, monkeypatch):
    run = tiny_run.make_run("device.capture_passes=true", *settings)
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        with pytest.raises(UsageError, match=r"--device.capture_passes=true: .*Leave it false"):
            validate(run, 1)
        with pytest.raises(UsageError, match="one rank"):
            validate(run, 2)


def test_cpu_capture_needs_a_compiler(monkeypatch):
    run = tiny_run.make_run("device.capture_passes=true", "device.kind=cpu")
    monkeypatch.setenv("CXX", "true")
    validate(run, 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"--device.capture_passes=true: needs a C\+\+ compiler"):
        validate(run, 1)
    with pytest.raises(UsageError, match="on CUDA and on CPUs"):
        validate(tiny_run.make_run("device.capture_passes=true", "device.kind=mps"), 1)
