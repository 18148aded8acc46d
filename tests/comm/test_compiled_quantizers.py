"""torch.compile makes kernels of every quantizer, however many there are."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from paragan.comm.compression.block_quantizer import FixedArguments


def test_each_quantizer_is_compiled_on_its_own():
    def scale_in_place(x, factor):
        x.mul_(factor)

    torch._dynamo.reset()
    counters.clear()
    more_than_torch_compiles_of_one_function = torch._dynamo.config.recompile_limit + 2
    for factor in range(more_than_torch_compiles_of_one_function):
        x = torch.ones(3)
        torch.compile(FixedArguments(scale_in_place, factor=factor), backend="eager", dynamic=True)(x)
        assert x.tolist() == [factor] * 3
    assert counters["stats"]["unique_graphs"] == more_than_torch_compiles_of_one_function
