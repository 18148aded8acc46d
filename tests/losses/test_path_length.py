"""Path length regularization against the formula, differentiated by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.core.rng import LaneRng
from paragan.core.running_mean import RunningMean
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.path_length import path_length_penalty
from paragan.losses.running_state import attach_state
from paragan.nets import SNGAN, Spec, StyleGAN2


class LinearGenerator(nn.Module):
    """Two layers of styles, images that are linear in them, so that the Jacobian is a matrix."""

    def __init__(self):
        super().__init__()
        self.mapping = nn.Linear(3, 5).double()
        self.matrix = nn.Parameter(torch.randn(2, 5, 8).double())

    def styles(self, z, y=None):
        return self.mapping(z)[:, None].expand(-1, 2, -1)

    def synthesis(self, ws):
        return torch.einsum("nls,lsp->np", ws, self.matrix).view(-1, 2, 2, 2)

    def forward(self, z, y=None):
        return self.synthesis(self.styles(z, y))


def fakes(g, lanes=(0, 1), per_lane=4):
    rng = LaneRng(3, 64, lanes, per_lane)
    z = rng.normal("latent", 3).double()
    return Batch(g(z), None, rng, z, generator=g)


def test_penalty_equals_the_formula():
    torch.manual_seed(0)
    g, mean = LinearGenerator(), RunningMean(0.9)
    mean.mean.fill_(0.7)
    fake = fakes(g)
    value, mean_length = path_length_penalty(fake, mean)
    y = fake.rng.normal("path length", 2, 2, 2)[[0, 1, 4, 5]].double().flatten(1) / 2  # half of each lane, 4 pixels
    lengths = torch.einsum("lsp,np->nls", g.matrix, y).square().sum(2).mean(1).sqrt()  # |J^T y|
    torch.testing.assert_close(value, (lengths - 0.7).square().mean(), check_dtype=False, rtol=1e-6, atol=0)
    torch.testing.assert_close(mean_length, lengths.mean(), check_dtype=False, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(value, g.matrix)
    (expected,) = torch.autograd.grad((lengths - 0.7).square().mean(), g.matrix)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    mean.apply_synchronised()
    torch.testing.assert_close(mean.mean.item(), 0.9 * 0.7 + 0.1 * lengths.mean().item(), rtol=1e-6, atol=0)


def test_two_lanes_are_the_mean_of_each():
    torch.manual_seed(0)
    g = LinearGenerator()
    both, first, second = (path_length_penalty(fakes(g, lanes), RunningMean(0.9))[0] for lanes in ((0, 1), (0,), (1,)))
    torch.testing.assert_close(both, (first + second) / 2)


def test_it_is_added_in_due_steps_times_their_interval():
    torch.manual_seed(0)
    config = StyleGAN2(channel_base=64, channel_max=8, latent=3, style=5, mapping_layers=1)
    objective = Adversarial(path_length=2.0, path_length_every=4)
    g, d = config.generator(Spec(8, 1)), config.discriminator(Spec(8, 1))
    attach_state(objective.make_g_state(g), g)
    rng = LaneRng(0, 0, (0,), 4)
    z = rng.normal("latent", 3)

    def loss(step, objective=objective):
        return objective.generator(d, Batch(g(z), None, rng, z, generator=g), Batch(g(z), None, rng), step)

    plain = loss(0, Adversarial())
    assert [objective.penalties_due(step)[2] for step in range(5)] == [True, False, False, False, True]
    torch.testing.assert_close(loss(1).total, plain.total)
    parts = loss(4).parts
    torch.testing.assert_close(loss(4).total, plain.total + 8 * parts["G/path_length"])
    assert parts["G/mean_path_length"] > 0
    loss(4).total.backward()
    for name, parameter in g.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name  # noqa: PT018


def test_a_generator_without_styles_is_refused():
    with advises(
        "objective.path_length: needs a generator with styles. Use --nets=stylegan2, a G with methods styles(z, y) and "
        "synthesis(ws), or --objective.path_length=0"
    ):
        Adversarial(path_length=2.0).make_g_state(SNGAN(width=8, latent=4).generator(Spec(8, 1)))
    assert Adversarial(path_length=0.0).make_g_state(SNGAN(width=8, latent=4).generator(Spec(8, 1))) is None
    for g in (LinearGenerator(), StyleGAN2(channel_base=64, channel_max=8, latent=3, style=5).generator(Spec(8, 1))):
        assert isinstance(Adversarial(path_length=2.0).make_g_state(g), RunningMean)
    fake = fakes(LinearGenerator())
    with pytest.raises(UsageError, match=r"objective\.path_length: G has no objective state"):
        Adversarial(path_length=2.0).generator(lambda x, y: x.sum((1, 2, 3)), fake, fake, 0)
