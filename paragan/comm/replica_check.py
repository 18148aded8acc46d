"""Find out whether all ranks hold the same networks and optimizers, in any training loop.

    for batch in loader:
        ...
        paragan.check_replicas(generator, discriminator, opt_g, opt_d, every=100)

A check reads all tensors once and gathers 16 bytes of every rank. Only if they differ are names and values exchanged.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import warnings
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

from paragan.comm.process_group import Group, TorchGroup, as_comm_error, c10d
from paragan.core.errors import RunError, UsageError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
Part = nn.Module | torch.optim.Optimizer


@runtime_checkable
class HasParts(Protocol):
    """What consists of modules and optimizers, such as a replica."""

    @property
    def parts(self) -> tuple[Part, ...]: ...
    @property
    def label(self) -> str: ...
    @property
    def has_equal_buffers(self) -> bool: ...
    @property
    def may_differ(self) -> bool: ...


NamedTensors = list[tuple[str, Tensor]]


class ReplicasDiffer(RunError):
    """Ranks hold different networks or optimizers. All ranks raise it."""


def check_replicas(
    *objects: Part | HasParts,
    every: int = 1,
    step: int | None = None,
    ignore: Sequence[str] = (),
    process_group: Any = None,
) -> None:
    """Check that parameters, buffers and optimizer states are the same on all ranks, bit for bit.

    All ranks call this at the same place of their loops. Without torch.distributed, or on one rank, there is nothing to
    compare. A network in DistributedDataParallel may be given with its wrapper; then a warning also says so where the
    network is called around it, which leaves its gradients as they are on each rank.

    The running statistics of batch norm are not compared under a DistributedDataParallel that broadcasts buffers, since
    each forward pass begins with those of rank 0.

    Args:
        objects: modules, optimizers and replicas.
        every: check at every so many calls.
        step: the number of the step, for the message. None: calls are counted.
        ignore: patterns of names that may differ, such as "*.running_mean".
        process_group: the ranks. None: all.

    Raises:
        ReplicasDiffer: names the first tensor that differs, since which step, and by how much.
        UsageError: a part is neither a module nor an optimizer, or there is none.
    """
    parts = [part for one in objects for part in (one.parts if isinstance(one, HasParts) else (one,))]
    _check_arguments(objects, parts, every)
    if not c10d.is_initialized():
        return
    group = TorchGroup(process_group or c10d.group.WORLD)
    if group.size == 1:
        return
    history = _histories.setdefault(parts[0], History())
    for part in parts:
        if isinstance(part, DistributedDataParallel):
            watch_wrapper(part)
    history.calls += 1
    if history.calls % every == 0:
        step = history.calls if step is None else step
        own = [one for one in objects if isinstance(one, HasParts) and not one.has_equal_buffers]
        tensors = name_tensors(parts, ignore, {part for one in own for part in one.parts})
        if tensors:
            compare_tensors(group, tensors, step, history)


def _check_arguments(objects: Sequence[object], parts: Sequence[object], every: int) -> None:
    if not parts:
        raise UsageError("check_replicas: has nothing to compare. Use check_replicas(generator, discriminator)")
    for part in parts:
        if not isinstance(part, nn.Module | torch.optim.Optimizer):
            raise UsageError(f"check_replicas: {type(part).__name__} has no tensors. Use a module or an optimizer")
    for one in objects:
        if isinstance(one, HasParts) and one.may_differ:
            raise UsageError(
                f"{one.label}: its exchange lets ranks differ, as gossip and local steps do. Leave it out of "
                "check_replicas"
            )
    if every < 1:
        raise UsageError(f"every={every}: must be positive. Use 1 or more")


@dataclass
class History:
    """The past checks of one loop, which is known by the first part that it checks.

    calls      : of `check_replicas`
    last_equal : the step of the last check at which all ranks agreed; None: there was none
    """

    calls: int = 0
    last_equal: int | None = None


_histories: weakref.WeakKeyDictionary[Part, History] = weakref.WeakKeyDictionary()


# Tensors and their names --------------------------------------------------------------------------------


def name_tensors(
    parts: Iterable[Part], ignore: Sequence[str] = (), without_buffers: Container[Part] = ()
) -> NamedTensors:
    """Return all tensors of modules and optimizers with names, each once.

    Args:
        parts: modules and optimizers.
        ignore: patterns of names that are left out.
        without_buffers: modules whose buffers are left out.
    """
    parts = list(parts)
    labels = _label_parts(parts)
    names: dict[Tensor, str] = {}
    for part, label in zip(parts, labels):
        if isinstance(part, nn.Module):
            for name, tensor in _module_tensors(part, part not in without_buffers):
                names.setdefault(tensor, f"{label} {name}")
    optimizer_states = [
        named
        for part, label in zip(parts, labels)
        if isinstance(part, torch.optim.Optimizer)
        for named in _optimizer_tensors(part, label, names)
    ]
    named = [*((name, tensor) for tensor, name in names.items()), *optimizer_states]
    return [(name, tensor) for name, tensor in named if not any(fnmatch.fnmatch(name, pattern) for pattern in ignore)]


def _label_parts(parts: Sequence[Part]) -> list[str]:
    """Name parts by their classes, with a number where a class occurs again."""
    classes = [type(_unwrap(part)).__name__ for part in parts]
    labels: list[str] = []
    for i, name in enumerate(classes):
        labels.append(f"{name} {classes[: i + 1].count(name)}" if classes.count(name) > 1 else name)
    return labels


def _unwrap(part: Part) -> Part:
    return wrapped_network(part) if isinstance(part, DistributedDataParallel) else part


def wrapped_network(wrapper: DistributedDataParallel) -> nn.Module:
    """Return the network inside a DistributedDataParallel."""
    network: nn.Module = wrapper.module  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return network  # pyright: ignore[reportUnknownVariableType]


def _module_tensors(module: nn.Module, with_buffers: bool) -> Iterator[tuple[str, Tensor]]:
    network = wrapped_network(module) if isinstance(module, DistributedDataParallel) else module
    yield from network.named_parameters()
    if not with_buffers:
        return
    broadcasts = isinstance(module, DistributedDataParallel) and module.broadcast_buffers
    layers = cast("Iterator[tuple[str, nn.Module]]", network.named_modules())
    for prefix, layer in layers:
        if not (broadcasts and isinstance(layer, BatchNorm)):
            yield from layer.named_buffers(prefix, recurse=False)


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, label: str, names: dict[Tensor, str]
) -> Iterator[tuple[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(p, {}).items()):  # a state that was loaded has another order
            if isinstance(value, Tensor):
                yield f"{label} {key} of {names.get(p, f'parameter {number}')}", value


# Comparison ---------------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> Tensor:
    """Return two sums of the bits of a tensor, [2] int64. If one element differs, so does a sum."""
    real = _as_real(tensor)
    bits = real.contiguous().flatten().view(BITS[real.element_size()])
    half = len(bits) // 2
    return torch.stack([bits[:half].sum(dtype=torch.int64), bits[half:].sum(dtype=torch.int64)])


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def compare_tensors(group: Group, tensors: NamedTensors, step: int, history: History) -> None:
    """Compare the tensors of all ranks. Raises ReplicasDiffer."""
    device = tensors[0][1].device
    digests = _digests([tensor for _, tensor in tensors])
    summary = [_hash(_layout(tensors)), _hash(digests)]
    gathered = _to_list(_gather(group, torch.tensor(summary, device=device)))
    if all(row == gathered[0] for row in gathered):
        history.last_equal = step
        return
    difference = find_layout_difference(group, tensors)
    if difference:
        raise ReplicasDiffer(f"step {step}: ranks hold different tensors: {difference}")
    number, rank = _first_difference(_gather_json(group, digests, device)) or (0, 0)
    name, tensor = tensors[number]
    values = _gather(group, _as_real(tensor).double().flatten().to(device))
    since = f"It was equal at step {history.last_equal}"
    if history.last_equal is None:
        since = "It was never equal at a check"
    raise ReplicasDiffer(f"step {step}: {name} {_difference(values, rank)}. {since}")


def _digests(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the digests of tensors as numbers. The host waits once for each device."""
    numbers: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        numbers.setdefault(tensor.device, []).append(i)
    digests: list[list[int]] = [[] for _ in tensors]
    for same_device in numbers.values():
        for i, row in zip(same_device, _to_list(torch.stack([digest(tensors[i]) for i in same_device]))):
            digests[i] = row
    return digests


def find_layout_difference(group: Group, tensors: NamedTensors) -> str:
    """Return the first tensor whose name, dtype or shape differs between ranks; "" if all are alike."""
    layouts = _gather_json(group, _layout(tensors), tensors[0][1].device)
    other = _first_difference(layouts)
    if other is None:
        return ""
    number, rank = other
    texts = [_describe(layouts[r][number]) if number < len(layouts[r]) else "nothing" for r in (0, rank)]
    return f"{texts[0]} on rank 0, {texts[1]} on rank {rank}"


def _layout(tensors: NamedTensors) -> list[Any]:
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors]


def _hash(value: object) -> int:
    """Return 64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big", signed=True)


def _first_difference(rows: Sequence[Sequence[object]]) -> tuple[int, int] | None:
    """Return the first position at which the row of a rank differs from that of rank 0, and the rank."""
    found: list[tuple[int, int]] = []
    for rank, row in enumerate(rows):
        length = max(len(row), len(rows[0]))
        differing = (i for i in range(length) if row[i : i + 1] != rows[0][i : i + 1])
        found += [(i, rank) for i in (next(differing, None),) if i is not None]
    return min(found, default=None)


def _describe(entry: Sequence[Any]) -> str:
    name, dtype, shape = entry
    return f"{name} {dtype.removeprefix('torch.')} {shape}"


def _difference(values: Tensor, rank: int) -> str:
    """Say by how much the values of a rank differ from those of rank 0."""
    difference = values[rank] - values[0]
    largest = float(difference.abs().max())
    norm = float(values[0].square().sum().sqrt())
    relative = f", {float(difference.square().sum().sqrt()) / norm:.2g} of its norm" if norm else ""
    return f"on rank {rank} differs from that of rank 0, by up to {largest:.2g}{relative}"


def _gather(group: Group, x: Tensor) -> Tensor:
    rows, work = group.all_gather(x)
    as_comm_error(work.wait)
    return rows


def _to_list(x: Tensor) -> list[Any]:
    return x.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _gather_json(group: Group, value: Any, device: torch.device) -> list[Any]:
    """Gather plain data of every rank, as JSON."""
    data = json.dumps(value).encode()
    sizes = _gather(group, torch.tensor([len(data)], device=device))
    padded = torch.tensor(list(data.ljust(int(sizes.max()))), dtype=torch.uint8, device=device)
    return [json.loads(bytes(row)) for row in _to_list(_gather(group, padded))]


# Calls around a wrapper ---------------------------------------------------------------------------------

_watched: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def watch_wrapper(wrapper: DistributedDataParallel) -> None:
    """Warn once if the network of a DistributedDataParallel is called around it with gradients."""
    if wrapper not in _watched:
        _watched.add(wrapper)
        network = wrapped_network(wrapper)
        watch = _WrapperWatch()
        wrapper.register_forward_pre_hook(watch.enter)
        wrapper.register_forward_hook(watch.leave, always_call=True)
        network.register_forward_pre_hook(watch.check)


class _WrapperWatch:
    """Hooks of a wrapper and its network, which know whether the network is called from the wrapper."""

    def __init__(self):
        self.depth = 0
        self.has_warned = False

    def enter(self, *_: object) -> None:
        """Note that the wrapper is called."""
        self.depth += 1

    def leave(self, *_: object) -> None:
        """Note that the call has ended."""
        self.depth -= 1

    def check(self, network: nn.Module, _: object) -> None:
        """Warn if the network is trained by a call that does not come from the wrapper."""
        if self.depth or self.has_warned or not (network.training and torch.is_grad_enabled()):
            return
        if any(p.requires_grad for p in network.parameters()):
            self.has_warned = True
            warnings.warn(
                f"{type(network).__name__} is called around its DistributedDataParallel: gradients of this pass are "
                "not averaged over ranks. Call the wrapper, or freeze the network where another one is trained",
                stacklevel=2,
            )
