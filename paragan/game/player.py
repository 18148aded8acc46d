"""A player: one network with its optimizer, flat parameter vectors and moving average.

Batch norm normalises over a lane, not over a pass (nets/lane_batch_norm.py). A player keeps the sums of all such
layers, and those of synchronised buffers, in one vector and sums it over the team once per step, so that buffers agree
on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paragan.comm.flat_params import BUCKET_BYTES, FlatParams
from paragan.comm.flat_shards import FlatShards
from paragan.comm.process_group import Group, Work
from paragan.game.ema import EMA, EMAConfig
from paragan.game.gradient_clip import GradientClip
from paragan.game.parameter_groups import GroupedParameters, ParameterGroup, as_parameter
from paragan.game.sharded_state import ShardedEMA, ShardedState
from paragan.game.synchronised_buffers import find_synchronised
from paragan.game.trained_parameters import Optimizer, TrainedParameters
from paragan.game.update_norm import UpdateNorm


@runtime_checkable
class BatchCoupled(Protocol):
    """A layer whose statistics couple the images of a lane (LaneBatchNorm).

    moments : [m] sums over the lanes of this step, from forward passes while `tracking` is on. The player keeps those
              of all layers in one vector, sums it over the team, and calls `apply_moments` of every layer
    """

    lane_batch: int | None
    tracking: bool
    moments: Tensor

    def apply_moments(self) -> None: ...


class Player(TrainedParameters):
    """One network that is trained.

    optimizer         : (parameters, or groups of them) -> torch optimizer
    elementwise       : the optimizer gets the flat vector as one parameter; otherwise the network's own parameters
    lane_batch        : images of a lane in its own turn, for layers that couple them
    ema               : how its average follows; None: no average
    lr_factor         : images seen so far -> the factor on the learning rate (warm-up, schedules)
    pre_step          : what is done to the network once per step, before its first pass (power iteration)
    images_before     : real images seen before the round of the current step
    max_norm          : the gradient is clipped to this norm before the optimizer steps (None: not clipped)
    groups            : groups of parameters in the optimizer (none: one group)
    weight_clip       : weights are clipped to [-weight_clip, weight_clip] after every step (None: not clipped)
    bucket_bytes      : the size of the buckets in which gradients are exchanged
    fragments         : parts that buckets do not cross (comm/flat_params.py)
    track_update_norm : whether `update_norm` measures the size of updates
    """

    def __init__(
        self,
        name: str,
        net: nn.Module,
        optimizer: Callable[[list[Any]], Optimizer],
        *,
        elementwise: bool = True,
        lane_batch: int | None = None,
        ema: EMAConfig | None = None,
        lr_factor: Callable[[int], float] = lambda images: 1.0,
        pre_step: Callable[[nn.Module], None] = lambda net: None,
        max_norm: float | None = None,
        groups: Sequence[ParameterGroup] = (),
        weight_clip: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        fragments: int = 1,
        track_update_norm: bool = False,
    ):
        self.name = name
        self.net = net
        self.lr_factor = lr_factor
        self.pre_step = pre_step
        self.weight_clip = weight_clip
        self.flat = FlatParams.from_network(net, bucket_bytes, player_name=name, fragments=fragments)
        self._grouped = GroupedParameters(net, self.flat, groups) if groups else None
        if self._grouped:
            parameters = self._grouped.for_optimizer(elementwise)
        else:
            parameters = [as_parameter(self.flat, self._full_span)] if elementwise else self.flat.parameters
        self._make_optimizer = optimizer
        self._elementwise = elementwise
        self.sharded: ShardedState | None = None  # the state of the optimizer, if each rank keeps a part
        super().__init__((self.flat,), optimizer(parameters), has_average=ema is not None)
        self.ema_config = ema
        self.gradient_clip = None if max_norm is None else GradientClip(self.flat.grads, max_norm)
        self.update_norm = UpdateNorm(self.flat.params) if track_update_norm else None
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.lane_batch = lane_batch
        self.images_before = 0
        self.batch_coupled_layers = [layer for layer in net.modules() if isinstance(layer, BatchCoupled)]
        self.synchronised = find_synchronised(net, _dtype_of_sums(self.flat))
        counting = (layer for layer in net.modules() if getattr(layer, "track_running_stats", False))
        is_counting = any(layer not in self.batch_coupled_layers for layer in counting)
        self.mutates_buffers = is_counting or bool(self.synchronised)  # in every pass
        self.moments = self._flatten_moments(lane_batch)
        self._moments_work: Work | None = None
        net.requires_grad_(False)

    @property
    def number(self) -> int:
        """0: G, 1: D."""
        return int(self.name == "D")

    @property
    def _full_span(self) -> slice:
        return slice(0, len(self.flat.params))

    def shard(self, group: Group) -> None:
        """Keep the optimizer state and the average of this rank's part of the parameters only.

        Args:
            group: whose exchange is a `ReduceScatter`. From now on its ranks step, save and use the average together.
        """
        assert self._elementwise
        assert not self.sharded
        shards = FlatShards(self.flat, group)
        spans = self._grouped.spans if self._grouped else [[self._full_span]]
        self.sharded = ShardedState(shards, spans, group.with_meter(self.meter))
        owned = self.sharded.parameters()
        optimizer = self._make_optimizer(self._grouped.with_options(owned) if self._grouped else owned[0])
        self.sharded.take_state(optimizer, self.optimizer)
        self.optimizer = optimizer
        self.averages = tuple(ShardedEMA(average, shards) for average in self.averages)
        if self.gradient_clip:
            self.gradient_clip.group = self.sharded.step_group

    @property
    def _counting_layers(self) -> list[BatchCoupled]:
        """Everything that has `moments`."""
        return [*self.batch_coupled_layers, *self.synchronised]

    def _flatten_moments(self, lane_batch: int | None) -> Tensor:
        sizes = [layer.moments.numel() for layer in self._counting_layers]
        moments = self.flat.params.new_zeros(sum(sizes), dtype=_dtype_of_sums(self.flat))
        start = 0
        for layer, size in zip(self._counting_layers, sizes):
            layer.moments = moments[start : start + size]
            layer.lane_batch = lane_batch
            start += size
        return moments

    def set_images_per_lane(self, images_per_lane: int) -> None:
        """Set the number of images per lane for the next passes."""
        for layer in self.batch_coupled_layers:
            if layer.lane_batch:
                layer.lane_batch = images_per_lane

    @contextlib.contextmanager
    def requiring_grad(self) -> Generator[None]:
        """Let the weights get gradients inside this context only."""
        try:
            self.set_requires_grad(True)
            yield
        finally:
            self.set_requires_grad(False)

    @property
    def ema(self) -> EMA | None:
        """The average of the parameters, if there is one."""
        return self.averages[0] if self.averages else None

    @contextlib.contextmanager
    def tracking_moments(self) -> Generator[None]:
        """Count batch moments inside this context: in the forward pass of a turn, not when backward recomputes it."""
        try:
            for layer in self._counting_layers:
                layer.tracking = True
            yield
        finally:
            for layer in self._counting_layers:
                layer.tracking = False

    def all_reduce_moments(self, team: Group) -> None:
        """Start to sum the batch moments over the team, after the last forward pass. `step` waits for it."""
        if self.moments.numel():
            self._moments_work = team.all_reduce_sum(self.moments)

    def drop_round(self) -> None:
        """Drop what a round that broke off has begun. Parameters and buffers that it has changed stay."""
        self.abort_exchange()
        self._moments_work = None
        self.moments.zero_()
        if self.gradient_clip:
            self.gradient_clip.pop_norms()

    def prepare_step(self, total_images: int, new_images: int = 0) -> None:
        """Set the learning rate and call `pre_step`, while all replicas are still equal.

        Args:
            total_images: real images seen after the step.
            new_images: real images of the round.
        """
        self.images_before = total_images - new_images
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            group["lr"] = base * self.lr_factor(total_images)
        self.pre_step(self.net)

    def step(self, total_images: int, new_images: int, *, update: bool = True) -> None:
        """Clip the gradient and take the optimizer step; then clip weights, apply batch moments and update the average.

        Args:
            total_images: real images seen after the step.
            new_images: real images of this step.
            update: whether the optimizer steps; false where gradients are accumulated.
        """
        self.finish_exchange()
        with self._grouped.freezing(total_images - new_images) if self._grouped else contextlib.nullcontext():
            if update:
                self._update()
            if self.weight_clip is not None:
                self.flat.params.clamp_(-self.weight_clip, self.weight_clip)
        if self._moments_work:
            self._moments_work.wait()
        for layer in self._counting_layers:
            layer.apply_moments()
        if self.ema_config:
            self.update_average(self.ema_config.decay(total_images, new_images))

    def _update(self) -> None:
        """Clip the gradient, and take the step of the optimizer; gather the parameters if it is sharded."""
        if self.gradient_clip:
            self.gradient_clip.clip()
        with self.update_norm.measuring_step() if self.update_norm else contextlib.nullcontext():
            self._step_optimizer()
            if self.sharded:
                self.sharded.gather_params()

    def _step_optimizer(self) -> None:
        self.optimizer.step()


def _dtype_of_sums(flat: FlatParams) -> torch.dtype:
    return torch.promote_types(flat.params.dtype, torch.float32)
