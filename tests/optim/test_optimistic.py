import pytest
import torch

import tiny_run
from paragan.config.resolve import fill_strategy_defaults
from paragan.core.errors import UsageError
from paragan.optim.optimistic import extragradient, optimistic
from paragan.optim.optimizers import SGD, Adam, RMSprop


def start():
    return torch.nn.Parameter(torch.arange(1.0, 7.0))


def gradient(step, w):
    return torch.sin(3 * w.detach() + step)


POLICIES = [Adam(lr=0.1), Adam(lr=0.1, fused=False), SGD(lr=0.1, momentum=0.5), RMSprop(lr=0.1)]


@pytest.mark.parametrize("extrapolation", [1.0, 2.5])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_optimistic_step_extrapolates_by_the_last_update(policy, extrapolation):
    """w <- w - u - extrapolation (u - u_before), where u is the plain optimizer's step for the same gradients."""
    w, plain_w = start(), start()
    wrapped = optimistic(policy.build([w]), extrapolation)
    plain = policy.build([plain_w])
    before = torch.zeros(6)
    for step in range(5):
        origin = w.detach().clone()
        w.grad = plain_w.grad = gradient(step, w)
        plain_origin = plain_w.detach().clone()
        plain.step()
        u = plain_origin - plain_w.detach()
        wrapped.step()
        torch.testing.assert_close(w.detach(), origin - u - extrapolation * (u - before), rtol=1e-5, atol=1e-6)
        before = u


def test_extragradient_steps_from_its_starting_point():
    w = start()
    optimizer = extragradient(SGD(lr=0.1).build([w]))
    for _ in range(3):
        origin = w.detach().clone()
        w.grad = gradient(0, w)
        optimizer.step()
        extrapolated = origin - 0.1 * gradient(0, origin)
        torch.testing.assert_close(w.detach(), extrapolated)
        w.grad = gradient(1, w)
        optimizer.step()
        torch.testing.assert_close(w.detach(), origin - 0.1 * gradient(1, extrapolated))


@pytest.mark.parametrize("wrapper", [optimistic, extragradient])
@pytest.mark.parametrize("policy", [Adam(lr=0.1), SGD(lr=0.1), RMSprop(lr=0.1)])
@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_wrapper_resumes_bit_for_bit(wrapper, policy, saved_after):
    def play(w, optimizer, steps):
        for step in steps:
            w.grad = gradient(step, w)
            optimizer.step()
        return w, optimizer

    uninterrupted, _ = play(*wrapped_optimizer(wrapper, policy, start()), range(6))
    w, optimizer = play(*wrapped_optimizer(wrapper, policy, start()), range(saved_after))
    resumed, fresh = wrapped_optimizer(wrapper, policy, torch.nn.Parameter(w.detach().clone()))
    fresh.load_state_dict(optimizer.state_dict())
    play(resumed, fresh, range(saved_after, 6))
    assert torch.equal(resumed, uninterrupted)


def wrapped_optimizer(wrapper, policy, w):
    return w, wrapper(policy.build([w]))


@pytest.mark.parametrize("wrapper", [optimistic, extragradient, None])
def test_bilinear_game_converges_only_with_a_wrapper(wrapper):
    """min_x max_y x y from (1, 1): plain simultaneous descent spirals away."""
    x, y = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [SGD(lr=0.2).build([w]) for w in (x, y)]
    if wrapper:
        optimizers = [wrapper(optimizer) for optimizer in optimizers]
    for _ in range(1000):
        x.grad, y.grad = y.detach().clone(), -x.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
    distance = float(torch.hypot(x.detach(), y.detach()))
    assert distance < 1e-3 if wrapper else distance > 1e2


@pytest.mark.parametrize(
    "lags", [(0, 0), (3, 0), *(pytest.param(lags, marks=pytest.mark.slow) for lags in ((1, 0), (0, 1), (1, 1)))]
)
@pytest.mark.parametrize("extrapolation", [0.0, 1.0, 2.0, 3.0])
def test_extrapolation_compensates_half_of_both_lags_and_half_a_round(lags, extrapolation):
    """Play the bilinear game with lags: docs/async.md, "Looking ahead"."""
    x, y = (torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    optimizers = [SGD(lr=0.02).build([w]) for w in (x, y)]
    if extrapolation:
        optimizers = [optimistic(optimizer, extrapolation) for optimizer in optimizers]
    were = []
    for step in range(3000):
        were.append((x.detach().clone(), y.detach().clone()))
        x.grad = were[max(step - lags[1], 0)][1].clone()
        y.grad = -were[max(step - lags[0], 0)][0].clone()
        for optimizer in optimizers:
            optimizer.step()
    late = sum(lags) / 2 + 1 / 2 - extrapolation
    radius = float(torch.hypot(x.detach(), y.detach())) / 2**0.5
    if late:
        assert (radius > 1) == (late > 0)
    else:
        assert abs(radius - 1) < 0.1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("strategy=sync",), ("none", None)),
        (("strategy=quantized",), ("optimistic", 1.0)),
        (("strategy=async",), ("optimistic", 2.0)),
        (("strategy=async", "g.extrapolation=1.5"), ("optimistic", 1.5)),
        (("strategy=async", "g.optimizer_wrapper=none"), ("none", None)),
        (
            ("strategy=async", "g.optimizer_wrapper=extragradient", "g.extrapolation=2"),
            ("extragradient", None),
        ),  # of a record
        (("strategy=sync", "g.optimizer_wrapper=optimistic"), ("optimistic", 1.0)),
    ],
)
def test_extrapolation_defaults_to_that_of_the_strategy(settings, expected):
    run = fill_strategy_defaults(tiny_run.make_run(*settings))
    assert (run.g.optimizer_wrapper, run.g.extrapolation) == expected
    assert fill_strategy_defaults(run) == run


def test_extrapolation_without_the_optimistic_wrapper_is_rejected():
    with pytest.raises(UsageError, match=r"g.extrapolation=3\.0: is for optimizer_wrapper=optimistic, not none"):
        fill_strategy_defaults(tiny_run.make_run("strategy=sync", "g.extrapolation=3"))
