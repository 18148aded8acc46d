"""The stand-in accelerator refuses, counts and delays what a card would, and computes what the CPU does."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as f

import standin
from paragan.core.devices import autocast_factory, backend_of
from standin import memory

DEVICE = standin.install()
BACKEND = backend_of(DEVICE)
MODULE = torch.get_device_module(DEVICE)
STEPS = 3


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


def pinned(*shape):
    return BACKEND.pinned_copy(torch.ones(shape))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x, host: x + host, id="add"),
        pytest.param(lambda x, host: x.add_(host), id="add in place"),
        pytest.param(lambda x, host: host.add_(x), id="add to the host"),
        pytest.param(lambda x, host: host[0].add_(x[0]), id="add to a number of the host"),
        pytest.param(lambda x, host: torch.cat([x, host]), id="cat"),
        pytest.param(lambda x, host: torch.stack([x[0], host[0]]), id="stack of numbers"),
        pytest.param(lambda x, host: f.linear(x, host[None]), id="linear"),
        pytest.param(lambda x, host: torch._foreach_mul([x], [host]), id="foreach"),
        pytest.param(lambda x, host: x.index_select(0, host.long()), id="index_select"),
        pytest.param(lambda x, host: torch.where(host > 0, x, x), id="where"),
    ],
)
def test_a_tensor_of_the_host_is_refused(operation):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operation(ones(3), torch.ones(3))


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda x, rng: torch.randn(3, device=DEVICE, generator=rng), id="randn"),
        pytest.param(lambda x, rng: torch.randint(5, (3,), device=DEVICE, generator=rng), id="randint"),
        pytest.param(lambda x, rng: x.uniform_(generator=rng), id="uniform_"),
        pytest.param(lambda x, rng: nn.init.orthogonal_(x[None], generator=rng), id="orthogonal_"),
    ],
)
def test_a_generator_of_the_host_is_refused(draw):
    with pytest.raises(RuntimeError, match="Expected a 'mock' device type for generator but found 'cpu'"):
        draw(ones(3), torch.Generator())


def test_numpy_gets_no_memory_of_the_device():
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        ones(3).numpy()


def test_copies_numbers_and_indices_of_the_host_are_allowed():
    x, host = ones(3), torch.arange(3.0)
    assert torch.equal(x.copy_(host).cpu(), host)
    assert torch.equal(host.clone().copy_(x + 1), host + 1)
    assert torch.equal((x * torch.tensor(2.0)).cpu(), host * 2)
    assert torch.equal(torch.where(x > 1, x, torch.tensor(0.0)).cpu(), torch.tensor([0.0, 0, 2]))
    assert torch.equal(x[torch.tensor([2, 0])].cpu(), torch.tensor([2.0, 0.0]))


# What makes the host wait ---------------------------------------------------------------------------------------------


def if_positive(x):
    return bool(x.sum() > 0)


def copy_blocking(x):
    x.copy_(pinned(3))


def copy_pageable(x):
    x.copy_(torch.ones(3), non_blocking=True)


def put_by_mask(x):
    x[x > 0] = ones(3)


WAITS = {
    "item": (lambda x: x[0].item(), "aten::_local_scalar_dense"),
    "float": (lambda x: float(x[0]), "aten::_local_scalar_dense"),
    "if": (if_positive, "aten::_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "copy to the host"),
    "cpu": (lambda x: x.cpu(), "copy to the host"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "mask": (lambda x: x[x > 0], "aten::index.Tensor"),
    "put by a mask": (put_by_mask, "aten::_index_put_impl_"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten::masked_select"),
    "index of the host": (lambda x: x[torch.tensor([0])], "aten::index.Tensor"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal"),
    "blocking copy": (copy_blocking, "copy to the device"),
    "new from a list": (lambda x: x.new_tensor([1.0, 2.0]), "copy to the device"),
    "pageable copy": (copy_pageable, "copy of pageable memory to the device"),
    "synchronize": (lambda x: MODULE.synchronize(), "synchronize"),
    "stream": (lambda x: MODULE.current_stream().synchronize(), "stream.synchronize"),
    "event": (lambda x: MODULE.current_stream().record_event().synchronize(), "event.synchronize"),
}


@pytest.mark.parametrize(("operation", "name"), WAITS.values(), ids=WAITS)
def test_a_wait_is_recorded_with_the_line_that_caused_it(operation, name):
    x = ones(3)
    with standin.recording() as syncs:
        operation(x)
    lines, first = inspect.getsourcelines(operation)
    assert [sync.name.startswith(name) for sync in syncs] == [True], syncs
    file, _, number = syncs[0].line.partition(":")
    assert Path(file) == Path("tests/standin") / Path(__file__).name
    assert first <= int(number) < first + len(lines)


def test_what_runs_on_the_device_is_no_wait():
    x = ones(4, 4).requires_grad_()
    source, destination = pinned(4, 4), pinned(4, 4)
    with standin.recording() as syncs:
        y = (x @ x).relu().mean(0) * 2 + torch.tensor(1.0)
        y.sum().backward()
        new = [torch.zeros(3, device=DEVICE), torch.arange(3, device=DEVICE), torch.randn(3, device=DEVICE)]
        new[0].fill_(3.0).clamp_(min=0).masked_fill_(new[1] > 1, 0.0)
        torch.where(x > 0, x, 0.0).isfinite().all()
        ones(4, 4).copy_(source, non_blocking=True)
        destination.copy_(x.detach(), non_blocking=True)
        MODULE.Stream().wait_stream(MODULE.current_stream())
        MODULE.current_stream().wait_event(MODULE.current_stream().record_event())
        x[new[1], :2].argsort()
        torch.optim.Adam([x], foreach=True, capturable=True).step()
    assert not syncs
    MODULE.synchronize()


def test_nobody_records_after_the_context():
    with standin.recording() as outer:
        with standin.recording() as inner:
            ones(1).item()
        ones(1).item()
    ones(1).item()
    assert (len(outer), len(inner)) == (2, 1)


# Copies that are under way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["stream", "event", "device", "another value"])
def test_a_copy_to_the_host_is_there_after_a_wait(wait):
    x, host = ones(3), pinned(3)
    host.copy_(x * 2, non_blocking=True)
    event = MODULE.current_stream().record_event()
    assert host.isnan().all()
    if wait == "stream":
        MODULE.current_stream().synchronize()
    elif wait == "event":
        event.synchronize()
    elif wait == "device":
        BACKEND.synchronize(DEVICE)
    else:
        x[0].item()  # of the same stream, which is in order
    assert host.tolist() == [2.0] * 3


def test_an_event_from_before_the_copy_does_not_help():
    host = pinned(3)
    event = MODULE.current_stream().record_event()
    host.copy_(ones(3), non_blocking=True)
    event.synchronize()
    assert host.isnan().all()
    MODULE.synchronize()


def test_what_is_copied_to_the_host_is_what_was_computed_until_then():
    x, host = ones(3), pinned(3)
    host.copy_(x, non_blocking=True)
    x.zero_()
    MODULE.synchronize()
    assert host.tolist() == [1.0] * 3


def test_a_copy_to_the_device_reads_its_source_late():
    source, side = pinned(3), MODULE.Stream()
    with MODULE.stream(side):
        x = source.to(DEVICE, non_blocking=True)
    source.fill_(7.0)  # too early
    MODULE.current_stream().wait_stream(side)
    assert x.tolist() == [7.0] * 3


def test_a_source_may_be_overwritten_after_its_copy_was_waited_for():
    source, side = pinned(3), MODULE.Stream()
    with MODULE.stream(side):
        x = source.to(DEVICE, non_blocking=True)
    side.record_event().synchronize()
    source.fill_(7.0)
    MODULE.current_stream().wait_stream(side)
    assert x.tolist() == [1.0] * 3


def test_pageable_memory_may_be_overwritten_at_once():
    source = torch.ones(3)
    x = source.to(DEVICE, non_blocking=True)
    source.fill_(7.0)
    assert x.tolist() == [1.0] * 3


def test_memory_stays_page_locked_as_long_as_it_lives():
    array = np.ones(3, np.float32)
    BACKEND.page_lock(array)
    x = torch.from_numpy(array)
    assert memory.is_pinned(x)
    assert memory.is_pinned(x[1:])
    address = array.ctypes.data
    del x, array
    assert address not in {start for start, _ in memory._pinned}


# Streams --------------------------------------------------------------------------------------------------------------


def wait_stream(side):
    MODULE.current_stream().wait_stream(side)


def wait_event(side):
    MODULE.current_stream().wait_event(side.record_event())


def wait_on_the_host(side):
    side.synchronize()


every_wait = pytest.mark.parametrize("wait", [wait_stream, wait_event, wait_on_the_host])


@every_wait
def test_the_result_of_another_stream_has_to_be_waited_for(wait):
    side = MODULE.Stream()
    with MODULE.stream(side):
        x = ones(3) * 2
    with pytest.raises(RuntimeError, match=r"uses what stream \d+ writes"):
        x + 1
    wait(side)
    assert (x + 1).tolist() == [3.0] * 3


@every_wait
def test_what_another_stream_reads_may_not_be_overwritten(wait):
    side, x = MODULE.Stream(), ones(3)
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        y = x * 2
    assert (x + 1).tolist() == [2.0] * 3  # both may read
    with pytest.raises(RuntimeError, match="overwrites what another stream reads"):
        x.zero_()
    wait(side)
    x.zero_()
    assert y.tolist() == [2.0] * 3


def test_a_side_stream_waits_for_the_current_one_too():
    side, x = MODULE.Stream(), ones(3)
    x.mul_(2)
    with MODULE.stream(side), pytest.raises(RuntimeError, match=r"uses what stream \d+ writes"):
        x + 1
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        y = x + 1
    side.synchronize()
    assert y.tolist() == [3.0] * 3


def test_events_order_streams_through_a_third():
    first, second = MODULE.Stream(), MODULE.Stream()
    with MODULE.stream(first):
        x = ones(3) * 2
    second.wait_stream(first)
    wait_event(second)
    assert (x + 1).tolist() == [3.0] * 3


def test_the_backend_orders_its_side_streams():
    x = ones(3)
    with BACKEND.side_streams(DEVICE, 3) as contexts:
        results = []
        for context in contexts:
            with context:
                results.append(x * 2)
    assert torch.stack(results).sum().item() == 18


# Memory ---------------------------------------------------------------------------------------------------------------


def test_the_peak_of_memory_is_exact():
    BACKEND.reset_peak_memory(DEVICE)
    before = BACKEND.peak_bytes(DEVICE)
    x = torch.zeros(1000, device=DEVICE)
    y = x + 1
    assert BACKEND.peak_bytes(DEVICE) == before + 8000
    del y
    z = x[:500].view(2, 250)  # no memory of its own
    w = x.double()
    assert BACKEND.peak_bytes(DEVICE) == before + 12000
    del x, w
    assert memory.allocated_bytes() == before + 4000  # of which z is a part
    del z
    BACKEND.reset_peak_memory(DEVICE)
    assert BACKEND.peak_bytes(DEVICE) == before


def test_views_share_memory():
    x = ones(2, 6)
    views = [x[1], x.view(3, 4), x.t(), x.reshape(-1)[2:], x.detach(), x.expand(5, 2, 6), x.unfold(1, 2, 2)]
    storage = x.untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == storage for view in views)
    x.mul_(3)
    assert all(view.min().item() == 3 for view in views)
    assert [view.shape for view in views] == [view.shape for view in (torch.empty_like(v, device="cpu") for v in views)]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (0, 3), (1, 3), (2, 1, 3)])
def test_shapes_and_strides_equal_those_of_the_host(shape):
    host = torch.zeros(shape)
    assert torch.zeros(shape, device=DEVICE).shape == host.shape
    x = host.to(DEVICE)
    assert x.stride() == host.stride()
    assert (x + 1).stride() == host.stride()
    assert copy.deepcopy(x).stride() == host.stride()
    assert x.clone().data_ptr() != x.data_ptr() or not x.numel()


# Backward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [True, False])
def test_exceptions_leave_a_backward_pass(threads):
    def fail(grad):
        raise ZeroDivisionError("of a hook")

    x = ones(3).requires_grad_()
    with torch.autograd.set_multithreading_enabled(threads):
        for _ in range(2):
            y = x * 2
            y.register_hook(fail)
            with pytest.raises(ZeroDivisionError, match="of a hook"):
                y.sum().backward()
        (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0] * 3


class Attention(nn.Module):
    """The CPU has a fused kernel if keys and values are of one width."""

    def __init__(self, width):
        super().__init__()
        self.key, self.value = nn.Linear(6, width), nn.Linear(6, 6)

    def forward(self, x):
        k, v = (y.unflatten(2, (2, -1)).transpose(1, 2) for y in (self.key(x), self.value(x)))
        return f.scaled_dot_product_attention(k, k, v)


def of_conv(*layers):
    return nn.Sequential(*layers), (4, 3, 8, 8)


NETWORKS = {
    "linear": lambda: of_conv(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1)),
    "conv": lambda: of_conv(nn.Conv2d(3, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(4, 2, 4, 2, 1)),
    "grouped conv": lambda: of_conv(nn.Conv2d(3, 6, 3, groups=3, bias=False), nn.SiLU()),
    "conv_transpose": lambda: of_conv(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.Tanh()),
    "batch norm": lambda: of_conv(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.Softplus()),
    "GroupNorm": lambda: of_conv(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Sigmoid()),
    "LayerNorm": lambda: of_conv(nn.LayerNorm(8), nn.Conv2d(3, 4, 1)),
    "interpolate": lambda: of_conv(nn.Upsample(scale_factor=2), nn.Conv2d(3, 2, 3), nn.AvgPool2d(2)),
    "bilinear": lambda: of_conv(nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.Conv2d(3, 2, 3)),
    "attention": lambda: (Attention(6), (2, 5, 6)),
    "attention of two widths": lambda: (Attention(4), (2, 5, 6)),
}


def gradients(net, x, device, precision, has_penalty):
    """Return the output, the gradients and the buffers after passes forward and backward."""
    net = copy.deepcopy(net).to(device)
    x = x.to(device, copy=True).requires_grad_()
    for _ in range(STEPS):
        with torch.autograd.set_multithreading_enabled(False), autocast_factory(device, precision)():
            out = net(x)
            loss = out.float().square().mean()
            if has_penalty:
                (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
    found = [out, x.grad, *(p.grad for p in net.parameters()), *net.buffers()]
    return [(y.dtype, y.stride(), y.detach().cpu()) for y in found]


def is_comparable(name, penalty, layout):
    """Return whether torch has these passes, and does not ask whether the device is the CPU (as for GroupNorm)."""
    if name.startswith("attention"):
        return not penalty and not layout
    return penalty or not layout or name != "GroupNorm"


CASES = [
    pytest.param(name, precision, penalty, layout, id=" ".join(filter(None, (name, precision, penalty, layout))))
    for name in NETWORKS
    for precision in ("float32", "bf16")
    for penalty in ("", "double backward")
    for layout in ("", "channels_last")
    if is_comparable(name, penalty, layout)
]


@pytest.mark.parametrize(("name", "precision", "penalty", "layout"), CASES)
def test_passes_equal_those_of_the_cpu_to_the_bit(name, precision, penalty, layout):
    torch.manual_seed(0)
    net, shape = NETWORKS[name]()
    x = torch.randn(shape)
    if layout:
        net, x = (y.to(memory_format=torch.channels_last) for y in (net, x))
    expected = gradients(net, x, torch.device("cpu"), precision, bool(penalty))
    actual = gradients(net, x, DEVICE, precision, bool(penalty))
    for (dtype, stride, value), (own_dtype, own_stride, own) in zip(expected, actual, strict=True):
        assert (own_dtype, own_stride) == (dtype, stride)
        assert torch.equal(own, value)


def test_embeddings_and_optimizers_equal_those_of_the_cpu():
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1)).to(device)
        labels = torch.tensor([0, 3, 3, 1]).to(device)
        for optimizer in (torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)):
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(labels).square().mean().backward()
                optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for own, expected in zip(train(DEVICE), train(torch.device("cpu")), strict=True):
        assert torch.equal(own, expected)


# What else runs in this process ---------------------------------------------------------------------------------------


def test_tensors_of_the_cpu_are_as_before():
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    net = nn.Linear(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(torch.ones(2, 3)).dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(net).weight, net.weight)
    part = copy.deepcopy(torch.arange(4)[1:])
    assert part.untyped_storage().nbytes() == 32
    assert not part.is_pinned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), 2)
    assert [x.tolist() for (x,) in loader] == [[0, 1], [2, 3]]
    with standin.recording() as syncs:
        assert net.weight.sum().item() == float(net.weight.detach().sum())
    assert not syncs


# Messages -------------------------------------------------------------------------------------------------------------


def test_messages_hold_garbage_until_they_are_waited_for(pool):
    def job(world):
        from torch import distributed as dist

        def message(start, x):
            work = start(x)
            early = x.isnan().all().item()
            work.wait()
            return early, x.tolist()

        def summed():
            return torch.full((2,), world.rank + 1.0, device=world.device)

        def exchange(x):
            inbox, other = torch.empty_like(x), 1 - world.rank
            sends = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, inbox, other)]
            works = dist.batch_isend_irecv(sends)
            early = inbox.isnan().all().item()
            for work in works:
                work.wait()
            return early, inbox.tolist()

        with standin.recording() as syncs:
            dist.all_reduce(summed(), async_op=True).wait()
        return [
            message(lambda x: dist.all_reduce(x, async_op=True), summed()),
            message(lambda x: dist.broadcast(x, 1, async_op=True), summed()),
            exchange(summed()),
            len(syncs),
        ]

    for rank, results in enumerate(pool(2, job, standin.NAME)):
        other = 2.0 - rank
        assert results == [(True, [3.0] * 2), (True, [2.0] * 2), (True, [other] * 2), 0]


def test_a_message_is_what_was_computed_before_it(pool):
    def job(world):
        from torch import distributed as dist

        x = torch.ones(2, device=world.device)
        sent = x * (world.rank + 1)
        work = dist.all_reduce(sent, async_op=True)
        x.zero_()
        work.wait()
        return sent.tolist()

    assert pool(2, job, standin.NAME) == [[3.0] * 2] * 2
