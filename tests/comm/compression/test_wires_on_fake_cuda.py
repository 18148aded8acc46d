"""The plain form of every wire on CUDA tensors without memory: no operation mixes devices or needs the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fake_cuda import fake_cuda
from paragan.comm.compression.compressors import Int8, parse_wire
from paragan.core.devices import BACKENDS

WIRES = ["exact", "bf16", "fp16", "int8", "int4", "int2", "qsgd", "sign", "topk", Int8(rounding="stochastic")]


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("n", [1, 1000])
def test_wires_stay_on_the_device(wire, n):
    wire = parse_wire(wire)
    in_plain_form = mock.patch.object(BACKENDS["cuda"], "prefers_compile", False)
    with fake_cuda() as device, in_plain_form:
        data = torch.empty(wire.nbytes(n), dtype=torch.uint8, device=device)
        out = torch.empty(n, device=device)
        wire.encode(torch.empty(n, device=device), data, 5)
        wire.decode(data, out)
    assert {data.device, out.device} == {device}
