"""`device.deterministic`: kernels that compute the same bits in every run."""

from __future__ import annotations

import pytest
import torch

import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.run import may_change_on_resume
from paragan.train.loop import play_round, report_errors
from paragan.train.session import set_process_options


@pytest.fixture
def _deterministic():
    yield set_process_options(tiny_run.make_run("device.deterministic=true").device, World.solo())
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
def test_an_operation_without_a_deterministic_kernel_is_named(monkeypatch):
    s = tiny_run.make_session(tiny_run.make_run("device.deterministic=true"))
    assert torch.are_deterministic_algorithms_enabled()
    play_round(s)
    x = torch.zeros(3)
    s.game.d.net.register_forward_pre_hook(lambda *_: x.put_(torch.tensor([0, 0]), torch.ones(2)) and None)
    with (
        advises(
            "--device.deterministic=true: put_ has no deterministic kernel on this device. Use "
            "--device.deterministic=false"
        ),
        report_errors(s),
    ):
        play_round(s)


def test_other_runs_use_the_kernels_of_torch():
    set_process_options(tiny_run.make_run().device, World.solo())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_resumed_run_may_choose_other_kernels():
    assert may_change_on_resume("device.deterministic")
