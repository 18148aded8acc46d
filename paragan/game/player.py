"""A player: one network that moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paragan.comm.flat_params import BUCKET_BYTES, Flat
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Meter
from paragan.game.ema import Average, Decay
from paragan.game.update_norm import Stride

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

    def settle(self) -> None: ...


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
        average: Decay | None = None,
        rate: Callable[[int], float] = lambda images: 1.0,
        iterate: Callable[[nn.Module], None] = lambda net: None,
        bound: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        watched: bool = False,
    ):
        self.name, self.net, self.rate, self.iterate, self.bound = name, net, rate, iterate, bound
        self.flat = Flat(net, bucket_bytes, owner=name)
        self.meter = Meter()
        self.optimizer = optimizer([_as_parameter(self.flat)] if elementwise else self.flat.parameters)
        self.average = Average(self.flat.params, average) if average else None
        self.stride = Stride(self.flat.params) if watched else None
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.lane_batch = lane_batch
        self.coupled = [layer for layer in net.modules() if isinstance(layer, BatchCoupled)]
        counts = (layer for layer in net.modules() if getattr(layer, "track_running_stats", False))
        self.written = any(layer not in self.coupled for layer in counts)  # by every pass through it
        self.moments = self._lay_out_moments(lane_batch)
        self._moments_on_their_way: Work | None = None
        net.requires_grad_(False)

    def _lay_out_moments(self, lane_batch: int | None) -> Tensor:
        sizes = [layer.moments.numel() for layer in self.coupled]
        moments = self.flat.params.new_zeros(sum(sizes))
        start = 0
        for layer, size in zip(self.coupled, sizes):
            layer.moments, layer.lane_batch = moments[start : start + size], lane_batch
            start += size
        return moments

    def see_lanes_of(self, images: int) -> None:
        """What comes next are lanes of so many images."""
        for layer in self.coupled:
            if layer.lane_batch:
                layer.lane_batch = images

    @contextlib.contextmanager
    def moving(self) -> Generator[None]:
        """Inside, the network's weights get gradients; nowhere else."""
        try:
            self._thaw(True)
            yield
        finally:
            self._thaw(False)

    def _thaw(self, moving: bool) -> None:
        for p in self.flat.parameters:
            p.requires_grad_(moving)

    @contextlib.contextmanager
    def counting(self) -> Generator[None]:
        """Inside, batch moments are counted: in the forward pass of a turn, and not when backward repeats it."""
        try:
            for layer in self.coupled:
                layer.tracking = True
            yield
        finally:
            for layer in self.coupled:
                layer.tracking = False

    def share_moments(self, team: Group) -> None:
        """Start the sum of the batch moments over the team, all forward passes being over; `move` waits."""
        if self.coupled:
            self._moments_on_their_way = team.sum(self.moments)

    def prepare(self, images: int) -> None:
        """What comes before a step, while all replicas still stand at one point: the learning rate, and what happens
        to the network once a step. images: seen when the step has been taken."""
        for group, base in zip(self.optimizer.param_groups, self._base_rates):
            group["lr"] = base * self.rate(images)
        self.iterate(self.net)

    @property
    def learning_rate(self) -> float:
        """The rate of the step being computed."""
        return self.optimizer.param_groups[0]["lr"]

    def move(self, images: int, moved: int) -> None:
        """The optimizer step, then what follows from it. images: seen so far; moved: by this step."""
        self.flat.conclude()
        with self.stride.measured() if self.stride else contextlib.nullcontext():
            self.optimizer.step()
        if self.bound is not None:
            self.flat.params.clamp_(-self.bound, self.bound)
        if self._moments_on_their_way:
            self._moments_on_their_way.wait()
        for layer in self.coupled:
            layer.settle()
        if self.average:
            self.average.follow(self.flat.params, images, moved)

    @contextlib.contextmanager
    def averaged(self) -> Generator[nn.Module]:
        """The network with its average in place of its parameters, for as long as the context lasts."""
        here = self.flat.params.clone()
        if self.average:
            self.flat.params.copy_(self.average.params)
        try:
            yield self.net
        finally:
            self.flat.params.copy_(here)


def _as_parameter(flat: Flat) -> nn.Parameter:
    vector = nn.Parameter(flat.params)
    vector.grad = flat.grads
    return vector
