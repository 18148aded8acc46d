"""Networks of recipes at full size, on CUDA tensors without memory: no operation mixes devices or needs the host."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorDeviceMismatchError

from fake_cuda import fake_cuda
from paragan.core.types import primary_array
from paragan.nets import Spec
from paragan.recipes import RECIPES

NAMES = ["digits", "fashion", *(name for name in RECIPES if name.endswith("cifar10"))]


def call_on(device, net, *inputs):
    """Call a network as if its parameters were on the device: fake ones cannot be moved."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for name, tensor in (*net.named_parameters(), *net.named_buffers())
    }
    return torch.func.functional_call(net, tensors, inputs)


@pytest.mark.slow(after=4)
@pytest.mark.parametrize("name", NAMES)
def test_networks_stay_on_the_device(name):
    run = RECIPES[name]()
    size, channels, batch = int(run.data.resolution), run.data.channels, run.batch // run.lanes
    with fake_cuda() as device:
        labels = torch.zeros(batch, dtype=torch.int64, device=device)
        g, d = run.nets.generator(Spec(size, channels, 10)), run.nets.discriminator(Spec(size, channels, 10))
        images = primary_array(call_on(device, g, torch.randn(batch, run.nets.latent, device=device), labels))
        verdict = call_on(device, d, images, labels)
    assert images.shape == (batch, channels, size, size)
    assert {x.device for x in torch.utils._pytree.tree_leaves(verdict) if torch.is_tensor(x)} <= {device}


def test_fake_tensors_refuse_what_a_card_would():
    with fake_cuda() as device:
        x = torch.ones(4, device=device)
        with pytest.raises(FakeTensorDeviceMismatchError):
            x + torch.ones(4)
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
