"""A lossy wire with error feedback for torch's DistributedDataParallel: a communication hook.

    model = DistributedDataParallel(net)
    model.register_comm_hook(*paragan.ddp_hook("int4"))

Each bucket of DDP runs the exchange of comm/compressed_allreduce.py. Its first message leaves from backward. The rest,
which has to wait for the other ranks, runs in a thread of its own: waiting in a callback would block gloo's threads,
and so the messages that are waited for. The answers travel in a second process group, so that each group gets its
messages in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paragan.comm.bucket import Bucket, Exchange, ExchangeEvent
from paragan.comm.compressed_allreduce import CompressedAllReduce, NonFiniteMessage
from paragan.comm.compression.compressors import Compressor, parse_wire
from paragan.comm.exchange import AllReduce
from paragan.comm.process_group import Group, TorchGroup, Work, c10d
from paragan.comm.traffic import Meter
from paragan.core.errors import Diverged, UsageError

STEP = "step"
RESIDUAL = "residual/"


def ddp_hook(
    wire: str | Compressor, *, feedback: float | None = None, process_group: Any = None
) -> tuple[DDPHookState, Callable[[DDPHookState, Any], Future[Tensor]]]:
    """Return the state and the hook for `DistributedDataParallel.register_comm_hook`: gradients travel over `wire`.

    Each network gets one of its own. All ranks call this, in the same order.

    Args:
        wire: how gradients are encoded: "int8", "int4", "sign", "topk", ... (docs/quantized.md), or a compressor.
        feedback: the share of what the wire loses that is sent with the next step, 0 to 1. None: the wire's default.
        process_group: that of the DistributedDataParallel. None: all ranks.

    Raises:
        UsageError: there is no such wire, or no process group yet.
    """
    if not c10d.is_initialized():
        raise UsageError("ddp_hook: there is no process group yet. Use it after torch.distributed.init_process_group")
    if feedback is not None and not 0 <= feedback <= 1:
        raise UsageError(f"feedback={feedback:g}: must be from 0 to 1. Use 1, or None for the default of the wire")
    return DDPHookState(parse_wire(wire), feedback, process_group), exchange_bucket


class _DDPBucket:
    """A bucket of DDP: the parameters in it, and what an exchange needs of it.

    parameters : in the order of their gradients in the bucket's vector
    """

    def __init__(self, parameters: Sequence[Tensor], vector: Tensor, index: int):
        starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        names = [(start, f"parameter {i} of bucket {index}") for i, start in enumerate(starts[:-1])]
        self.parameters = list(parameters)
        self.slices = [slice(start, end) for start, end in itertools.pairwise(starts)]
        self.bucket = Bucket(vector, vector, index, names)

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether it has these parameters, in this order."""
        return len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters))

    def residuals(self) -> dict[Tensor, Tensor]:
        """Return the residual of every parameter, [numel]; views."""
        residual = self.bucket.states.get("residual")
        return {} if residual is None else {p: residual[part] for p, part in zip(self.parameters, self.slices)}


class DDPHookState:
    """The state of the hook of one network: its exchange, residuals and counts.

    group    : the ranks of DDP
    exchange : of each bucket
    meter    : counts what this rank sends
    step     : how many steps were taken
    thread   : completes exchanges
    """

    def __init__(self, wire: Compressor, feedback: float | None, process_group: Any):
        self.meter = Meter()
        self.step = 0
        ddp_group = process_group or c10d.group.WORLD
        self.group: Group = TorchGroup(ddp_group, self.meter)
        self.exchange: Exchange = AllReduce(self.group)
        if wire.lossy:
            second = c10d.new_group(c10d.get_process_group_ranks(ddp_group), use_local_synchronization=True)
            feedback = wire.feedback if feedback is None else feedback
            self.exchange = CompressedAllReduce(wire, self.group, feedback, TorchGroup(second, self.meter))
        self.thread = ThreadPoolExecutor(1, "ddp-hook")
        self._buckets: dict[int, _DDPBucket] = {}
        self._positions: dict[Tensor, int] = {}  # of the parameters, in the order in which DDP first showed them
        self._unplaced: dict[int, Tensor] = {}  # residuals by position, of parameters that are in no bucket

    def find_bucket(self, grad_bucket: Any, vector: Tensor) -> Bucket:
        """Return the bucket of a GradBucket; `vector` [n] holds its gradients. DDP may regroup parameters."""
        parameters, index = grad_bucket.parameters(), grad_bucket.index()
        for p in parameters:
            self._positions.setdefault(p, len(self._positions))
        known = self._buckets.get(index)
        if known is None or not known.holds(parameters):
            if known:
                self._unplaced = self._residuals()
                self._buckets.clear()
            known = _DDPBucket(parameters, vector, index)
            self._buckets[index] = known
            self._place_residuals(known)
        known.bucket.grads = vector
        return known.bucket

    def _place_residuals(self, known: _DDPBucket) -> None:
        for p, part in zip(known.parameters, known.slices):
            residual = self._unplaced.pop(self._positions[p], None)
            if residual is None:
                continue
            if residual.numel() != p.numel():
                raise UsageError(
                    f"{RESIDUAL}{self._positions[p]}: has {residual.numel()} numbers, and the parameter {p.numel()}. "
                    "Use the state of a run of the same network"
                )
            known.bucket.state("residual")[part].copy_(residual)

    def _residuals(self) -> dict[int, Tensor]:
        residuals = dict(self._unplaced)
        for known in self._buckets.values():
            residuals |= {self._positions[p]: residual for p, residual in known.residuals().items()}
        return residuals

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residuals of this rank, which no other rank has, and the number of steps taken.

        Residuals are numbered by the order in which DDP first exchanges the parameters, which depends on the network
        and on DDP's settings only.
        """
        residuals = {f"{RESIDUAL}{number}": tensor.clone() for number, tensor in sorted(self._residuals().items())}
        return {STEP: torch.tensor(self.step), **residuals}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned on this rank.

        DDP groups parameters in its first step in another way than later. So the steps after a resume are those of an
        undisturbed run but for rounding on the wire.

        Raises:
            UsageError: it is no such state.
        """
        unknown = [name for name in state if name != STEP and not re.fullmatch(rf"{RESIDUAL}\d+", name)]
        if unknown or STEP not in state:
            problem = f"holds {unknown[0]}" if unknown else f"lacks {STEP}"
            raise UsageError(f"state: {problem}. Use what state_dict of a ddp_hook returned")
        self.step = int(state[STEP])
        self._buckets.clear()
        self._unplaced = {int(name.removeprefix(RESIDUAL)): value for name, value in state.items() if name != STEP}


def exchange_bucket(state: DDPHookState, bucket: Any) -> Future[Tensor]:
    """Average the gradients of a bucket of DDP over its ranks (the hook)."""
    gradients: Tensor = bucket.buffer()
    vector = gradients if gradients.dtype == torch.float32 else gradients.float()
    future: Future[Tensor] = Future(devices=None if vector.device.type == "cpu" else [vector.device])
    if state.group.size == 1:
        future.set_result(gradients)
        return future
    vector.div_(state.group.size)
    messages = _messages(state.exchange(state.find_bucket(bucket, vector), state.step))
    sent = next(messages)  # from backward, in the order of the buckets
    if bucket.is_last():
        state.step += 1

    def complete() -> None:
        try:
            sent.wait()
            _complete(messages)
            future.set_result(gradients if vector is gradients else gradients.copy_(vector))
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch declares it wrongly

    if vector.device.type == "cpu":
        state.thread.submit(complete)
    else:
        complete()  # on an accelerator waiting orders streams, and does not block this thread
    return future


exchange_bucket.__annotations__.clear()  # torch compares them with classes, and they are texts here


def _messages(exchange: Iterable[Work | ExchangeEvent]) -> Iterator[Work]:
    """Yield the messages of an exchange. The gradient is complete, and no other exchange is waited for."""
    return (awaited for awaited in exchange if not isinstance(awaited, ExchangeEvent))


def _complete(messages: Iterable[Work]) -> None:
    """Wait for the messages of an exchange.

    Gradients that are not finite arrive so on all ranks, and the residual stays what it was.
    """
    with contextlib.suppress(Diverged, NonFiniteMessage):  # a GradScaler skips the step
        for message in messages:
            message.wait()
