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

from paragan.comm.bucket import Bucket, Exchange, Moment
from paragan.comm.compression.compressors import Compressor
from paragan.comm.process_group import Group, Solo, Waiter, Work
from paragan.comm.traffic import Meter, Traffic, all_to_all, ring_all_gather, ring_all_reduce
from paragan.plan.virtual_world import ImaginedWorld

SMALL = 4096  # numbers: so few are computed

Kind = Literal["sum", "gather", "transpose", "swap"]


@dataclass(frozen=True)
class Handle:
    """Numbers that this rank computes itself, by what is done: "pass" (over memory), "int8/encode", "int8/decode"."""

    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Post:
    """A message, or a collective of `members`. nbytes: what a rank gives to it; tells, hears: bytes, by rank."""

    number: int
    kind: Kind
    members: tuple[int, ...]
    nbytes: int = 0
    tells: Mapping[int, int] = field(default_factory=dict[int, int])
    hears: Mapping[int, int] = field(default_factory=dict[int, int])
    tag: int = 0


@dataclass(frozen=True)
class Wait:
    """What was posted with this number is waited for. here: on the spot; else when all else that can be done is."""

    number: int
    here: bool


@dataclass(frozen=True)
class Until:
    """The exchange goes on at this moment."""

    moment: Moment


Act = Handle | Post | Wait | Until
Script = tuple[Act, ...]


class Log:
    """What was noted, in order."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        self._posted = 0
        self._computed: Counter[str] = Counter()

    def computed(self, what: str, numbers: int) -> None:
        self._computed[what] += numbers

    def note(self, act: Act) -> None:
        if self._computed:
            self.acts.append(Handle(dict(self._computed)))
            self._computed.clear()
        self.acts.append(act)

    def post(self, kind: Kind, members: tuple[int, ...], **more: Any) -> Noted:
        self._posted += 1
        self.note(Post(self._posted, kind, members, **more))
        return Noted(self, self._posted)

    def script(self) -> Script:
        if self._computed:
            self.acts.append(Handle(dict(self._computed)))
        return tuple(self.acts)


@dataclass(frozen=True)
class Noted:
    """Work that is under way in a script."""

    log: Log
    number: int

    def wait(self) -> None:
        self.log.note(Wait(self.number, here=True))


class Pen:
    """Who writes at present; shared by the groups of a world."""

    log = Log()


@dataclass(frozen=True)
class Noting:
    """A group whose messages are noted. members: its ranks, as the world knows them."""

    pen: Pen
    members: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.members)

    def metered(self, meter: Meter) -> Group:
        return self

    def sum(self, x: Tensor) -> Work:
        return self.pen.log.post("sum", self.members, nbytes=x.nbytes)

    def gather(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        rows = x.new_empty(self.size, *x.shape) if out is None else out
        return rows, self.pen.log.post("gather", self.members, nbytes=x.nbytes)

    def transpose(self, x: Tensor, out: Tensor) -> Work:
        return self.pen.log.post("transpose", self.members, nbytes=x.nbytes)

    def swap(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor], tag: int = 0) -> Work:
        tells, hears = ({self.members[j]: x.nbytes for j, x in some.items()} for some in (tell, hear))
        return self.pen.log.post("swap", self.members, tells=tells, hears=hears, tag=tag)


class NotingWorld(ImaginedWorld):
    """An imagined world whose groups note what they are given to do."""

    def __init__(self, ranks: int, rank: int, pen: Pen):
        super().__init__(ranks, rank)
        self.pen = pen
        self.everyone = self._noting(range(ranks))

    def group(self, ranks: Sequence[int]) -> Group | None:
        return self._noting(ranks) if self.rank in ranks else None

    def link(self, other: int) -> Group:
        return self._noting(sorted((self.rank, other)))

    def waiter(self, group: Group | None = None) -> Waiter:
        return _nobody  # nothing is under way

    def _noting(self, ranks: Iterable[int]) -> Group:
        members = tuple(ranks)
        return Noting(self.pen, members, members.index(self.rank)) if len(members) > 1 else Solo()


class _Nobody(Waiter):
    """A thread that was not started."""

    def __init__(self) -> None:
        self.timeout_s, self.group, self.in_vain = 0.0, None, False

    def end(self) -> None:
        pass


_nobody = _Nobody()


@dataclass(frozen=True)
class Counted:
    """A wire whose work is noted and not done."""

    wire: Compressor
    pen: Pen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        self.pen.log.computed(f"{self.wire.name}/encode", x.numel())

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.pen.log.computed(f"{self.wire.name}/decode", out.numel())


class Uncomputed(TorchDispatchMode):
    """Inside, operations on many numbers are noted as passes over memory and not done: tensors keep whatever their
    memory holds, and most of it is never touched. Few numbers are computed, from zeros."""

    def __init__(self, pen: Pen):
        super().__init__()
        self.pen = pen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, returns = func._schema.name.removeprefix("aten::"), func._schema.returns
        if name in SHAPED:
            return _blank(SHAPED[name](args), kwargs.get("dtype") or _like(args).dtype)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):  # a view
            return func(*args, **kwargs)
        many = max((t.numel() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), default=0)
        if many <= SMALL:
            return func(*args, **kwargs)
        self.pen.log.computed("pass", many)
        if any(r.alias_info is not None for r in returns):  # in place
            return kwargs["out"] if "out" in kwargs else args[0]
        return func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))


SHAPED: dict[str, Callable[[tuple[Any, ...]], Any]] = {  # what makes a tensor, and of which shape
    **dict.fromkeys(("empty", "zeros"), lambda args: args[0]),
    **dict.fromkeys(("empty_like", "zeros_like"), lambda args: args[0].shape),
    **dict.fromkeys(("new_empty", "new_zeros"), lambda args: args[1]),
}
_NOTHING = torch.zeros(1)


def _blank(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.empty(shape, dtype=dtype)
    return x.zero_() if x.numel() <= SMALL else x


def _like(args: tuple[Any, ...]) -> Tensor:
    return args[0] if isinstance(args[0], Tensor) else _NOTHING


def _zeros(value: Any) -> Any:
    """As many zeros, which take no memory."""
    return value.new_zeros(1).expand(value.shape) if isinstance(value, Tensor) else value


class Rehearsal:
    """An exchange on one bucket of n numbers, step after step."""

    def __init__(self, exchange: Exchange, n: int, index: int, pen: Pen):
        self.exchange, self.pen = exchange, pen
        self.bucket = Bucket(_blank((n,)), _blank((n,)), index, [(0, "numbers")])

    def script(self, step: int) -> Script:
        self.pen.log = log = Log()
        with Uncomputed(self.pen):
            for awaited in self.exchange(self.bucket, step):
                log.note(Until(awaited) if isinstance(awaited, Moment) else _yielded(awaited))
        return log.script()

    @property
    def nbytes(self) -> int:
        """What the exchange keeps for itself."""
        kept = (*self.bucket.memories.values(), *self.bucket._scratch.values())
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def _yielded(work: Work) -> Act:
    return Wait(work.number, here=False) if isinstance(work, Noted) else Handle({})


def sent(script: Script) -> Traffic:
    """What a rank sends, as comm/meter.py counts it."""
    return sum((_traffic(act) for act in script if isinstance(act, Post)), Traffic())


def _traffic(post: Post) -> Traffic:
    size = len(post.members)
    match post.kind:
        case "sum":
            return ring_all_reduce(post.nbytes, size)
        case "gather":
            return ring_all_gather(post.nbytes, size)
        case "transpose":
            return all_to_all(post.nbytes, size)
        case "swap":
            return Traffic(sum(post.tells.values()), len(post.tells))


def counted(wire: Compressor, pen: Pen) -> Compressor:
    return cast(Compressor, Counted(wire, pen))


def counting(strategy: Any, pen: Pen) -> Any:
    """The strategy with a wire whose work is noted."""
    noted = copy.copy(strategy)
    object.__setattr__(noted, "wire", counted(strategy.wire, pen))
    return noted


def shifted(script: Script, by: int, ranks: int) -> Script:
    """The same among ranks that are `by` further on, round all of them."""

    def moved(act: Act) -> Act:
        if not isinstance(act, Post):
            return act
        tells, hears = ({(j + by) % ranks: n for j, n in some.items()} for some in (act.tells, act.hears))
        members = tuple(sorted((j + by) % ranks for j in act.members))
        return dataclasses.replace(act, members=members, tells=tells, hears=hears)

    return tuple(map(moved, script))
