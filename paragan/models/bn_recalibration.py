"""TODO: docstring of paragan/models/bn_recalibration.py"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from paragan.core.rng import philox_generator
from paragan.game.player import Player
from paragan.models.sampler import DataSource, LatentSource

BN_RECALIBRATION_IMAGES = 1024


@contextlib.contextmanager
def recalibrated_bn(
    player: Player, source: LatentSource | DataSource, labels: np.ndarray | None, seed: int
) -> Iterator[nn.Module]:
    """The averaged network with batch statistics of its own ("standing", Brock et al. 2019), in eval mode.

    The running statistics belong to the parameters that move; those of the average are measured anew on
    1,024 images, in groups of a lane, a function of the seed. Afterwards everything is as it was.
    """
    layers = [
        layer
        for layer in player.batch_coupled_layers
        if isinstance(layer, nn.Module) and hasattr(layer, "running_mean")
    ]
    with player.using_ema() as net, torch.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
        modes = [(part, part.training) for part in net.modules()]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # of what draws torch's own random numbers
                _recompute_bn_stats(net, layers, player.lane_batch, source, labels, seed)
            net.eval()
            yield net
        finally:
            for part, training in modes:
                part.training = training
            for buffer, value in kept:
                buffer.copy_(value)


def _recompute_bn_stats(
    net: nn.Module,
    layers: list[Any],
    group_size: int | None,
    source: LatentSource | DataSource,
    labels: np.ndarray | None,
    seed: int,
) -> None:
    if not group_size or not layers:
        return
    device = next(net.parameters()).device
    former = [(layer.momentum, layer.lane_batch) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum, layer.tracking, layer.lane_batch = None, True, group_size
    for batch in range(-(-BN_RECALIBRATION_IMAGES // group_size)):
        rng = philox_generator(seed, "standing", position=batch)
        if isinstance(source, DataSource):
            rows = range(batch * group_size, (batch + 1) * group_size)
            z, of = source(rows, seed, 1.0), source.rows(rows)
        else:
            z = torch.from_numpy(rng.standard_normal((group_size, source.size), dtype=np.float32))
            of = rng.integers(len(labels), size=group_size) if labels is not None else None
        y = None if labels is None else torch.from_numpy(labels[of]).to(device)
        net(z.to(device), y)
        for layer in layers:
            layer.apply_moments()
    for layer, (momentum, lane_batch) in zip(layers, former):
        layer.momentum, layer.tracking, layer.lane_batch = momentum, False, lane_batch
