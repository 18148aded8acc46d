"""A player: one network that moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paragan.comm.flat_params import BUCKET_BYTES, FlatParams
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Meter
from paragan.game.ema import EMA, EMAConfig
from paragan.game.update_norm import UpdateNorm

Optimizer = torch.optim.Optimizer


@runtime_checkable
class BatchCoupled(Protocol):
    """A layer whose statistics couple the images of a lane (our batch norm).

    moments: [m] sums over the lanes seen this step, counted in forward passes where `tracking` is on; the
    player lays the moments of all layers out in one vector, sums it over the team, and lets every layer settle.
    """

    lane_batch: int | None
    tracking: bool
    moments: Tensor

    def apply_moments(self) -> None: ...


class Player:
    """Its network, its flat vectors, its optimizer, its average.

    optimizer : (parameters) -> torch optimizer. Element-wise ones get the flat vector as one parameter,
                layer-wise ones the network's own.
    rate      : images seen so far -> the factor on the optimizer's learning rate (warm-up, schedules).
    lane_batch: images of a lane in its own turn, where layers couple them
    iterate   : what happens to the network once per step, before its first lane (power iteration).
    bound     : every weight is put back into [-bound, bound] after the optimizer's step (None: left where it is).
    watched   : whether `stride` knows how long its steps are.
    """

    def __init__(
        self,
        name: str,
        net: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        elementwise: bool = True,
        lane_batch: int | None = None,
        ema: EMAConfig | None = None,
        lr_factor: Callable[[int], float] = lambda images: 1.0,
        pre_step: Callable[[nn.Module], None] = lambda net: None,
        weight_clip: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        track_update_norm: bool = False,
    ):
        self.name, self.net, self.lr_factor, self.pre_step, self.weight_clip = (
            name,
            net,
            lr_factor,
            pre_step,
            weight_clip,
        )
        self.flat = FlatParams(net, bucket_bytes, player_name=name)
        self.meter = Meter()
        self.optimizer = optimizer([_as_parameter(self.flat)] if elementwise else self.flat.parameters)
        self.ema = EMA(self.flat.params, ema) if ema else None
        self.update_norm = UpdateNorm(self.flat.params) if track_update_norm else None
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.lane_batch = lane_batch
        self.batch_coupled_layers = [layer for layer in net.modules() if isinstance(layer, BatchCoupled)]
        counts = (layer for layer in net.modules() if getattr(layer, "track_running_stats", False))
        self.mutates_buffers = any(
            layer not in self.batch_coupled_layers for layer in counts
        )  # by every pass through it
        self.moments = self._flatten_moments(lane_batch)
        self._moments_work: Work | None = None
        net.requires_grad_(False)

    def _flatten_moments(self, lane_batch: int | None) -> Tensor:
        sizes = [layer.moments.numel() for layer in self.batch_coupled_layers]
        moments = self.flat.params.new_zeros(sum(sizes))
        start = 0
        for layer, size in zip(self.batch_coupled_layers, sizes):
            layer.moments, layer.lane_batch = moments[start : start + size], lane_batch
            start += size
        return moments

    def set_images_per_lane(self, images_per_lane: int) -> None:
        """What comes next are lanes of so many images."""
        for layer in self.batch_coupled_layers:
            if layer.lane_batch:
                layer.lane_batch = images_per_lane

    @contextlib.contextmanager
    def requiring_grad(self) -> Generator[None]:
        """Inside, the network's weights get gradients; nowhere else."""
        try:
            self._set_requires_grad(True)
            yield
        finally:
            self._set_requires_grad(False)

    def _set_requires_grad(self, requires_grad: bool) -> None:
        for p in self.flat.parameters:
            p.requires_grad_(requires_grad)

    @contextlib.contextmanager
    def tracking_moments(self) -> Generator[None]:
        """Inside, batch moments are counted: in the forward pass of a turn, and not when backward repeats it."""
        try:
            for layer in self.batch_coupled_layers:
                layer.tracking = True
            yield
        finally:
            for layer in self.batch_coupled_layers:
                layer.tracking = False

    def all_reduce_moments(self, team: Group) -> None:
        """Start the sum of the batch moments over the team, all forward passes being over; `move` waits."""
        if self.batch_coupled_layers:
            self._moments_work = team.all_reduce_sum(self.moments)

    def prepare_step(self, total_images: int) -> None:
        """What comes before a step, while all replicas still stand at one point: the learning rate, and what happens
        to the network once a step. images: seen when the step has been taken."""
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            group["lr"] = base * self.lr_factor(total_images)
        self.pre_step(self.net)

    @property
    def learning_rate(self) -> float:
        """The rate of the step being computed."""
        return self.optimizer.param_groups[0]["lr"]

    def step(self, total_images: int, new_images: int) -> None:
        """The optimizer step, then what follows from it. images: seen so far; moved: by this step."""
        self.flat.finish()
        with self.update_norm.measuring_step() if self.update_norm else contextlib.nullcontext():
            self.optimizer.step()
        if self.weight_clip is not None:
            self.flat.params.clamp_(-self.weight_clip, self.weight_clip)
        if self._moments_work:
            self._moments_work.wait()
        for layer in self.batch_coupled_layers:
            layer.apply_moments()
        if self.ema:
            self.ema.update(self.flat.params, total_images, new_images)

    @contextlib.contextmanager
    def using_ema(self) -> Generator[nn.Module]:
        """The network with its average in place of its parameters, for as long as the context lasts."""
        here = self.flat.params.clone()
        if self.ema:
            self.flat.params.copy_(self.ema.params)
        try:
            yield self.net
        finally:
            self.flat.params.copy_(here)


def _as_parameter(flat: FlatParams) -> nn.Parameter:
    vector = nn.Parameter(flat.params)
    vector.grad = flat.grads
    return vector
