"""Batch-norm statistics for the averaged generator ("standing statistics", Brock et al. 2019).

Running statistics belong to the weights that are trained, not to their average (EMA). Those of the average are computed
on 1,024 images of the averaged network; they depend on the seed only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from paragan.core.host_copies import copy_to_device
from paragan.core.philox import philox_generator
from paragan.game.player import Player
from paragan.models.sampler import DataSource, LatentSource

BN_RECALIBRATION_IMAGES = 1024


@contextlib.contextmanager
def recalibrated_bn(
    player: Player, source: LatentSource | DataSource, labels: np.ndarray | None, seed: int
) -> Iterator[nn.Module]:
    """Inside the block, yield the averaged network of a player in eval mode with recomputed batch-norm statistics.

    They are computed over groups of a lane's size, as in training. On exit the weights, buffers and modes of the
    network are restored.

    Args:
        source: latents or data that the images are made from.
        labels: int64, the labels of the data set, drawn at random; None without classes.
    """
    layers = [
        layer
        for layer in player.batch_coupled_layers
        if isinstance(layer, nn.Module) and hasattr(layer, "running_mean")
    ]
    net = player.net
    with player.using_ema(), torch.no_grad():
        saved_buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
        saved_modes = [(module, module.training) for module in net.modules()]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # for networks that use torch's global generator
                _recompute_bn_stats(net, layers, player.lane_batch, source, labels, seed)
            net.eval()
            yield net
        finally:
            for module, training in saved_modes:
                module.training = training
            for buffer, value in saved_buffers:
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
    saved_options = [(layer.momentum, layer.lane_batch) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.tracking = True
        layer.lane_batch = group_size
    for batch in range(-(-BN_RECALIBRATION_IMAGES // group_size)):
        rng = philox_generator(seed, "standing", position=batch)
        if isinstance(source, DataSource):
            indices = range(batch * group_size, (batch + 1) * group_size)
            z = source(indices, seed, 1.0)
            rows = source.rows(indices)
        else:
            z = torch.from_numpy(rng.standard_normal((group_size, source.size), dtype=np.float32))
            rows = rng.integers(len(labels), size=group_size) if labels is not None else None
        y = None if labels is None else copy_to_device(torch.from_numpy(labels[rows]), device)
        net(copy_to_device(z, device), y)
        for layer in layers:
            layer.apply_moments()
    for layer, (momentum, lane_batch) in zip(layers, saved_options):
        layer.momentum = momentum
        layer.tracking = False
        layer.lane_batch = lane_batch
