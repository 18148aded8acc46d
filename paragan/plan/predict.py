"""What a round takes with any strategy, from one worker's profile, the links, and the strategy's own wiring.

p = predict(run, read_profile(Path("profile.yaml")), described("8 hosts, 200 Mbit/s, 10 ms"))
p.step_s, p.images_per_s, p.spent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..train.run import Run
from .links import Links
from .profile import Profile


@dataclass(frozen=True)
class Prediction:
    """One strategy on some ranks.

    step_s       : seconds of a round, the mean over rounds, of the slowest rank
    images_per_s : reals of all ranks
    compute_s    : the computing in a round of the rank that computes longest
    efficiency   : images a second, over those of as many workers that play alone with this local batch
    sent_bytes, messages : of a round, the mean over rounds, of the rank that sends most
    memory_bytes : of a rank, at the fullest moment of a round
    staleness    : how many rounds old what a player sees of the other is, the mean; 0 in lockstep
    spent        : step_s by reason: computing, handling, latency, bandwidth, waiting
    """

    step_s: float
    images_per_s: float
    compute_s: float
    efficiency: float
    sent_bytes: int
    messages: int
    memory_bytes: int
    staleness: float
    spent: Mapping[str, float]


def predict(run: Run, profile: Profile, links: Links, ranks: int | None = None) -> Prediction:
    """run: resolved (strategy, batch, lanes, d_steps, g_batch). ranks: as many as the links have, where left out."""
    ranks = links.ranks if ranks is None else ranks
    compute = profile.round_s(run.batch / ranks)
    spent = {"computing": compute, "handling": 0.0, "latency": 0.0, "bandwidth": 0.0, "waiting": 0.0}
    return Prediction(compute, run.round / compute, compute, 1.0, 0, 0, 0, 0.0, spent)
