"""Elias-Fano coding of sorted positions: at most 2 + log2(n / k) bits each, close to the minimum.

Elias 1974, Fano 1971. The low bits of every position are stored as they are. The high bits, which are in ascending
order, become a bit vector with a one at (high bits + index of the position). The size depends on n and k only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def position_bytes(n: int, k: int) -> int:
    """Return the bytes for k of n positions."""
    low = _low_bits(n, k)
    return -(-k * low // 8) + -(-_high_length(n, k, low) // 8)


def encode_positions(positions: Tensor, n: int, out: Tensor) -> None:
    """Encode positions [k] int64, distinct, ascending and below n, into out [position_bytes(n, k)] uint8."""
    k = len(positions)
    low = _low_bits(n, k)
    split = -(-k * low // 8)
    if low:
        out[:split].copy_(_pack_bits(((positions[:, None] >> _arange_like(low, out)) & 1).flatten()))
    high_bits = torch.zeros(_high_length(n, k, low), dtype=torch.int64, device=out.device)
    high_bits[(positions >> low) + _arange_like(k, out)] = 1
    out[split:].copy_(_pack_bits(high_bits))


def decode_positions(data: Tensor, n: int, k: int) -> Tensor:
    """Return the k positions [k] int64 that `encode_positions` wrote."""
    low = _low_bits(n, k)
    split = -(-k * low // 8)
    high_bits = _unpack_bits(data[split:])
    # the positions of the ones; unlike nonzero this does not wait for the device
    high = torch.argsort(high_bits, descending=True, stable=True)[:k] - _arange_like(k, data)
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
