"""A network's parameters and gradients as two vectors, cut into buckets that can travel."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, Bucket, ExchangeEvent
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.bucket import Exchange
    from paragan.comm.compression.compressors import Compressor
    from paragan.comm.process_group import Work
    from paragan.comm.traffic import Traffic

ALIGN_BYTES = 64  # bytes: a cache line, and the widest vector instruction
BUCKET_BYTES = 2 << 20
MESSAGE_BYTES = BUCKET_BYTES // 4


def bucket_bytes(wire: Compressor) -> int:
    """How large a bucket should be whose numbers travel over `wire`: few messages, since each costs a latency and gloo
    has two of them under way at a time; and small ones, since the last one's answer is awaited with the link idle."""
    return max(BUCKET_BYTES, MESSAGE_BYTES * BUCKET_BYTES // wire.nbytes(BUCKET_BYTES // 4))


class FlatParams:
    """Lays `net` out in two contiguous vectors, last layer first: the order in which backward visits it.

    Class, names and strides (channels_last) of the network do not change; every tensor starts aligned, and
    the padding between tensors stays zero. Parameters that do not require a gradient are left where they are.
    `owner`, a player's name, stands before the names of its parameters in messages.
    """

    def __init__(self, net: nn.Module, bucket_bytes: int = BUCKET_BYTES, player_name: str = ""):
        named = [(name, p) for name, p in net.named_parameters() if p.requires_grad][::-1]
        self.parameters = [p for _, p in named]
        if not self.parameters:
            raise UsageError(f"{type(net).__name__} has no parameters to train")
        like = self.parameters[0]
        if any((p.dtype, p.device) != (like.dtype, like.device) for p in self.parameters):
            raise UsageError("the parameters of a network must be of one dtype, on one device")
        step = ALIGN_BYTES // like.itemsize
        starts: list[int] = []
        total = 0
        for p in self.parameters:
            starts.append(total)
            total += -(-p.numel() // step) * step
        self.params = torch.zeros(total, dtype=like.dtype, device=like.device)
        self.grads = torch.zeros_like(self.params)
        self.slices: list[tuple[int, int]] = []  # (start, numel) of every parameter
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        first, names = 0, list[tuple[int, str]]()
        for i, ((name, p), start) in enumerate(zip(named, starts)):
            self._flatten_parameter(p, start)
            names.append((start - first, f"{player_name} {name}".strip()))
            end = starts[i + 1] if i + 1 < len(starts) else total
            if like.itemsize * (end - first) >= bucket_bytes or end == total:
                bucket = Bucket(self.params[first:end], self.grads[first:end], len(self.buckets), names)
                self.buckets.append(bucket)
                first, names = end, []
        self._hooks_registered = False
        self._generators: list[Generator[Work | ExchangeEvent]] = []
        self._awaited: list[Work | ExchangeEvent | None] = []
        self._pending_grads: list[int] = []
        self._next_bucket = 0

    @torch.no_grad()
    def _flatten_parameter(self, p: nn.Parameter, start: int) -> None:
        dense = p if _is_dense(p) else p.contiguous()
        view = self.params.as_strided(p.shape, dense.stride(), start)
        view.copy_(p)
        p.data = view
        p.grad = self.grads.as_strided(p.shape, dense.stride(), start)
        self.slices.append((start, p.numel()))
        self._bucket_of[p] = len(self.buckets)

    @contextlib.contextmanager
    def exchanging(self, exchange: Exchange, step: int, passes: int = 1) -> Generator[None]:
        """Run `exchange` on every bucket around the `passes` backward calls made inside.

        All start at once, if they did not with the round. One that yields GRADIENT goes on when the last backward has
        filled its bucket - in bucket order, so that ranks agree, and at the latest when all passes are over, so that a
        parameter the loss never reached leaves as zeros. One that yields work goes on at the end, in turns, so that one
        bucket's next message leaves while another's is awaited. What waits for ARRIVED goes on in `conclude`.
        """
        self.grads.zero_()
        if not self._generators:
            self.start_exchange(exchange, step)
        for i, running in enumerate(self._generators):
            while self._awaited[i] is TURN_STARTED:
                self._awaited[i] = next(running, None)
        self._pending_grads = [len(bucket.names) * passes for bucket in self.buckets]
        self._next_bucket = 0
        if not self._hooks_registered and GRAD_READY in self._awaited:
            self._register_hooks()
        try:
            yield
            self._receive_all()
        except BaseException:
            self.abort()
            raise

    def start_exchange(self, exchange: Exchange, step: int) -> None:
        """Start `exchange` on every bucket, before the player's turn."""
        self._generators = [exchange(bucket, step) for bucket in self.buckets]
        self._awaited = [next(running, None) for running in self._generators]

    def _receive_all(self) -> None:
        self.mark_backward_done()
        under_way = deque(range(len(self.buckets)))
        while under_way:  # receive, in the order sent
            i = under_way.popleft()
            awaited = self._awaited[i]
            if awaited is None or awaited is ALL_RECEIVED:
                continue
            if not isinstance(awaited, ExchangeEvent):
                awaited.wait()
            self._awaited[i] = next(self._generators[i], None)
            under_way.append(i)

    def abort(self) -> None:
        """Leave the parameters as exchanges want them left that do not get to their end."""
        for running in self._generators:
            running.close()
        self._generators, self._awaited, self._next_bucket = [], [], 0

    def finish(self) -> None:
        """Every player's messages of the beat have arrived: exchanges that waited for it may end."""
        for i, running in enumerate(self._generators):
            while self._awaited[i] is not None:
                self._awaited[i] = next(running, None)
        self._generators = []

    def mark_backward_done(self) -> None:
        """All passes are over: what the loss never reached leaves too, as zeros. Called before anything else
        is sent, so that ranks that reached different parameters still send in the same order."""
        self._pending_grads = [0] * len(self.buckets)
        self._resume_ready()

    def traffic(self, exchange: Exchange) -> Traffic:
        """What one rank sends in one step for this network."""
        first, *rest = (exchange.traffic(bucket.grads.numel()) for bucket in self.buckets)
        return sum(rest, start=first)

    def _register_hooks(self) -> None:
        for p in self.parameters:
            frozen = not p.requires_grad
            p.requires_grad_(True)  # a hook on a frozen tensor is refused
            p.register_post_accumulate_grad_hook(self._on_grad)  # pyright: ignore[reportUnknownMemberType]
            p.requires_grad_(not frozen)
        self._hooks_registered = True

    def _on_grad(self, p: Tensor) -> None:
        self._pending_grads[self._bucket_of[p]] -= 1
        self._resume_ready()

    def _resume_ready(self) -> None:
        while self._next_bucket < len(self._awaited) and self._pending_grads[self._next_bucket] == 0:
            i, self._next_bucket = self._next_bucket, self._next_bucket + 1
            while self._awaited[i] is GRAD_READY:
                self._awaited[i] = next(self._generators[i], None)

    def states(self) -> dict[str, Tensor]:
        """Every bucket memory as one vector over the whole network: {name: [total]}."""
        names = sorted({name for bucket in self.buckets for name in bucket.states})
        return {name: torch.cat([bucket.state(name) for bucket in self.buckets]) for name in names}

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        for bucket in self.buckets:
            bucket.states = {}
        for name, vector in states.items():
            start = 0
            for bucket in self.buckets:
                end = start + bucket.grads.numel()
                bucket.state(name).copy_(vector[start:end])
                start = end


def _is_dense(p: Tensor) -> bool:
    """Whether p fills its memory without holes or repeats, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
