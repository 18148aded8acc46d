"""How noisy a player's gradient is: beyond which batch more images a step stop paying.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018, appendix A.1:
one step gives the gradient of b images many times, lane by lane, and that of all B together. Hence, without bias,

    |G|^2    =  (B |G_B|^2 - b |G_b|^2) / (B - b)          the true gradient's squared length
    tr(S)    =  (|G_b|^2 - |G_B|^2) / (1/b - 1/B)          the variance of one image's gradient

and the simple noise scale is tr(S) / |G|^2, of means over steps: of two averages, since the mean of ratios is biased.
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
    """Of one step's gradient, squared: of the total batch, and the mean over lanes of theirs."""

    batch: float
    lane: float


def estimate_noise_scale(
    norms: Sequence[SquaredGradNorms], lane_images: int, batch_images: int, kimg: float = 0.0
) -> NoiseScale | None:
    """From some steps with lanes of so many images, `whole` in all. None where gradients were not finite."""
    lengths = np.array(norms, dtype=np.float64)
    if not len(lengths) or not np.isfinite(lengths).all():
        return None
    rng = np.random.default_rng(0)
    drawn = lengths[rng.integers(len(lengths), size=(NUM_RESAMPLES, len(lengths)))].mean(1)
    scales = [_scale(SquaredGradNorms(*row), lane_images, batch_images) for row in drawn]
    low, high = np.quantile(scales, (0.025, 0.975), method="nearest")
    return NoiseScale(
        _scale(SquaredGradNorms(*lengths.mean(0)), lane_images, batch_images), float(low), float(high), kimg
    )


def _scale(mean_norms: SquaredGradNorms, lane_images: int, batch_images: int) -> float:
    signal = (batch_images * mean_norms.batch - lane_images * mean_norms.lane) / (batch_images - lane_images)
    noise = (mean_norms.lane - mean_norms.batch) / (1 / lane_images - 1 / batch_images)
    return max(0.0, noise) / signal if signal > 0 else math.inf


def measure_grad_norms(session: Session) -> Mapping[str, list[SquaredGradNorms]]:
    """Play a round lane by lane (device.lanes_per_pass=1); the lengths of every turn's gradients, by player."""
    s, moved = session, session.run.current_round_images(session.clock.images)
    found: dict[str, list[SquaredGradNorms]] = {}
    start_exchanges(s.role.round, s.clock.step)
    for beat in s.role.round:
        (turn,) = beat
        if turn.needs_new_reals:
            s.lanes.next_micro_batches()
        images = s.clock.images + moved
        turn.player.prepare_step(images)
        found.setdefault(turn.player.name, []).append(_measure_turn_norms(turn, session))
        turn.player.step(images, moved)
    s.clock.advance(moved)
    return found


def _measure_turn_norms(turn: Turn, session: Session) -> SquaredGradNorms:
    """A lane's gradient is what its pass adds to the vector, its share of it times the lanes."""
    flat, hands, step = turn.player.flat, session.lanes.micro_batches, session.clock.step
    before, of_lanes = torch.zeros_like(flat.grads), list[torch.Tensor]()
    with flat.exchanging(NoExchange(), step, len(hands)):
        for _ in turn.backward(hands, step):
            of_lanes.append(_squared_norm(len(hands) * (flat.grads - before)))
            before.copy_(flat.grads)
    return SquaredGradNorms(_squared_norm(flat.grads).item(), torch.stack(of_lanes).mean().item())


def _squared_norm(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum()
