"""A lossy wire with error feedback for torch's DistributedDataParallel: a communication hook.

    model = DistributedDataParallel(net)
    model.register_comm_hook(*paragan.ddp_hook("int4"))

The exchange is that of comm/compressed_allreduce.py, bucket by bucket of DDP. Its first message leaves from backward.
The rest, which has to wait for the other ranks, runs in a thread of its own: waiting in a callback would block gloo's
threads, and so the messages that are waited for. The answers travel in a second process group, so that every group gets
its messages in the same order on all ranks.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paragan.comm.bucket import Bucket
from paragan.comm.compressed_allreduce import GradientShards, is_finite
from paragan.comm.compression.compressors import Compressor, Wire
from paragan.comm.process_group import Group, TorchGroup, c10d
from paragan.comm.traffic import Meter
from paragan.core.errors import UsageError
from paragan.core.schema import config_class, from_dict

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


def parse_wire(wire: str | Compressor) -> Compressor:
    """Return the wire of a name. A compressor is returned as it is.

    Raises:
        UsageError: there is no such wire; names the nearest.
    """
    return from_dict(_WireField, {"wire": wire}).wire


@config_class
class _WireField:
    wire: Wire


class _DDPBucket:
    """A bucket of DDP: the parameters in it, and what an exchange needs of it.

    parameters : in the order of their gradients in the bucket's vector
    """

    def __init__(self, parameters: Sequence[Tensor], vector: Tensor, index: int, offset: int):
        starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        names = [(start, f"parameter {offset + i}") for i, start in enumerate(starts[:-1])]
        self.parameters = list(parameters)
        self.slices = [slice(start, end) for start, end in itertools.pairwise(starts)]
        self.bucket = Bucket(vector, vector, index, names)

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are its parameters."""
        return len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters))

    def residuals(self) -> dict[Tensor, Tensor]:
        """Return the residual of every parameter, [numel]; views."""
        residual = self.bucket.states.get("residual")
        return {} if residual is None else {p: residual[part] for p, part in zip(self.parameters, self.slices)}


class DDPHookState:
    """What the hook keeps between the steps of one network.

    wire     : how gradients are encoded
    feedback : the share of what the wire loses that is sent with the next step
    meter    : counts what this rank sends
    step     : how many steps were taken
    """

    def __init__(self, wire: Compressor, feedback: float | None, process_group: Any):
        self.wire = wire
        self.feedback = wire.feedback if feedback is None else feedback
        self.meter = Meter()
        self.step = 0
        first = process_group or c10d.group.WORLD
        second = c10d.new_group(c10d.get_process_group_ranks(first), use_local_synchronization=True)
        self.requests: Group = TorchGroup(first, self.meter)
        self.answers: Group = TorchGroup(second, self.meter)
        self.thread = ThreadPoolExecutor(1, "ddp-hook")
        self._buckets: dict[int, _DDPBucket] = {}
        self._positions: dict[Tensor, int] = {}  # of the parameters, in the order in which DDP first showed them
        self._waiting: dict[int, Tensor] = {}  # residuals by position, of parameters that are in no bucket at present

    def bucket(self, grad_bucket: Any, vector: Tensor) -> Bucket:
        """Return the bucket of a GradBucket; `vector` [n] holds its gradients. DDP may regroup parameters."""
        parameters, index = grad_bucket.parameters(), grad_bucket.index()
        for p in parameters:
            self._positions.setdefault(p, len(self._positions))
        known = self._buckets.get(index)
        if known is None or not known.holds(parameters):
            if known:
                self._waiting = self._residuals()
                self._buckets.clear()
            known = _DDPBucket(parameters, vector, index, self._positions[parameters[0]])
            self._buckets[index] = known
            self._place_residuals(known)
        known.bucket.grads = vector
        return known.bucket

    def _place_residuals(self, known: _DDPBucket) -> None:
        waiting = [(p, part) for p, part in zip(known.parameters, known.slices) if self._positions[p] in self._waiting]
        for p, part in waiting:
            residual = self._waiting.pop(self._positions[p])
            if residual.numel() != p.numel():
                raise UsageError(
                    f"{RESIDUAL}{self._positions[p]}: has {residual.numel()} numbers, and the parameter {p.numel()}. "
                    "Use the state of a run of the same network"
                )
            known.bucket.state("residual")[part].copy_(residual)

    def _residuals(self) -> dict[int, Tensor]:
        residuals = dict(self._waiting)
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
        unknown = [name for name in state if name != STEP and not name.removeprefix(RESIDUAL).isdecimal()]
        if unknown or STEP not in state:
            problem = f"holds {unknown[0]}" if unknown else f"lacks {STEP}"
            raise UsageError(f"state: {problem}. Use what state_dict of a ddp_hook returned")
        self.step = int(state[STEP])
        self._buckets.clear()
        self._waiting = {int(name.removeprefix(RESIDUAL)): value for name, value in state.items() if name != STEP}


def exchange_bucket(state: DDPHookState, bucket: Any) -> Future[Tensor]:
    """Average the gradients of a bucket of DDP over its ranks (the hook)."""
    gradients: Tensor = bucket.buffer()
    vector = gradients if gradients.dtype == torch.float32 else gradients.float()
    ours = state.bucket(bucket, vector)
    step = state.step
    if bucket.is_last():
        state.step += 1
    future: Future[Tensor] = Future(devices=None if vector.device.type == "cpu" else [vector.device])
    size, rank = state.requests.size, state.requests.rank
    if size == 1:
        future.set_result(gradients)
        return future
    vector.div_(size)
    if not state.wire.lossy:
        work = state.requests.all_reduce_sum(vector)

        def finish() -> None:
            work.wait()

    else:
        shards = GradientShards(ours, state.wire, size, state.feedback)
        seed = zlib.crc32(f"{step} {rank} {ours.index}".encode()) >> 1 & ~1  # seed + 1 is that of the mean
        work = state.requests.all_to_all(shards.encode_gradient(seed), shards.received)

        def finish() -> None:
            work.wait()
            encoded_means, answers = state.answers.all_gather(shards.encode_mean(rank, seed + 1), shards.received)
            answers.wait()
            shards.decode_mean(encoded_means)
            if is_finite(vector):  # else a GradScaler skips the step, and the residual stays what it was
                shards.commit_residual()

    def complete() -> None:
        try:
            finish()
            future.set_result(gradients if vector is gradients else gradients.copy_(vector))
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch declares it wrongly

    if vector.device.type == "cpu":
        state.thread.submit(complete)
    else:
        complete()  # on an accelerator waiting orders streams, and does not block this thread
    return future


exchange_bucket.__annotations__.clear()  # torch compares them with classes, and they are texts here
