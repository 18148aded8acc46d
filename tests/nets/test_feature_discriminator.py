"""A D that sees maps of a frozen network: what it computes, what trains, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny_run
from advice import advises
from paragan.core.types import DiscriminatorOutput
from paragan.nets import DCGAN, Spec
from paragan.nets.feature_discriminator import FeatureDiscriminator, FeatureOptions

SPEC = Spec(8, 1, classes=10)


class Pyramid(nn.Module):
    """A network with two stages and a vector."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.stage1 = nn.Conv2d(1, 4, 3, padding=1)
            self.stage2 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.top = nn.Linear(6, 5)

    def forward(self, x):
        a = self.stage1(x)
        b = self.norm(self.stage2(F.relu(a)))
        return [a, b, self.top(b.mean((2, 3)))]


class DrawingPyramid(Pyramid):
    """Draws random numbers when it is made, which happens once in a process."""

    def __init__(self):
        super().__init__()
        torch.randn(3)


NETWORK = f"{__name__}:Pyramid"
GAME = (f"d_features.network={NETWORK}", "d_features.width=8")


def build(**options):
    torch.manual_seed(0)
    base = DCGAN(width=4, latent=8).discriminator(SPEC)
    return base, FeatureDiscriminator(base, FeatureOptions(network=NETWORK, width=8, **options), SPEC).eval()


def test_heads_start_alike_whether_or_not_the_frozen_network_was_made_before():
    options = FeatureOptions(network=f"{__name__}:DrawingPyramid", width=8)
    states: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(FeatureDiscriminator(DCGAN(width=4, latent=8).discriminator(SPEC), options, SPEC).state_dict())
    first, second = states
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("alone", [False, True])
def test_logits_of_every_map_stand_beside_those_of_the_image(alone):
    base, d = build(skip_images=alone)
    x, y = torch.randn(3, 1, 8, 8), torch.tensor([1, 5, 9])
    out = d(x, y)
    assert isinstance(out, DiscriminatorOutput)
    assert out.patches == ((64, 16, 1) if alone else (1, 64, 16, 1))
    maps = Pyramid().eval()(x)
    maps[2] = maps[2][:, :, None, None]
    expected = [] if alone else [base(x, y)[:, None]]
    for head, m in zip(d.heads, maps, strict=True):
        h = F.leaky_relu(head.first(m), 0.2)
        h = F.leaky_relu(head.second(h), 0.2)
        by_class = torch.einsum("nc,nchw->nhw", head.embedding(y), h)
        expected.append((head.logits(h)[:, 0] + by_class).flatten(1))
    torch.testing.assert_close(out.logits, torch.cat(expected, 1))


def test_taps_name_modules():
    _, d = build(taps=("stage2", "stage1"), skip_images=True)
    assert [head.first.in_channels for head in d.heads] == [6, 4]
    with advises("d_features.network: the network has no module stage3. Use names of stage1, stage2, norm, top"):
        build(taps=("stage1", "stage3"))
    build(taps=("stage1", "stage2"))


def test_the_network_is_frozen_and_in_no_state():
    _, d = build()
    assert not [name for name in d.state_dict() if "stage" in name]
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    d(x, torch.tensor([0, 1])).logits.sum().backward()
    assert x.grad.abs().sum() > 0
    assert sys.modules[__name__]


@pytest.mark.parametrize("more", [(), ("d_features.skip_images=true",), ("objective.r1=1",)])
def test_n_ranks_equal_one(pool, more):
    run = tiny_run.make_run(*GAME, *more)
    one = tiny_run.play_rounds(run, 5)
    other = pool(3, lambda world: tiny_run.play_rounds(run, 5, world))[0]
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4


def test_three_and_two_rounds_equal_five(pool, tmp_path):
    run = tiny_run.make_run(*GAME)
    assert all(pool(2, lambda world: tiny_run.resumes_bit_for_bit(run, world, tmp_path, 3, 2)))


def test_the_example_reads_weights_of_a_resnet20(tmp_path, monkeypatch):
    path = Path(__file__).parents[2] / "examples" / "frozen_features.py"
    spec = importlib.util.spec_from_file_location("frozen_features", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network = example.ResNet20()
    assert [tuple(m.shape) for m in network(torch.zeros(2, 3, 32, 32))] == [
        *((2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8))
    ]
    state = {name.replace("stage", "layer"): value for name, value in network.state_dict().items()}
    torch.save(state | {"linear.weight": torch.zeros(10, 64)}, tmp_path / "weights.pt")
    monkeypatch.setenv("RESNET20_WEIGHTS", str(tmp_path / "weights.pt"))
    loaded = example.ResNet20()
    assert all(map(torch.equal, loaded.state_dict().values(), network.state_dict().values()))
