"""A profile as a person reads it: a table of batches, what the time is spent on, and what the noise advises."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paragan.plan.profile.profile import Memory, Noise, Profile

COLUMNS = {"batch": 7, "D ms": 10, "G ms": 10, "round ms": 11, "images/s": 11, "of peak": 9, "tensors": 10, "took": 10}
HEADING = "".join(f"{name:>{width}}" for name, width in COLUMNS.items())


def lines(profile: Profile) -> list[str]:
    return [*_head(profile), HEADING, *_batches(profile), *_shares(profile), *_noises(profile)]


def share_of_peak(profile: Profile, batch: int) -> float:
    """Of the device's measured peak that a round uses."""
    return profile.flops * batch / profile.round_s(batch) / profile.device.peak_flops


def _head(profile: Profile) -> Iterator[str]:
    device, (g, d) = profile.device, profile.params
    threads = f", {device.threads} thread{'s' * (device.threads != 1)}" if device.kind == "cpu" else ""
    yield f"{profile.recipe}: G has {g:,} parameters, D {d:,}; {profile.flops / 1e6:.4g} MFLOP an image and round"
    yield (
        f"{device.name}{threads}, {_bytes(device.memory)}: {device.peak_flops / 1e9:.4g} GFLOP/s measured in "
        f"{device.precision}; torch {device.torch}"
    )


def _batches(profile: Profile) -> Iterator[str]:
    memory = {one.batch: one for one in profile.memory}
    for g, d in zip(profile.g, profile.d):
        whole = profile.round_s(d.batch)
        pace, peak = d.batch * profile.d_steps / whole, share_of_peak(profile, d.batch)
        row = f"{d.batch:>7}{1000 * d.whole:>10.2f}{1000 * g.whole:>10.2f}{1000 * whole:>11.2f}{pace:>11,.0f}"
        yield f"{row}{peak:>9.0%}{_taken(memory.get(d.batch))}"


def _taken(memory: Memory | None) -> str:
    if memory is None:
        return ""
    return f"{_bytes(memory.foreseen):>10}{'' if memory.took is None else _bytes(memory.took):>10}"


def _shares(profile: Profile) -> Iterator[str]:
    batch = profile.d[-1].batch
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in profile.kinds.items())
    yield f"time at batch {batch}: {kinds}"
    yield f"data: a round of {batch} waits {1000 * profile.data:.2g} ms for them"


def _noises(profile: Profile) -> Iterator[str]:
    for name, noise in profile.noise.items():
        yield f"noise of {name}'s gradient after {noise.kimg:.4g} kimg: {_advice(noise)}"
    if profile.noise:
        yield "the noise grows while networks learn: measured early, these batches are the least that pay"


def _advice(noise: Noise) -> str:
    if math.isinf(noise.batch):
        return "larger than these lanes can tell: larger batches pay"
    high = "any" if math.isinf(noise.high) else f"{noise.high:.3g}"
    spread = f"{noise.batch:.3g} images ({noise.low:.3g} to {high})"
    return f"{spread}; beyond about {max(1, round(noise.batch)):,} images a step more images save few steps"


def _bytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
