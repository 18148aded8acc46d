"""Power iteration runs once per step, never in a forward, and equals torch's."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm, spectral_norm

from paragan.nets.spectral_norm import add_spectral_norm, freeze_power_iteration, power_iteration, train_mode
from paragan.plan.memory import fake_tensor_mode

NETS = {
    "ours": lambda: nn.Sequential(
        add_spectral_norm(nn.Conv2d(3, 4, 3)), nn.Flatten(), add_spectral_norm(nn.Linear(16, 5))
    ),
    "convtranspose": lambda: nn.Sequential(spectral_norm(nn.ConvTranspose2d(3, 4, 3))),
    "three": lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3), n_power_iterations=3)),
    "hooks": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)),
}


def step(net, x):
    loss = net(x).square().mean()
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad


def same(a, b):
    return all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())


@pytest.mark.parametrize("name", NETS)
def test_equals_torch_with_one_forward_per_step(name):
    torch.manual_seed(0)
    torch_net = NETS[name]()
    net_under_test = train_mode(copy.deepcopy(torch_net))
    x = torch.randn(2, 3, 4, 4)
    for _ in range(4):
        power_iteration(net_under_test)
        step(net_under_test, x)
        step(torch_net, x)
    assert same(net_under_test, torch_net)


def layers_of_equal_shapes():
    """Layers of one shape among others, in two memory formats."""
    convs = [spectral_norm(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(3)]
    convs[1].to(memory_format=torch.channels_last)
    twice = [spectral_norm(nn.Conv2d(4, 4, 3, padding=1), n_power_iterations=2) for _ in range(2)]
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 4, 1)), *convs, *twice, nn.Flatten(), spectral_norm(nn.Linear(64, 5))
    )


@pytest.mark.parametrize("max_batched", [0, 1 << 20])
def test_batched_iteration_equals_torch_for_each_layer(monkeypatch, max_batched):
    monkeypatch.setattr("paragan.nets.spectral_norm.MAX_BATCHED_NUMBERS", max_batched)
    torch.manual_seed(0)
    torch_net = layers_of_equal_shapes().double()
    net_under_test = train_mode(copy.deepcopy(torch_net))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for _ in range(4):
        power_iteration(net_under_test)
        step(net_under_test, x)
        step(torch_net, x)
    for key, value in torch_net.state_dict().items():
        torch.testing.assert_close(net_under_test.state_dict()[key], value, rtol=1e-12, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", NETS)
def test_forwards_do_not_iterate(name):
    torch.manual_seed(0)
    net = NETS[name]()
    x = torch.randn(2, 3, 4, 4)
    freeze_power_iteration(net.train())
    before = {k: v.clone() for k, v in net.state_dict().items() if k.endswith(("_u", "_v"))}
    out = net(x)
    net(x * 2)
    assert torch.equal(net(x), out)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())


def test_train_mode_is_train_mode_for_everything_else():
    net = nn.Sequential(add_spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3), nn.Dropout())
    net.eval()
    assert train_mode(net) is net
    assert all(part.training for part in (net, *net))


def test_power_iteration_finds_the_largest_singular_value():
    net = train_mode(nn.Sequential(add_spectral_norm(nn.Linear(6, 5))))
    for _ in range(200):
        power_iteration(net)
    assert torch.linalg.svdvals(net[0].weight)[0].item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", NETS)
def test_save_and_load_continue_exactly(name):
    torch.manual_seed(0)
    net = train_mode(NETS[name]())
    x = torch.randn(2, 3, 4, 4)
    other = train_mode(NETS[name]())
    for i in range(4):
        if i == 2:
            other.load_state_dict(net.state_dict())
        power_iteration(net)
        step(net, x)
    for _ in range(2):
        power_iteration(other)
        step(other, x)
    assert same(net, other)
    assert torch.equal(net(x), other(x))


def test_after_other_parametrizations():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    train_mode(add_spectral_norm(layer))
    for _ in range(200):
        power_iteration(layer)
    assert torch.linalg.svdvals(layer.weight)[0].item() == pytest.approx(1, abs=1e-3)


def test_networks_without_spectral_norm_do_not_change():
    net = train_mode(nn.Sequential(nn.Linear(2, 2)))
    power_iteration(net)
    assert net.training


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 5), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.Embedding(7, 3)]
)
def test_a_new_norm_is_that_of_torch(layer):
    states = []
    for add in (add_spectral_norm, spectral_norm):
        torch.manual_seed(0)
        states.append(add(copy.deepcopy(layer)).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_fake_weight_gets_a_norm_without_power_iterations():
    with fake_tensor_mode(), mock.patch.object(_SpectralNorm, "_power_method") as power_method:
        norm = add_spectral_norm(nn.Linear(6, 5))
        assert norm(torch.zeros(2, 6)).shape == (2, 5)
        train_mode(norm)
        power_iteration(norm)
    power_method.assert_not_called()
