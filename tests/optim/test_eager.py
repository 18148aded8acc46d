import copy
import pickle
import subprocess
import sys

import pytest
import torch

from paragan.optim import eager

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"foreach": False, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": False}),
}
TRAIN = """
import sys
from paragan.cli.main import main
status = main(sys.argv[1:])
assert not status, status
assert "torch._dynamo" not in sys.modules
"""


def train(optimizer: torch.optim.Optimizer, net: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.linspace(step, step + 1, 12).view(4, 3)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_torch_does(name):
    kind, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    nets = [net, copy.deepcopy(net)]
    kinds = (kind, getattr(eager, kind.__name__))
    optimizers = [make(net.parameters(), lr=0.1, **options) for make, net in zip(kinds, nets, strict=True)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(optimizer, net, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
        train(optimizer, net, 2)
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())
    assert isinstance(optimizers[1], kind)
    assert repr(optimizers[0]) == repr(optimizers[1])


def test_hooks_are_called_once_a_step():
    calls: list[str] = []
    optimizer = eager.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    eager.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_differentiable_step_keeps_its_graph():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = eager.SGD([p], lr=torch.tensor(0.5), differentiable=True)
    weight = p.clone()
    optimizer.param_groups[0]["params"] = [weight]
    weight.grad = torch.full((1,), 2.0, requires_grad=True)
    optimizer.step()
    assert weight.requires_grad
    weight.sum().backward()
    assert p.grad is not None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_can_be_copied_and_pickled(name):
    kind, options = OPTIMIZERS[name]
    optimizer = getattr(eager, kind.__name__)([torch.nn.Parameter(torch.ones(2))], lr=0.1, **options)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        assert type(other) is type(optimizer)
        assert str(other.state_dict()) == str(optimizer.state_dict())


@pytest.mark.slow
def test_training_does_not_import_the_compiler(tmp_path):
    fast = ("--batch=16", "--nets.width=4", "--evaluation.metrics=[fd]", "--evaluation.count=16")
    command = [sys.executable, "-c", TRAIN, "train", "digits", "--kimg=0.032", *fast, f"--run-dir={tmp_path / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
