"""A lossy wire with error feedback for torch's DistributedDataParallel: a communication hook.

    model = DistributedDataParallel(net)
    model.register_comm_hook(*paragan.ddp_hook("int4"))

DDP's buckets are large, so they are cut into chunks, and each runs the exchange of comm/compressed_allreduce.py: while
one is encoded, others are sent, answered and decoded. The first message of a chunk leaves from backward. The rest has
to wait for the other ranks, and a callback that waits would block gloo's threads, and so the messages that it waits
for. So one thread answers, and another one receives the answers, both in the order of sending. Answers travel in a
second process group, so that each group gets its messages in the same order on all ranks.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, Bucket, Exchange, ExchangeEvent
from paragan.comm.compressed_allreduce import CompressedAllReduce, NonFiniteMessage
from paragan.comm.compression.compressors import Compressor, parse_wire
from paragan.comm.exchange import AllReduce
from paragan.comm.flat_params import bucket_bytes
from paragan.comm.process_group import Group, TorchGroup, Work, c10d
from paragan.comm.traffic import Meter
from paragan.core.errors import Diverged, UsageError

STEP = "step"
RESIDUAL = "residual/"
MAX_CHUNKS = 1 << 16  # of a bucket, in the numbers of chunks


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
    """A bucket of DDP: the parameters in it, and the chunks in which it is exchanged.

    parameters : in the order of their gradients in the bucket's vector
    chunks     : equal parts of that vector, wherever parameters begin
    """

    def __init__(self, parameters: Sequence[Tensor], vector: Tensor, index: int, num_chunks: int):
        self.parameters = list(parameters)
        ends = itertools.accumulate((p.numel() for p in parameters), initial=0)
        self.slices = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self.chunks = [
            Bucket(part, part, index * MAX_CHUNKS + i, [(0, f"bucket {index}")])
            for i, part in enumerate(vector.tensor_split(num_chunks))
        ]

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether it has these parameters, in this order."""
        return len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters))

    def set_gradients(self, vector: Tensor) -> None:
        """Exchange `vector` [n] next."""
        for chunk, part in zip(self.chunks, vector.tensor_split(len(self.chunks))):
            chunk.grads = part

    def residuals(self) -> dict[Tensor, Tensor]:
        """Return the residual of every parameter, [numel]."""
        if "residual" not in self.chunks[0].states:
            return {}
        residual = torch.cat([chunk.states["residual"] for chunk in self.chunks])
        return {p: residual[part] for p, part in zip(self.parameters, self.slices)}

    def set_residual(self, residual: Tensor) -> None:
        """Replace the residual by this one, [n]."""
        for chunk, part in zip(self.chunks, residual.tensor_split(len(self.chunks))):
            chunk.state("residual").copy_(part)


class _ChunkExchange:
    """The exchange of a chunk in one step.

    message  : is in flight; None once all have arrived
    answered : the first one has arrived, and its answer is in flight
    """

    def __init__(self, exchange: Exchange, chunk: Bucket, step: int):
        self._generator = exchange(chunk, step)
        self.message = self._send()
        self.answered: concurrent.futures.Future[None] | None = None

    def _send(self) -> Work | None:
        awaited = next(self._generator, ALL_RECEIVED)
        if awaited is GRAD_READY:  # it is
            awaited = next(self._generator, ALL_RECEIVED)
        return None if isinstance(awaited, ExchangeEvent) else awaited

    def answer(self) -> None:
        """Wait for the message in flight, and send the next one."""
        if self.message:
            self.message.wait()
        self.message = self._send()

    def receive(self) -> None:
        """Wait for all messages."""
        if self.answered:
            self.answered.result()
        while self.message:
            self.answer()

    def commit_residual(self) -> None:
        """End, once the step will be applied."""
        next(self._generator, None)


class DDPHookState:
    """The state of the hook of one network: its exchange, residuals and counts.

    group     : the ranks of DDP
    exchange  : of each chunk
    meter     : counts what this rank sends
    step      : how many steps were taken
    answering : the thread that receives the first message of each chunk, and answers
    receiving : the thread that receives the answers
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
        self.answering = concurrent.futures.ThreadPoolExecutor(1, "ddp-hook-answering")
        self.receiving = concurrent.futures.ThreadPoolExecutor(1, "ddp-hook-receiving")
        self.chunk_numel = bucket_bytes(wire) // torch.float32.itemsize
        self._buckets: dict[int, _DDPBucket] = {}
        self._positions: dict[Tensor, int] = {}  # of the parameters, in the order in which DDP first showed them
        self._unplaced: dict[int, Tensor] = {}  # residuals by position, of parameters that are in no bucket

    def find_chunks(self, grad_bucket: Any, vector: Tensor) -> list[Bucket]:
        """Return the chunks of a GradBucket; `vector` [n] holds its gradients. DDP may regroup parameters."""
        parameters, index = grad_bucket.parameters(), grad_bucket.index()
        for p in parameters:
            self._positions.setdefault(p, len(self._positions))
        known = self._buckets.get(index)
        if known is None or not known.holds(parameters):
            if known:
                self.receiving.submit(lambda: None).result()  # the buckets before this one have arrived
                self._unplaced = self._residuals()
                self._buckets.clear()
            known = _DDPBucket(parameters, vector, index, self._num_chunks(vector))
            self._buckets[index] = known
            if self._unplaced:
                known.set_residual(self._collect_residual(known, vector))
        known.set_gradients(vector)
        return known.chunks

    def _num_chunks(self, vector: Tensor) -> int:
        on_cpu = vector.device.type == "cpu"
        return max(1, vector.numel() // self.chunk_numel) if on_cpu else 1

    def _collect_residual(self, known: _DDPBucket, vector: Tensor) -> Tensor:
        residual = torch.zeros_like(vector)
        for p, part in zip(known.parameters, known.slices):
            kept = self._unplaced.pop(self._positions[p], None)
            if kept is None:
                continue
            if kept.numel() != p.numel():
                raise UsageError(
                    f"{RESIDUAL}{self._positions[p]}: has {kept.numel()} numbers, and the parameter {p.numel()}. "
                    "Use the state of a run of the same network"
                )
            residual[part] = kept
        return residual

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
    on_cpu = vector.device.type == "cpu"
    future: Future[Tensor] = Future(devices=None if on_cpu else [vector.device])
    if state.group.size == 1:
        future.set_result(gradients)
        return future
    vector.div_(state.group.size)
    exchanges: list[_ChunkExchange] = []
    for chunk in state.find_chunks(bucket, vector):
        exchange = _ChunkExchange(state.exchange, chunk, state.step)
        if on_cpu:
            exchange.answered = state.answering.submit(exchange.answer)
        exchanges.append(exchange)
    if bucket.is_last():
        state.step += 1

    def complete() -> None:
        try:
            _complete(exchanges)
            future.set_result(gradients if vector is gradients else gradients.copy_(vector))
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch declares it wrongly

    if on_cpu:
        state.receiving.submit(complete)
    else:
        complete()  # waiting for messages orders streams; this thread waits for the check of a lossy bucket only
    return future


exchange_bucket.__annotations__.clear()  # torch compares them with classes, and they are texts here


def _complete(exchanges: Sequence[_ChunkExchange]) -> None:
    """Complete the exchanges of all chunks of a bucket.

    Gradients that are not finite arrive so on all ranks, and the residual of the bucket stays what it was.
    """
    is_finite = True
    for exchange in exchanges:
        try:
            exchange.receive()
        except (Diverged, NonFiniteMessage):  # a GradScaler skips the step
            is_finite = False
    if is_finite:
        for exchange in exchanges:
            exchange.commit_residual()
