"""Parameters and gradients as two flat vectors, cut into buckets that are exchanged.

Exchanges overlap with backward: post-accumulate hooks count down the parameters of each bucket that still lack a
gradient, and a complete bucket's exchange continues at once. No hooks are registered if nothing is exchanged.
Parameters that the loss does not use are sent as zeros, before anything else is sent.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, Bucket, ExchangeEvent
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.comm.bucket import Exchange
    from paragan.comm.compression.compressors import Compressor
    from paragan.comm.process_group import Work
    from paragan.comm.traffic import Traffic

ALIGN_BYTES = 64  # a cache line, and the widest vector instruction
BUCKET_BYTES = 2 << 20  # of float32 numbers
MESSAGE_BYTES = BUCKET_BYTES // 4  # the least that a bucket's numbers should take on a lossy wire


def bucket_bytes(wire: Compressor, *, single_bucket: bool = False) -> int:
    """Return how many bytes of float32 numbers a bucket should have that is sent over `wire`.

    Args:
        wire: how the numbers are encoded.
        single_bucket: whether a bucket has to be the whole vector of a network.

    Few messages are good, since each costs a latency and gloo has two in flight at a time. Small ones are good too,
    since the link is idle while the answer to the last one is awaited. 2 MB of numbers, or as many as become half a
    megabyte on a lossy wire, is the compromise.
    """
    if single_bucket:
        return sys.maxsize
    return max(BUCKET_BYTES, MESSAGE_BYTES * BUCKET_BYTES // wire.nbytes(BUCKET_BYTES // 4))


class FlatParams:
    """Moves parameters of one dtype and device into two contiguous vectors, last layer first: the order of backward.

    Class, names and strides (channels_last) of the network do not change. Every tensor starts aligned, and the padding
    between tensors stays zero. Parameters that are not given are left where they are.

    named_parameters : in the order of the forward pass; the names are for messages
    params, grads    : [total] the parameters and their gradients
    slices           : (start, numel) of every parameter
    buckets          : slices of both vectors of at least `bucket_bytes`; none crosses the border between two of the
                       `fragments`, which are contiguous and of about equal size
    share            : gradients are multiplied by this before they are exchanged
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        bucket_bytes: int = BUCKET_BYTES,
        fragments: int = 1,
    ):
        named = list(reversed(named_parameters))
        self.parameters = [p for _, p in named]
        self.share = 1.0
        like = self.parameters[0]
        step = ALIGN_BYTES // like.itemsize
        starts: list[int] = []
        total = 0
        for p in self.parameters:
            starts.append(total)
            total += -(-p.numel() // step) * step
        self.params = torch.zeros(total, dtype=like.dtype, device=like.device)
        self.grads = torch.zeros_like(self.params)
        self.slices: list[tuple[int, int]] = []
        self.buckets: list[Bucket] = []
        check_fragments(fragments, len(named), f"the player of {named[-1][0]}")
        fragment_ends = _fragment_ends([*starts[1:], total], fragments)
        self._bucket_of: list[int] = []  # by the number of the parameter
        first = 0
        names: list[tuple[int, str]] = []
        padding: list[slice] = []
        for i, ((name, p), start) in enumerate(zip(named, starts)):
            self._flatten_parameter(p, start)
            names.append((start - first, name))
            end = starts[i + 1] if i + 1 < len(starts) else total
            if start + p.numel() < end:
                padding.append(slice(start - first + p.numel(), end - first))
            if like.itemsize * (end - first) >= bucket_bytes or end in fragment_ends:
                fragment = bisect.bisect_left(fragment_ends, end)
                views = (self.params[first:end], self.grads[first:end])
                self.buckets.append(Bucket(*views, len(self.buckets), names, padding, fragment))
                first = end
                names = []
                padding = []
        self._hooks: list[RemovableHandle] = []
        self._generators: list[Generator[Work | ExchangeEvent]] = []  # the exchange of each bucket
        self._awaited: list[Work | ExchangeEvent | None] = []  # what each waits for; None: it has ended
        self._pending_grads: list[int] = []  # how many gradients each bucket still lacks
        self._next_bucket = 0  # the first that lacks some

    @classmethod
    def from_network(
        cls, net: nn.Module, bucket_bytes: int = BUCKET_BYTES, player_name: str = "", fragments: int = 1
    ) -> Self:
        """Move all parameters of a network that require gradients.

        Args:
            net: the network.
            bucket_bytes: the least size of a bucket.
            player_name: precedes the names of parameters in messages.
            fragments: parts that buckets do not cross.

        Raises:
            UsageError: there are none, or fewer than fragments, or they have several dtypes or devices.
        """
        named = [(f"{player_name} {name}".strip(), p) for name, p in net.named_parameters() if p.requires_grad]
        if not named:
            raise UsageError(f"{type(net).__name__}: has no parameters to train")
        if len({(p.dtype, p.device) for _, p in named}) > 1:
            raise UsageError(
                f"{type(net).__name__}: has parameters of several dtypes or devices. Use one dtype and one device"
            )
        return cls(named, bucket_bytes, fragments)

    @torch.no_grad()
    def _flatten_parameter(self, p: nn.Parameter, start: int) -> None:
        dense = p if _is_dense(p) else p.contiguous()
        view = self.params.as_strided(p.shape, dense.stride(), start)
        view.copy_(p)
        p.data = view
        p.grad = self.grads.as_strided(p.shape, dense.stride(), start)
        self.slices.append((start, p.numel()))
        self._bucket_of.append(len(self.buckets))

    @contextlib.contextmanager
    def exchanging(self, exchange: Exchange, step: int, passes: int = 1) -> Generator[None]:
        """Run `exchange` on every bucket around the backward calls made in this context.

        All generators start at once, unless `start_exchange` has started them. One that waits for

        * GRAD_READY continues when the last backward has filled its bucket: in bucket order, which is the same on all
          ranks, and at the latest when all passes are over, so that parameters the loss does not use are sent as zeros;
        * work continues at the end, round-robin, so that one bucket sends its next message while another waits;
        * ALL_RECEIVED continues in `finish`.

        Args:
            exchange: what to run.
            step: the player's step.
            passes: how many backward calls there will be.
        """
        self.clear_grads()
        if not self._generators:
            self.start_exchange(exchange, step)
        for i, generator in enumerate(self._generators):
            while self._awaited[i] is TURN_STARTED:
                self._awaited[i] = next(generator, None)
        self._pending_grads = [len(bucket.names) * passes for bucket in self.buckets]
        self._next_bucket = 0
        if not self._hooks and GRAD_READY in self._awaited:
            self.register_hooks()
        try:
            yield
            self._receive_all()
        except BaseException:
            self.abort()
            raise

    def clear_grads(self) -> None:
        """Prepare the gradients for the first backward pass of a turn."""
        self.grads.zero_()

    def start_exchange(self, exchange: Exchange, step: int) -> None:
        """Start `exchange` on every bucket, before the player's turn."""
        self._generators = [exchange(bucket, step) for bucket in self.buckets]
        self._awaited = [next(generator, None) for generator in self._generators]

    def _receive_all(self) -> None:
        self.mark_backward_done()
        pending = deque(range(len(self.buckets)))
        while pending:  # receive in the order of sending
            i = pending.popleft()
            awaited = self._awaited[i]
            if awaited is None or awaited is ALL_RECEIVED:
                continue
            if not isinstance(awaited, ExchangeEvent):
                awaited.wait()
            self._awaited[i] = next(self._generators[i], None)
            pending.append(i)

    def abort(self) -> None:
        """Close all exchanges that have not ended; each restores the parameters it has moved."""
        for generator in self._generators:
            generator.close()
        self._generators = []
        self._awaited = []
        self._next_bucket = 0

    def finish(self) -> None:
        """Complete the exchanges, after the messages of all players that move together have arrived."""
        for i, generator in enumerate(self._generators):
            while self._awaited[i] is not None:
                self._awaited[i] = next(generator, None)
        self._generators = []

    def mark_backward_done(self) -> None:
        """Send all buckets that still lack gradients; parameters that the loss does not use count as zeros.

        Called before anything else is sent, so that ranks whose losses use different parameters send in the same order.
        """
        self._pending_grads = [0] * len(self.buckets)
        self._resume_ready()

    def traffic(self, exchange: Exchange) -> Traffic:
        """Return what one rank sends in one step for this network."""
        first, *rest = (exchange.traffic(b.grads.numel(), b.grads.itemsize) for b in self.buckets)
        return sum(rest, start=first)

    def register_hooks(self) -> None:
        """Have `count_gradient` called whenever backward has added to the gradient of a parameter."""
        for i, p in enumerate(self.parameters):
            frozen = not p.requires_grad
            p.requires_grad_(True)  # torch refuses a hook on a frozen tensor
            count = functools.partial(self.count_gradient, i)  # to look a tensor up would take longer
            hook: RemovableHandle = p.register_post_accumulate_grad_hook(count)  # pyright: ignore
            self._hooks.append(hook)  # pyright: ignore[reportUnknownArgumentType]
            p.requires_grad_(not frozen)

    @property
    def holds_network(self) -> bool:
        """Whether the parameters of the network are in these vectors; false once something else has moved them."""
        start = self.params.data_ptr()
        itemsize = self.params.itemsize
        return all(
            p.data_ptr() == start + first * itemsize or not numel
            for p, (first, numel) in zip(self.parameters, self.slices)
        )

    def release(self) -> None:
        """Stop exchanging gradients, and let the parameters require gradients again, where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for p in self.parameters:
            p.requires_grad_(True)

    def count_gradient(self, number: int, p: Tensor) -> None:
        """Note that a backward pass has added its part of the gradient of p, the parameter of this number."""
        self._pending_grads[self._bucket_of[number]] -= 1
        self._resume_ready()

    def _resume_ready(self) -> None:
        while self._next_bucket < len(self._awaited) and self._pending_grads[self._next_bucket] == 0:
            i = self._next_bucket
            self._next_bucket += 1
            if not self.share:
                self.buckets[i].grads.zero_()  # also what is not finite, such as the mean of no samples
            elif self.share != 1:
                self.buckets[i].grads.mul_(self.share)
            while self._awaited[i] is GRAD_READY:
                self._awaited[i] = next(self._generators[i], None)

    def states(self) -> dict[str, Tensor]:
        """Return every bucket state as one vector over the network: {name: [total]}; zeros where a bucket has none."""
        names = sorted({name for bucket in self.buckets for name in bucket.states})
        return {
            name: torch.cat([bucket.states.get(name, torch.zeros_like(bucket.grads)) for bucket in self.buckets])
            for name in names
        }

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all bucket states by what `states` returned; the buckets may have other sizes now."""
        for bucket in self.buckets:
            bucket.states = {}
        for name, vector in states.items():
            start = 0
            for bucket in self.buckets:
                end = start + bucket.grads.numel()
                bucket.state(name).copy_(vector[start:end])
                start = end


def check_fragments(fragments: int, num_parameters: int, owner: str) -> None:
    """Raise UsageError if there are fewer parameters than fragments. owner: of the parameters, for the message."""
    if fragments > num_parameters:
        raise UsageError(
            f"strategy.fragments={fragments}: a fragment holds whole parameters, and {owner} has {num_parameters}. Use "
            f"strategy.fragments={num_parameters} or less"
        )


def _fragment_ends(ends: Sequence[int], fragments: int) -> list[int]:
    """Return where the fragments of a vector end: each after a parameter, so that they are of about equal size.

    Args:
        ends: of all parameters, at least as many as fragments.
        fragments: how many there are to be.
    """
    chosen: list[int] = []
    first = 0  # the number of the first parameter of the next fragment
    for i in range(1, fragments):
        ideal = i * ends[-1] / fragments
        last = min(range(first, len(ends) - fragments + i), key=lambda number: abs(ends[number] - ideal))
        chosen.append(ends[last])
        first = last + 1
    return [*chosen, ends[-1]]


def _is_dense(p: Tensor) -> bool:
    """Return whether p fills its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
