"""Random numbers that are a function of a row of latents: the noise inside a generator.

A generator gets latents only. Since these are a function of (seed, lane, position), so is what is drawn from their
bits, on any number of ranks, and a sample has the same noise whatever batch it is part of. Counter-based: SplitMix64
(Steele, Lea and Flood 2014) of key + counter, then Box-Muller.
"""

import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of SplitMix64 as int64
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
MANTISSA_BITS = 24


@torch.no_grad()
def row_keys(z: Tensor) -> Tensor:
    """Return a key int64 [N] for each row of z [N, latent], a function of its bits as float32."""
    bits = z.float().contiguous().view(torch.int32).to(torch.int64)
    odd = 2 * torch.arange(bits.shape[1], device=z.device) + 1
    return _mix((bits * odd * GOLDEN).sum(1))


@torch.no_grad()
def keyed_uniform(keys: Tensor, stream: int, count: int) -> Tensor:
    """Draw [N, count] float32, uniform in (0, 1)."""
    return _to_uniform(_draw(keys, stream, count) & (1 << MANTISSA_BITS) - 1)


@torch.no_grad()
def keyed_normal(keys: Tensor, stream: int, *shape: int) -> Tensor:
    """Draw [N, *shape] float32, standard normal.

    Args:
        keys: int64 [N].
        stream: draws of other streams are independent.
        shape: of one row.
    """
    count = math.prod(shape)
    bits = _draw(keys, stream, -(-count // 2))
    radius = (-2 * _to_uniform(bits & (1 << MANTISSA_BITS) - 1).log()).sqrt()
    angle = 2 * math.pi * _to_uniform(_shift(bits, 64 - MANTISSA_BITS))
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count].view(-1, *shape)


def _draw(keys: Tensor, stream: int, count: int) -> Tensor:
    """Draw int64 [N, count] of 64 random bits."""
    keys = _mix(keys ^ stream + 1)
    counters = torch.arange(1, count + 1, device=keys.device) * GOLDEN
    return _mix(keys[:, None] + counters)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift to the right; zeros come in from the left."""
    return (x >> count) & (1 << 64 - count) - 1


def _to_uniform(bits: Tensor) -> Tensor:
    return (bits.float() + 0.5) * 2.0**-MANTISSA_BITS
