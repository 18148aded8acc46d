"""Sorted positions in few bytes: Elias-Fano, at most 2 + log2(n / k) bits each, near the least there can be.

Elias 1974, Fano 1971. The low bits of every position are written out; the high bits, which rise, become a bit vector
with a one at (high + rank). The size is fixed by n and k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def position_bytes(n: int, k: int) -> int:
    """Bytes for k of n positions."""
    low = _low_bits(n, k)
    return -(-k * low // 8) + -(-_high_length(n, k, low) // 8)


def encode_positions(positions: Tensor, n: int, out: Tensor) -> None:
    """positions [k] int64, ascending and distinct, below n; out [position_bytes(n, k)] uint8."""
    k = len(positions)
    low = _low_bits(n, k)
    split = -(-k * low // 8)
    if low:
        out[:split].copy_(_pack_bits(((positions[:, None] >> _arange_like(low, out)) & 1).flatten()))
    ones = torch.zeros(_high_length(n, k, low), dtype=torch.int64, device=out.device)
    ones[(positions >> low) + _arange_like(k, out)] = 1
    out[split:].copy_(_pack_bits(ones))


def decode_positions(data: Tensor, n: int, k: int) -> Tensor:
    """[k] int64."""
    low = _low_bits(n, k)
    split = -(-k * low // 8)
    ones = _unpack_bits(data[split:])
    high = torch.argsort(ones, descending=True, stable=True)[:k] - _arange_like(k, data)  # no sync, unlike nonzero
    if not low:
        return high
    bits = _unpack_bits(data[:split])[: k * low].view(k, low)
    return (high << low) | (bits << _arange_like(low, data)).sum(1)


def _low_bits(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _high_length(n: int, k: int, low: int) -> int:
    return k + ((n - 1) >> low) + 1


def _arange_like(k: int, like: Tensor) -> Tensor:
    return torch.arange(k, device=like.device)


def _pack_bits(bits: Tensor) -> Tensor:
    """[m] of 0 and 1 -> [ceil(m / 8)] uint8, lowest bit first."""
    rows = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (rows << _arange_like(8, bits)).sum(1).to(torch.uint8)


def _unpack_bits(data: Tensor) -> Tensor:
    return ((data[:, None].long() >> _arange_like(8, data)) & 1).flatten()
