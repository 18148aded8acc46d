"""The adaptive weight of VQGAN and the balancer of EnCodec equal their formulas, on any division into passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advice import advises
from paragan.losses.gradient_weights import AdaptiveWeight, Balancer, with_gradient


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 5).double()
        self.last = nn.Linear(5, 6).double()

    def forward(self, x):
        return self.last(self.body(x).tanh())


def losses_of(images):
    return (images - 1).abs().mean(), 3 * images.square().sum(1).sin().mean()


def rows(count=8):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_adaptive_weight_is_that_of_the_mean_loss_over_all_passes(parts):
    g, x = Decoder(), rows()
    adaptive = AdaptiveWeight(g.last.weight)
    for part in x.chunk(parts):
        images = g(part)
        total = adaptive(images, *losses_of(images)).item()
        assert total == pytest.approx(losses_of(images)[0].item())  # weight 0
    adaptive.apply_synchronised()
    norms = [torch.autograd.grad(loss, g.last.weight, retain_graph=True)[0].norm() for loss in losses_of(g(x))]
    assert float(adaptive.weight) == pytest.approx(float(norms[0] / (norms[1] + 1e-4)), rel=1e-12)
    assert not adaptive.gradients.any()


def test_the_total_has_the_gradient_of_the_weighted_sum():
    g, x = Decoder(), rows()
    adaptive = AdaptiveWeight(g.last.weight)
    adaptive.weight.fill_(0.7)
    images = g(x)
    adaptive(images, *losses_of(images), factor=0.5).backward()
    found = [p.grad.clone() for p in g.parameters()]
    g.zero_grad()
    distance, adversarial = losses_of(g(x))
    (distance + 0.35 * adversarial).backward()
    for gradient, p in zip(found, g.parameters()):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-12, atol=1e-14)


def test_a_weight_is_bounded_averaged_and_survives_gradients_that_are_not_finite():
    g, x = Decoder(), rows()
    adaptive = AdaptiveWeight(g.last.weight, max_weight=0.01, decay=0.9)

    def play(factor):
        images = g(x)
        distance, adversarial = losses_of(images)
        adaptive(images, distance, adversarial * factor)
        adaptive.apply_synchronised()
        return float(adaptive.weight)

    assert play(1e-9) == pytest.approx(0.01)
    adaptive.weight.fill_(0.02)
    assert play(1e-9) == pytest.approx(0.9 * 0.02 + 0.1 * 0.01)
    before = float(adaptive.weight)
    assert play(float("nan")) == before
    adaptive.apply_synchronised()  # a step without a pass
    assert float(adaptive.weight) == before


def test_without_gradients_the_weighted_sum_is_returned():
    g, x = Decoder(), rows()
    adaptive = AdaptiveWeight(g.last.weight)
    adaptive.weight.fill_(2.0)
    with torch.no_grad():
        images = g(x)
        distance, adversarial = losses_of(images)
        assert float(adaptive(images, distance, adversarial)) == pytest.approx((distance + 2 * adversarial).item())
    assert not adaptive.gradients.any()


@pytest.mark.parametrize("parts", [1, 4])
def test_balanced_losses_have_gradients_of_the_norms_that_their_weights_say(parts):
    """EnCodec's equation 7, with the norms of the gradients of single images."""
    g, x = Decoder(), rows()
    balancer = Balancer({"l1": 1.0, "adversarial": 3.0}, decay=0.9, total_norm=2.0).double()
    for part in x.chunk(parts):
        images = g(part)
        total = balancer(images, dict(zip(("l1", "adversarial"), losses_of(images))))
        assert not torch.autograd.grad(total, images)[0].any()  # the first step measures
    balancer.apply_synchronised()
    images = g(x)
    gradients = [torch.autograd.grad(loss, images, retain_graph=True)[0] for loss in losses_of(images)]
    norms = [8 * gradient.norm(dim=1).mean() for gradient in gradients]
    expected = 2 * (gradients[0] * 0.25 / norms[0] + gradients[1] * 0.75 / norms[1])
    total = balancer(images, dict(zip(("l1", "adversarial"), losses_of(images))))
    torch.testing.assert_close(torch.autograd.grad(total, images)[0], expected)
    balancer.apply_synchronised()
    images = g(x)
    balancer(images, {"l1": 3 * losses_of(images)[0]})
    balancer.apply_synchronised()
    corrected = balancer.norms / balancer.corrections
    weights = torch.tensor([0.9**2 * 0.1, 0.9 * 0.1, 0.1], dtype=torch.float64)
    found = torch.stack([norms[0], norms[0], 3 * norms[0]])
    assert float(corrected[0]) == pytest.approx(float((weights * found).sum() / weights.sum()))
    assert float(corrected[1]) == pytest.approx(float(norms[1]))


def test_a_loss_without_a_weight_is_refused():
    images = torch.ones(2, 3, requires_grad=True)
    with advises("losses['mel']: has no weight. Use l1, adversarial"):
        Balancer({"l1": 1.0, "adversarial": 1.0})(images, {"mel": images.mean()})
    Balancer({"l1": 1.0, "adversarial": 1.0})(images, {"l1": images.mean()})


def test_a_given_gradient_is_passed_on():
    x = torch.ones(3, requires_grad=True)
    total = with_gradient(torch.tensor(5.0), x, torch.tensor([1.0, 2.0, 3.0]))
    (2 * total).backward()
    assert total.item() == 5
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
