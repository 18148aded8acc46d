"""Optimizers of the pytorch-optimizer library, by name, and Lookahead around any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advice import advises
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import from_dict, from_yaml, to_dict, to_yaml
from paragan.optim import compatibility, state_io, third_party
from paragan.optim.lookahead import lookahead
from paragan.optim.optimistic import extragradient, optimistic
from paragan.optim.optimizers import BUILTIN_NAMES, SGD, Adam, build_optimizer, with_lr


def make_optimizer(**settings):
    return from_dict(Run, {"g": {"optimizer": settings}}).g.optimizer


@pytest.mark.parametrize("name", ["adabelief", "lamb", "lars", "radam", "lookahead", "ranger", "prodigy", "yogi"])
def test_optimizer_by_name_survives_yaml(name):
    run = from_dict(Run, {"g": {"optimizer": name}})
    reloaded = from_dict(Run, from_yaml(to_yaml(run), "run.yaml"))
    assert reloaded == run
    assert to_dict(reloaded)["g"]["optimizer"]["name"] == name
    assert run.d.optimizer == Adam()


def test_arguments_are_fields():
    config = make_optimizer(name="adabelief", lr=2e-4, betas=[0.5, 0.999], eps=1e-12, rectify=True)
    built = config.build([nn.Parameter(torch.zeros(3))])
    assert type(built).__name__ == "AdaBelief"
    group = built.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["rectify"]) == (2e-4, (0.5, 0.999), 1e-12, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "adabeleif"}, "g.optimizer: there is no adabeleif; did you mean adabelief?"),
        ({"name": "adabelief", "betta": 1}, "g.optimizer: adabelief: there is no field betta; did you mean betas?"),
        ({"name": "adabelief", "lr": 0}, "g.optimizer: adabelief: lr=0: input should be greater than 0"),
        ({"name": "adabelief", "betas": [2, 0.9]}, "g.optimizer: adabelief: beta1 must be in the range"),
        (
            {"name": "adabelief", "eps": float("nan")},
            "adabelief: eps=nan: input should be a finite number",
        ),
        ({"name": "lbfgs"}, "g.optimizer: lbfgs: it cannot train a game .*closure"),
        ({"name": "aggmo"}, "a checkpoint cannot hold it .0/momentum_buffer is a dict."),
        ({"name": "gravity"}, "it does not continue exactly from a checkpoint"),
        ({"name": "schedulefreeadamw"}, "it stores the weights to use apart"),
        ({"name": "ftrl"}, "it computes weights from its own sums"),
        ({"name": "flashadamw"}, "it stores its state in 8 bits"),
        ({"name": "lookahead", "inner": "lookahead"}, "g.optimizer.inner: there is no lookahead"),
        ({"name": "lookahead", "k": 0}, "g.optimizer.k=0"),
    ],
)
def test_unusable_optimizers_raise_with_the_reason(settings, words):
    with pytest.raises(UsageError, match=words):
        make_optimizer(**settings)


def test_advice_on_optimizers_works():
    for name in ("a2grad", "aggmo", "lbfgs"):
        with advises("Use adabelief, radam, lion or lamb"):
            make_optimizer(name=name)
    for name in ("adabelief", "radam", "lion", "lamb"):
        make_optimizer(name=name)
    with advises("state: it stores its momentum in the gradients, which are zeroed before every step. Use scion"):
        make_optimizer(name="scionlight")
    make_optimizer(name="scion")
    with advises("with these fields weights diverge in a few steps. Use a smaller lr"):
        make_optimizer(name="adabelief", lr=1e36)
    make_optimizer(name="adabelief", lr=1e-4)


def test_most_of_the_library_can_train_a_game():
    """Detect a new version of the library that breaks many optimizers."""
    some = third_party.third_party_names()[::4]
    usable = []
    for name in some:
        try:
            compatibility.check_optimizer(from_dict(third_party.third_party_config(name), {"name": name}))
            usable.append(name)
        except UsageError:
            pass
    assert len(usable) > 0.5 * len(some), usable


@pytest.mark.parametrize("name", sorted(third_party.ELEMENTWISE))
def test_elementwise_optimizers_can_step_a_flat_vector(name):
    draw = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in compatibility.SHAPES]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    record = from_dict(third_party.third_party_config(name), {"name": name, "weight_decay": 0.01})
    optimizers = record.build(parameters), record.build([flat])
    for _ in range(20):
        gradient = torch.randn(len(flat), generator=draw)
        flat.grad = gradient.clone()
        for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.grad = part.view(p.shape).clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in parameters]), flat.detach(), rtol=1e-6, atol=1e-7
    )


def test_lookahead_interpolates_every_k_steps():
    w = nn.Parameter(torch.zeros(1))
    optimizer = lookahead(SGD(lr=1.0, fused=False).build([w]), k=3, alpha=0.5)
    values = []
    for _ in range(7):
        w.grad = -torch.ones(1)
        optimizer.step()
        values.append(w.item())
    assert values == [1, 2, 1.5, 2.5, 3.5, 3.0, 4.0]


def positions(wrap, k, steps, alpha=0.5):
    """Return the weights from 0, with lr 1 and gradient -1, with Lookahead around a wrapper."""
    w = nn.Parameter(torch.zeros(1))
    record = make_optimizer(name="lookahead", inner={"name": "sgd", "lr": 1.0, "fused": False}, k=k, alpha=alpha)
    optimizer = build_optimizer(record, [w], wrap)
    values = []
    for _ in range(steps):
        w.grad = -torch.ones(1)
        optimizer.step()
        values.append(w.item())
    return values


def test_lookahead_wraps_the_optimizer_wrapper():
    """Lookahead counts complete iterations, and interpolates from the extrapolated point."""
    assert positions(extragradient, 2, 8) == [1, 1, 2, 1, 2, 2, 3, 2]
    assert positions(optimistic, 3, 6) == [2, 3, 2, 3, 4, 3.5]


def test_learning_rate_is_set_on_the_inner_optimizer():
    assert with_lr(make_optimizer(name="lookahead", inner="adabelief"), 0.5).inner.lr == 0.5
    assert with_lr(make_optimizer(name="lamb"), 0.5).lr == 0.5


def test_loading_a_state_replaces_the_former_one():
    """A rank that rejoins loads another's state, also if that is the initial one."""
    record = make_optimizer(name="prodigy")
    fresh, stepped = (record.build([nn.Parameter(torch.ones(3))]) for _ in "ab")
    for _ in range(5):
        stepped.param_groups[0]["params"][0].grad = torch.ones(3)
        stepped.step()
    assert stepped.param_groups[0]["d"] != fresh.param_groups[0]["d"]
    state_io.from_tensors(stepped, state_io.to_tensors(fresh))
    assert stepped.state_dict() == fresh.state_dict()


@pytest.mark.parametrize("inner", ["adam", "sgd", "rmsprop", "adabelief", "lamb"])
def test_lookahead_continues_exactly_from_a_checkpoint(inner):
    compatibility.check_optimizer(make_optimizer(name="lookahead", inner=inner))


def test_numbers_and_changed_groups_are_saved():
    record = make_optimizer(name="adabelief")
    w = nn.Parameter(torch.ones(2))
    optimizer = record.build([w])
    w.grad = torch.ones(2)
    optimizer.step()
    state = state_io.to_tensors(optimizer)
    assert state["group0/step="].item() == 1
    assert not any(name.startswith("group0/") and "step" not in name for name in state)


def test_builtin_names_come_first():
    assert {make_optimizer(name=name).__class__.__module__ for name in BUILTIN_NAMES} == {"paragan.optim.optimizers"}
