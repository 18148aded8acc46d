"""A profile as a person reads it: a table of batches, what the time is spent on, and what the noise advises."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paragan.plan.profile.profile import MemoryUse, NoiseScale, Profile

COLUMNS = {"batch": 7, "D ms": 10, "G ms": 10, "round ms": 11, "images/s": 11, "of peak": 9, "tensors": 10, "took": 10}
TABLE_HEADER = "".join(f"{name:>{width}}" for name, width in COLUMNS.items())


def format_profile(profile: Profile) -> list[str]:
    return [
        *_header_lines(profile),
        TABLE_HEADER,
        *_batch_rows(profile),
        *_op_share_lines(profile),
        *_noise_lines(profile),
    ]


def peak_flops_share(profile: Profile, batch: int) -> float:
    """Of the device's measured peak that a round uses."""
    return profile.flops_per_image * batch / profile.round_s(batch) / profile.device.peak_flops


def _header_lines(profile: Profile) -> Iterator[str]:
    device, (g, d) = profile.device, profile.num_params
    threads = f", {device.threads} thread{'s' * (device.threads != 1)}" if device.kind == "cpu" else ""
    yield f"{profile.recipe}: G has {g:,} parameters, D {d:,}; {profile.flops_per_image / 1e6:.4g} MFLOP an image and round"
    yield (
        f"{device.name}{threads}, {_format_bytes(device.memory_bytes)}: {device.peak_flops / 1e9:.4g} GFLOP/s measured in "
        f"{device.precision}; torch {device.torch_version}"
    )


def _batch_rows(profile: Profile) -> Iterator[str]:
    memory = {one.batch: one for one in profile.memory}
    for g, d in zip(profile.g, profile.d):
        whole = profile.round_s(d.batch)
        pace, peak = d.batch * profile.d_steps / whole, peak_flops_share(profile, d.batch)
        row = f"{d.batch:>7}{1000 * d.total_s:>10.2f}{1000 * g.total_s:>10.2f}{1000 * whole:>11.2f}{pace:>11,.0f}"
        yield f"{row}{peak:>9.0%}{_memory_cells(memory.get(d.batch))}"


def _memory_cells(memory: MemoryUse | None) -> str:
    if memory is None:
        return ""
    return f"{_format_bytes(memory.estimated_bytes):>10}{'' if memory.measured_bytes is None else _format_bytes(memory.measured_bytes):>10}"


def _op_share_lines(profile: Profile) -> Iterator[str]:
    batch = profile.d[-1].batch
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in profile.op_shares.items())
    yield f"time at batch {batch}: {kinds}"
    yield f"data: a round of {batch} waits {1000 * profile.data_wait_s:.2g} ms for them"


def _noise_lines(profile: Profile) -> Iterator[str]:
    for name, noise in profile.noise_scale.items():
        yield f"noise of {name}'s gradient after {noise.kimg:.4g} kimg: {_noise_advice(noise)}"
    if profile.noise_scale:
        yield "the noise grows while networks learn: measured early, these batches are the least that pay"


def _noise_advice(noise: NoiseScale) -> str:
    if math.isinf(noise.images):
        return "larger than these lanes can tell: larger batches pay"
    high = "any" if math.isinf(noise.high) else f"{noise.high:.3g}"
    spread = f"{noise.images:.3g} images ({noise.low:.3g} to {high})"
    return f"{spread}; beyond about {max(1, round(noise.images)):,} images a step more images save few steps"


def _format_bytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
