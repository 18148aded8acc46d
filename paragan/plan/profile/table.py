"""A profile as text: a table of batches, where the time goes, and what the noise scale advises."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paragan.plan.cost import format_bytes
from paragan.plan.profile.profile import MemoryUse, NoiseScale, Profile

COLUMN_WIDTHS = {
    "batch": 7,
    "D ms": 10,
    "G ms": 10,
    "round ms": 11,
    "images/s": 11,
    "of peak": 9,
    "tensors": 10,  # memory, estimated
    "process": 10,  # memory, measured
}
TABLE_HEADER = "".join(f"{name:>{width}}" for name, width in COLUMN_WIDTHS.items())


def format_profile(profile: Profile) -> list[str]:
    """Format a profile as lines of text."""
    return [
        *_header_lines(profile),
        TABLE_HEADER,
        *_batch_rows(profile),
        *_op_share_lines(profile),
        *_noise_lines(profile),
    ]


def peak_flops_share(profile: Profile, batch: int) -> float:
    """Return the fraction of the device's measured peak that a round reaches."""
    return profile.flops_per_image * batch / profile.round_s(batch) / profile.device.peak_flops


def _header_lines(profile: Profile) -> Iterator[str]:
    g, d = profile.num_params
    mflop = profile.flops_per_image / 1e6
    yield f"{profile.recipe}: G has {g:,} parameters, D {d:,}; {mflop:.4g} MFLOP per image and round"
    device = profile.device
    name = device.name
    if device.kind == "cpu":
        name += f", {device.threads} {'thread' if device.threads == 1 else 'threads'}"
    peak = f"{device.peak_flops / 1e9:.4g} GFLOP/s measured in {device.precision}"
    yield f"{name}, {format_bytes(device.memory_bytes)}: {peak}; torch {device.torch_version}"


def _batch_rows(profile: Profile) -> Iterator[str]:
    memory = {one.batch: one for one in profile.memory}
    for g, d in zip(profile.g, profile.d):
        round_s = profile.round_s(d.batch)
        images_per_s = d.batch * profile.d_steps / round_s
        times = f"{1000 * d.total_s:>10.2f}{1000 * g.total_s:>10.2f}{1000 * round_s:>11.2f}"
        peak = f"{peak_flops_share(profile, d.batch):>9.0%}"
        yield f"{d.batch:>7}{times}{images_per_s:>11,.0f}{peak}{_memory_cells(memory.get(d.batch))}"


def _memory_cells(memory: MemoryUse | None) -> str:
    if memory is None:
        return ""
    measured = "" if memory.measured_bytes is None else format_bytes(memory.measured_bytes)
    return f"{format_bytes(memory.estimated_bytes):>10}{measured:>10}"


def _op_share_lines(profile: Profile) -> Iterator[str]:
    batch = profile.d[-1].batch
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in profile.op_shares.items())
    yield f"time at batch {batch}: {kinds}"
    yield f"data: a round of {batch} images waits {1000 * profile.data_wait_s:.2g} ms for data"


def _noise_lines(profile: Profile) -> Iterator[str]:
    for name, noise in profile.noise_scale.items():
        yield f"noise of {name}'s gradient after {noise.kimg:.4g} kimg: {_noise_advice(noise)}"
    if profile.noise_scale:
        yield "the noise grows during training: these batches, measured early, are a lower bound of what pays"


def _noise_advice(noise: NoiseScale) -> str:
    if math.isinf(noise.images):
        return "larger than these lanes can measure: larger batches pay"
    high = "infinity" if math.isinf(noise.high) else f"{noise.high:.3g}"
    spread = f"{noise.images:.3g} images ({noise.low:.3g} to {high})"
    return f"{spread}; beyond about {max(1, round(noise.images)):,} images per step, more images save few steps"
