"""What an exchange does with a bucket, found by letting it: its generator runs on a bucket whose numbers are never
computed, with a group that notes what is sent, to whom, and what is waited for.

So overlap, the order of messages, periods and rounds of gossip follow from the code that will run, and exchanges and
wires of a user's own are foreseen as well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paragan.comm.bucket import Bucket, Exchange, ExchangeEvent
from paragan.comm.compression.compressors import Compressor
from paragan.comm.process_group import Group, SingleRankGroup, WaitThread, Work
from paragan.comm.traffic import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce
from paragan.plan.virtual_world import VirtualWorld

MAX_COMPUTED_NUMEL = 4096  # numbers: so few are computed

CommKind = Literal["sum", "gather", "transpose", "swap"]


@dataclass(frozen=True)
class Compute:
    """Numbers that this rank computes itself, by what is done: "pass" (over memory), "int8/encode", "int8/decode"."""

    numel_by_op: Mapping[str, int]


@dataclass(frozen=True)
class Message:
    """A message, or a collective of `members`. nbytes: what a rank gives to it; tells, hears: bytes, by rank."""

    message_id: int
    kind: CommKind
    members: tuple[int, ...]
    nbytes: int = 0
    send_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    recv_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    tag: int = 0


@dataclass(frozen=True)
class WaitMessage:
    """What was posted with this number is waited for. here: on the spot; else when all else that can be done is."""

    message_id: int
    blocking: bool


@dataclass(frozen=True)
class WaitEvent:
    """The exchange goes on at this moment."""

    event: ExchangeEvent


TraceOp = Compute | Message | WaitMessage | WaitEvent
TraceOps = tuple[TraceOp, ...]


class Trace:
    """What was noted, in order."""

    def __init__(self) -> None:
        self.ops: list[TraceOp] = []
        self._num_messages = 0
        self._pending_numel: Counter[str] = Counter()

    def add_compute(self, op: str, numel: int) -> None:
        self._pending_numel[op] += numel

    def append(self, op: TraceOp) -> None:
        if self._pending_numel:
            self.ops.append(Compute(dict(self._pending_numel)))
            self._pending_numel.clear()
        self.ops.append(op)

    def add_message(self, kind: CommKind, members: tuple[int, ...], **more: Any) -> TracedWork:
        self._num_messages += 1
        self.append(Message(self._num_messages, kind, members, **more))
        return TracedWork(self, self._num_messages)

    def to_ops(self) -> TraceOps:
        if self._pending_numel:
            self.ops.append(Compute(dict(self._pending_numel)))
        return tuple(self.ops)


@dataclass(frozen=True)
class TracedWork:
    """Work that is under way in a script."""

    trace: Trace
    message_id: int

    def wait(self) -> None:
        self.trace.append(WaitMessage(self.message_id, blocking=True))


class TraceHandle:
    """Who writes at present; shared by the groups of a world."""

    current = Trace()


@dataclass(frozen=True)
class TracingGroup:
    """A group whose messages are noted. members: its ranks, as the world knows them."""

    trace_handle: TraceHandle
    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)

    def with_meter(self, meter: Meter) -> Group:
        return self

    def all_reduce_sum(self, x: Tensor) -> Work:
        return self.trace_handle.current.add_message("sum", self.members, nbytes=x.nbytes)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        return rows, self.trace_handle.current.add_message("gather", self.members, nbytes=x.nbytes)

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        return self.trace_handle.current.add_message("transpose", self.members, nbytes=x.nbytes)

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        tells, hears = ({self.members[j]: x.nbytes for j, x in some.items()} for some in (sends, recvs))
        return self.trace_handle.current.add_message("swap", self.members, tells=tells, hears=hears, tag=tag)


class TracingWorld(VirtualWorld):
    """An imagined world whose groups note what they are given to do."""

    def __init__(self, ranks: int, rank: int, trace_handle: TraceHandle):
        super().__init__(ranks, rank)
        self.trace_handle = trace_handle
        self.all_ranks = self._make_group(range(ranks))

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        return self._make_group(ranks) if self.rank in ranks else None

    def pair_group(self, other: int) -> Group:
        return self._make_group(sorted((self.rank, other)))

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        return _null_wait_thread  # nothing is under way

    def _make_group(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        return (
            TracingGroup(self.trace_handle, members, members.index(self.rank))
            if len(members) > 1
            else SingleRankGroup()
        )


class _NullWaitThread(WaitThread):
    """A thread that was not started."""

    def __init__(self) -> None:
        self.timeout_s, self.group, self.cancelled = 0.0, None, False

    def close(self) -> None:
        pass


_null_wait_thread = _NullWaitThread()


@dataclass(frozen=True)
class TracedCompressor:
    """A wire whose work is noted and not done."""

    wire: Compressor
    trace_handle: TraceHandle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        self.trace_handle.current.add_compute(f"{self.wire.name}/encode", x.numel())

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.trace_handle.current.add_compute(f"{self.wire.name}/decode", out.numel())


class SkipComputeMode(TorchDispatchMode):
    """Inside, operations on many numbers are noted as passes over memory and not done: tensors keep whatever their
    memory holds, and most of it is never touched. Few numbers are computed, from zeros."""

    def __init__(self, trace_handle: TraceHandle):
        super().__init__()
        self.trace_handle = trace_handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, returns = func._schema.name.removeprefix("aten::"), func._schema.returns
        if name in FACTORY_OP_SHAPES:
            return _make_uncomputed(FACTORY_OP_SHAPES[name](args), kwargs.get("dtype") or _like_tensor(args).dtype)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):  # a view
            return func(*args, **kwargs)
        many = max((t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
        if many <= MAX_COMPUTED_NUMEL:
            return func(*args, **kwargs)
        self.trace_handle.current.add_compute("pass", many)
        if any(r.alias_info is not None for r in returns):  # in place
            return kwargs["out"] if "out" in kwargs else args[0]
        return func(*tree_map(_expanded_zeros, args), **tree_map(_expanded_zeros, kwargs))


FACTORY_OP_SHAPES: dict[str, Callable[[tuple[Any, ...]], Any]] = {  # what makes a tensor, and of which shape
    **dict.fromkeys(("empty", "zeros"), lambda args: args[0]),
    **dict.fromkeys(("empty_like", "zeros_like"), lambda args: args[0].shape),
    **dict.fromkeys(("new_empty", "new_zeros"), lambda args: args[1]),
}
_DEFAULT_LIKE = torch.zeros(1)


def _make_uncomputed(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.empty(shape, dtype=dtype)
    return x.zero_() if x.numel() <= MAX_COMPUTED_NUMEL else x


def _like_tensor(args: tuple[Any, ...]) -> Tensor:
    return args[0] if isinstance(args[0], Tensor) else _DEFAULT_LIKE


def _expanded_zeros(value: Any) -> Any:
    """As many zeros, which take no memory."""
    return value.new_zeros(1).expand(value.shape) if isinstance(value, Tensor) else value


class ExchangeTracer:
    """An exchange on one bucket of n numbers, step after step."""

    def __init__(self, exchange: Exchange, numel: int, index: int, trace_handle: TraceHandle):
        self.exchange, self.trace_handle = exchange, trace_handle
        self.bucket = Bucket(_make_uncomputed((numel,)), _make_uncomputed((numel,)), index, [(0, "numbers")])

    def trace_step(self, step: int) -> TraceOps:
        self.trace_handle.current = log = Trace()
        with SkipComputeMode(self.trace_handle):
            for awaited in self.exchange(self.bucket, step):
                log.append(WaitEvent(awaited) if isinstance(awaited, ExchangeEvent) else _op_for_yield(awaited))
        return log.to_ops()

    @property
    def state_bytes(self) -> int:
        """What the exchange keeps for itself."""
        kept = (*self.bucket.states.values(), *self.bucket._workspaces.values())
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def _op_for_yield(work: Work) -> TraceOp:
    return WaitMessage(work.message_id, blocking=False) if isinstance(work, TracedWork) else Compute({})


def sent_traffic(ops: TraceOps) -> Traffic:
    """What a rank sends, as comm/meter.py counts it."""
    return sum((_message_traffic(act) for act in ops if isinstance(act, Message)), Traffic())


def _message_traffic(message: Message) -> Traffic:
    size = len(message.members)
    match message.kind:
        case "sum":
            return ring_all_reduce(message.nbytes, size)
        case "gather":
            return ring_all_gather(message.nbytes, size)
        case "transpose":
            return all_to_all(message.nbytes, size)
        case "swap":
            return Traffic(sum(message.send_bytes.values()), len(message.send_bytes))


def trace_compressor(wire: Compressor, trace_handle: TraceHandle) -> Compressor:
    return cast(Compressor, TracedCompressor(wire, trace_handle))


def with_traced_wire(strategy: Any, trace_handle: TraceHandle) -> Any:
    """The strategy with a wire whose work is noted."""
    noted = copy.copy(strategy)
    object.__setattr__(noted, "wire", trace_compressor(strategy.wire, trace_handle))
    return noted


def shift_ranks(ops: TraceOps, offset: int, ranks: int) -> TraceOps:
    """The same among ranks that are `by` further on, round all of them."""

    def shift_op(act: TraceOp) -> TraceOp:
        if not isinstance(act, Message):
            return act
        tells, hears = ({(j + offset) % ranks: n for j, n in some.items()} for some in (act.send_bytes, act.recv_bytes))
        members = tuple(sorted((j + offset) % ranks for j in act.members))
        return dataclasses.replace(act, members=members, send_bytes=tells, recv_bytes=hears)

    return tuple(map(shift_op, ops))
