"""Measure the noise scale of a player's gradient: the batch beyond which more images per step stop paying.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018, appendix A.1:
each step has the gradients of b images (of each lane) and that of all B images. Hence, without bias,

    |G|^2    =  (B |G_B|^2 - b |G_b|^2) / (B - b)          squared norm of the true gradient
    tr(S)    =  (|G_b|^2 - |G_B|^2) / (1/b - 1/B)          variance of one image's gradient

and the simple noise scale is tr(S) / |G|^2. Both are averaged over steps first, since a mean of ratios is biased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from paragan.comm.exchange import NoExchange
from paragan.game.turn import Turn, start_exchanges
from paragan.plan.profile.profile import NoiseScale
from paragan.train.session import Session

NUM_RESAMPLES = 1000


class SquaredGradNorms(NamedTuple):
    """Squared norms of one step's gradients."""

    batch: float  # of the total batch
    lane: float  # of a lane, mean over lanes


def estimate_noise_scale(
    norms: Sequence[SquaredGradNorms], lane_images: int, batch_images: int, kimg: float = 0.0
) -> NoiseScale | None:
    """Estimate the noise scale, with a 95 % bootstrap interval over steps.

    Args:
        norms: of some steps.
        lane_images: images of a lane.
        batch_images: images of all lanes.
        kimg: training of the networks, for the record.

    Returns:
        None if a gradient was not finite.
    """
    rows = np.array(norms, dtype=np.float64)
    if not len(rows) or not np.isfinite(rows).all():
        return None
    rng = np.random.default_rng(0)
    resampled_means = rows[rng.integers(len(rows), size=(NUM_RESAMPLES, len(rows)))].mean(1)
    scales = [_scale(SquaredGradNorms(*row), lane_images, batch_images) for row in resampled_means]
    low, high = np.quantile(scales, (0.025, 0.975), method="nearest")
    scale = _scale(SquaredGradNorms(*rows.mean(0)), lane_images, batch_images)
    return NoiseScale(scale, float(low), float(high), kimg)


def _scale(mean_norms: SquaredGradNorms, lane_images: int, batch_images: int) -> float:
    signal = (batch_images * mean_norms.batch - lane_images * mean_norms.lane) / (batch_images - lane_images)
    noise = (mean_norms.lane - mean_norms.batch) / (1 / lane_images - 1 / batch_images)
    return max(0.0, noise) / signal if signal > 0 else math.inf


def measure_grad_norms(session: Session) -> Mapping[str, list[SquaredGradNorms]]:
    """Play a round with device.lanes_per_pass=1. Returns the gradient norms of every turn, by player."""
    clock = session.clock
    round_images = session.run.current_round_images(clock.images)
    next_images = clock.images + round_images
    norms: dict[str, list[SquaredGradNorms]] = {}
    start_exchanges(session.role.round, clock.step)
    for group in session.role.round:
        (turn,) = group
        if turn.needs_new_reals:
            session.lanes.next_micro_batches()
        turn.player.prepare_step(next_images)
        norms.setdefault(turn.player.name, []).append(_measure_turn_norms(turn, session))
        turn.player.step(next_images, round_images)
    clock.advance(round_images)
    return norms


def _measure_turn_norms(turn: Turn, session: Session) -> SquaredGradNorms:
    """Play the passes of a turn. A lane's gradient is what its pass adds to the flat gradient, times the lanes."""
    flat = turn.player.flat
    micro_batches = session.lanes.micro_batches
    step = session.clock.step
    before = torch.zeros_like(flat.grads)
    lane_norms = list[torch.Tensor]()
    with turn.player.exchanging(NoExchange(), step, len(micro_batches)):
        for _ in turn.backward(micro_batches, step):
            lane_norms.append(_squared_norm(len(micro_batches) * (flat.grads - before)))
            before.copy_(flat.grads)
    return SquaredGradNorms(_squared_norm(flat.grads).item(), torch.stack(lane_norms).mean().item())


def _squared_norm(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum()
