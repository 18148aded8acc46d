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

from paragan.comm.exchange import Local
from paragan.game.turn import Turn, begin
from paragan.plan.profile.profile import Noise
from paragan.train.session import Session

RESAMPLES = 1000


class Lengths(NamedTuple):
    """Of one step's gradient, squared: of the total batch, and the mean over lanes of theirs."""

    whole: float
    lane: float


def noise_scale(steps: Sequence[Lengths], lane: int, whole: int, kimg: float = 0.0) -> Noise | None:
    """From some steps with lanes of so many images, `whole` in all. None where gradients were not finite."""
    lengths = np.array(steps, dtype=np.float64)
    if not len(lengths) or not np.isfinite(lengths).all():
        return None
    rng = np.random.default_rng(0)
    drawn = lengths[rng.integers(len(lengths), size=(RESAMPLES, len(lengths)))].mean(1)
    scales = [_scale(Lengths(*row), lane, whole) for row in drawn]
    low, high = np.quantile(scales, (0.025, 0.975), method="nearest")
    return Noise(_scale(Lengths(*lengths.mean(0)), lane, whole), float(low), float(high), kimg)


def _scale(mean: Lengths, lane: int, whole: int) -> float:
    signal = (whole * mean.whole - lane * mean.lane) / (whole - lane)
    noise = (mean.lane - mean.whole) / (1 / lane - 1 / whole)
    return max(0.0, noise) / signal if signal > 0 else math.inf


def gradient_lengths(session: Session) -> Mapping[str, list[Lengths]]:
    """Play a round lane by lane (device.merge=1); the lengths of every turn's gradients, by player."""
    s, moved = session, session.run.round_at(session.clock.images)
    found: dict[str, list[Lengths]] = {}
    begin(s.role.round, s.clock.step)
    for beat in s.role.round:
        (turn,) = beat
        if turn.fresh:
            s.lanes.next()
        images = s.clock.images + moved
        turn.player.prepare(images)
        found.setdefault(turn.player.name, []).append(_lengths(turn, session))
        turn.player.move(images, moved)
    s.clock.advance(moved)
    return found


def _lengths(turn: Turn, session: Session) -> Lengths:
    """A lane's gradient is what its pass adds to the vector, its share of it times the lanes."""
    flat, hands, step = turn.player.flat, session.lanes.hands, session.clock.step
    before, of_lanes = torch.zeros_like(flat.grads), list[torch.Tensor]()
    with flat.exchanging(Local(), step, len(hands)):
        for _ in turn.differentiate(hands, step):
            of_lanes.append(_squared(len(hands) * (flat.grads - before)))
            before.copy_(flat.grads)
    return Lengths(_squared(flat.grads).item(), torch.stack(of_lanes).mean().item())


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum()
