"""Record what an exchange does with a bucket, by running it.

The exchange's generator runs on a bucket whose numbers are not computed, with a group that records what is sent, to
whom, and what is waited for. So overlap, the order of messages, periods and rounds of gossip follow from the code that
a real run executes. User-defined exchanges and compressors are predicted in the same way.
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
from paragan.comm.traffic import Meter
from paragan.plan.virtual_world import VirtualWorld

MAX_COMPUTED_NUMEL = 4096  # operations on at most this many numbers are computed

CommKind = Literal["all_reduce", "all_gather", "all_to_all", "send_recv"]


@dataclass(frozen=True)
class Compute:
    """Numbers that this rank computes, by operation: "pass" (over memory), "int8/encode", "int8/decode"."""

    numel_by_op: Mapping[str, int]


@dataclass(frozen=True)
class Message:
    """A message or a collective of `members` that this rank starts."""

    message_id: int
    kind: CommKind
    members: tuple[int, ...]
    nbytes: int = 0  # input of this rank to a collective
    send_bytes: Mapping[int, int] = field(default_factory=dict[int, int])  # by rank
    recv_bytes: Mapping[int, int] = field(default_factory=dict[int, int])  # by rank
    tag: int = 0


@dataclass(frozen=True)
class WaitMessage:
    """Wait for a message that was started before."""

    message_id: int
    blocking: bool  # at once; else after everything else that this rank can do


@dataclass(frozen=True)
class WaitEvent:
    """Wait for an event of the turn."""

    event: ExchangeEvent


TraceOp = Compute | Message | WaitMessage | WaitEvent
TraceOps = tuple[TraceOp, ...]


class Trace:
    """The recorded operations of one step, in order. Consecutive computations are merged."""

    def __init__(self) -> None:
        self.ops: list[TraceOp] = []
        self._num_messages = 0
        self._pending_numel: Counter[str] = Counter()

    def add_compute(self, op: str, numel: int) -> None:
        """Record an operation on `numel` numbers."""
        self._pending_numel[op] += numel

    def append(self, op: TraceOp) -> None:
        """Record an operation other than a computation."""
        self._flush_compute()
        self.ops.append(op)

    def add_message(
        self,
        kind: CommKind,
        members: tuple[int, ...],
        *,
        nbytes: int = 0,
        send_bytes: Mapping[int, int] | None = None,
        recv_bytes: Mapping[int, int] | None = None,
        tag: int = 0,
    ) -> TracedWork:
        """Record a message; the fields are those of `Message`."""
        self._num_messages += 1
        self.append(Message(self._num_messages, kind, members, nbytes, send_bytes or {}, recv_bytes or {}, tag))
        return TracedWork(self, self._num_messages)

    def to_ops(self) -> TraceOps:
        """Return everything that was recorded."""
        self._flush_compute()
        return tuple(self.ops)

    def _flush_compute(self) -> None:
        if self._pending_numel:
            self.ops.append(Compute(dict(self._pending_numel)))
            self._pending_numel.clear()


@dataclass(frozen=True)
class TracedWork:
    """A recorded message in place of work in flight."""

    trace: Trace
    message_id: int

    def wait(self) -> None:
        self.trace.append(WaitMessage(self.message_id, blocking=True))


class TraceHandle:
    """Holder of the current trace, shared by all groups of a world."""

    current = Trace()


@dataclass(frozen=True)
class TracingGroup:
    """A group that records messages."""

    trace_handle: TraceHandle
    members: tuple[int, ...]  # ranks of the world
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)

    def with_meter(self, meter: Meter) -> Group:
        return self

    def all_reduce_sum(self, x: Tensor) -> Work:
        return self.trace_handle.current.add_message("all_reduce", self.members, nbytes=x.nbytes)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        return rows, self.trace_handle.current.add_message("all_gather", self.members, nbytes=x.nbytes)

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        return self.trace_handle.current.add_message("all_to_all", self.members, nbytes=x.nbytes)

    def send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int = 0) -> Work:
        return self.trace_handle.current.add_message(
            "send_recv",
            self.members,
            send_bytes={self.members[j]: x.nbytes for j, x in sends.items()},
            recv_bytes={self.members[j]: x.nbytes for j, x in recvs.items()},
            tag=tag,
        )


class TracingWorld(VirtualWorld):
    """A virtual world whose groups record messages."""

    def __init__(self, ranks: int, rank: int, trace_handle: TraceHandle):
        super().__init__(ranks, rank)
        self.trace_handle = trace_handle
        self.all_ranks = self._make_group(range(ranks))

    def new_group(self, ranks: Sequence[int]) -> Group | None:
        return self._make_group(ranks) if self.rank in ranks else None

    def pair_group(self, other: int) -> Group:
        return self._make_group(sorted((self.rank, other)))

    def make_wait_thread(self, group: Group | None = None) -> WaitThread:
        return _null_wait_thread  # no message is in flight

    def _make_group(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        if len(members) == 1:
            return SingleRankGroup()
        return TracingGroup(self.trace_handle, members, members.index(self.rank))


class _NullWaitThread(WaitThread):
    """Null WaitThread for tracing."""

    def __init__(self) -> None:
        self.timeout_s = 0.0
        self.group = None
        self.cancelled = False

    def close(self) -> None:
        pass


_null_wait_thread = _NullWaitThread()


@dataclass(frozen=True)
class TracedCompressor:
    """A compressor whose work is recorded and not done. Everything else is that of the compressor."""

    wire: Compressor
    trace_handle: TraceHandle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        self.trace_handle.current.add_compute(f"{self.wire.name}/encode", x.numel())

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.trace_handle.current.add_compute(f"{self.wire.name}/decode", out.numel())


class SkipComputeMode(TorchDispatchMode):
    """Record operations on more than MAX_COMPUTED_NUMEL numbers as passes over memory, and skip them.

    The tensors keep whatever their memory holds, and most of it is never touched. Operations on fewer numbers are
    computed, starting from zeros, since exchanges may look at their results.
    """

    def __init__(self, trace_handle: TraceHandle):
        super().__init__()
        self.trace_handle = trace_handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        returns = func._schema.returns
        if name in FACTORY_OP_SHAPES:
            return _empty_tensor(FACTORY_OP_SHAPES[name](args), kwargs.get("dtype") or _like_tensor(args).dtype)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):  # a view
            return func(*args, **kwargs)
        numel = max((t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
        if numel <= MAX_COMPUTED_NUMEL:
            return func(*args, **kwargs)
        self.trace_handle.current.add_compute("pass", numel)
        if any(r.alias_info is not None for r in returns):  # in place
            return kwargs["out"] if "out" in kwargs else args[0]
        return func(*tree_map(_expanded_zeros, args), **tree_map(_expanded_zeros, kwargs))


# Operations that make a tensor -> the shape that their arguments ask for.
FACTORY_OP_SHAPES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **dict.fromkeys(("empty", "zeros"), lambda args: args[0]),
    **dict.fromkeys(("empty_like", "zeros_like"), lambda args: args[0].shape),
    **dict.fromkeys(("new_empty", "new_zeros"), lambda args: args[1]),
}
_DEFAULT_LIKE = torch.zeros(1)


def _empty_tensor(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor with undefined contents; zeros if it is so small that operations on it are computed."""
    x = torch.empty(shape, dtype=dtype)
    return x.zero_() if x.numel() <= MAX_COMPUTED_NUMEL else x


def _like_tensor(args: tuple[Any, ...]) -> Tensor:
    return args[0] if isinstance(args[0], Tensor) else _DEFAULT_LIKE


def _expanded_zeros(value: Any) -> Any:
    """Return zeros of the same shape that share the memory of one number."""
    return value.new_zeros(1).expand(value.shape) if isinstance(value, Tensor) else value


class ExchangeTracer:
    """Runs an exchange on one bucket of `numel` numbers, step after step."""

    def __init__(self, exchange: Exchange, numel: int, index: int, trace_handle: TraceHandle):
        self.exchange = exchange
        self.trace_handle = trace_handle
        self.bucket = Bucket(_empty_tensor((numel,)), _empty_tensor((numel,)), index, [(0, "numbers")])

    def trace_step(self, step: int) -> TraceOps:
        """Run one step and return its operations."""
        trace = Trace()
        self.trace_handle.current = trace
        with SkipComputeMode(self.trace_handle):
            for awaited in self.exchange(self.bucket, step):
                if isinstance(awaited, ExchangeEvent):
                    trace.append(WaitEvent(awaited))
                elif isinstance(awaited, TracedWork):
                    trace.append(WaitMessage(awaited.message_id, blocking=False))
                else:  # work of a group of one rank is done at once
                    trace.append(Compute({}))
        return trace.to_ops()

    @property
    def state_bytes(self) -> int:
        """Bytes that the exchange keeps between steps."""
        tensors = (*self.bucket.states.values(), *self.bucket._workspaces.values())
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def trace_compressor(wire: Compressor, trace_handle: TraceHandle) -> Compressor:
    """Wrap a compressor so that its work is recorded and not done."""
    return cast(Compressor, TracedCompressor(wire, trace_handle))


def with_traced_wire(strategy: Any, trace_handle: TraceHandle) -> Any:
    """Return a copy of the strategy whose wire records its work."""
    traced = copy.copy(strategy)
    object.__setattr__(traced, "wire", trace_compressor(strategy.wire, trace_handle))
    return traced


def shift_ranks(ops: TraceOps, offset: int, ranks: int) -> TraceOps:
    """Add `offset` to every rank in the operations, modulo `ranks`."""

    def shift_op(op: TraceOp) -> TraceOp:
        if not isinstance(op, Message):
            return op
        return dataclasses.replace(
            op,
            members=tuple(sorted((j + offset) % ranks for j in op.members)),
            send_bytes={(j + offset) % ranks: n for j, n in op.send_bytes.items()},
            recv_bytes={(j + offset) % ranks: n for j, n in op.recv_bytes.items()},
        )

    return tuple(map(shift_op, ops))
