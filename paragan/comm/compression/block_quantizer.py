"""Block quantizers: a float vector as blocks of few-bit levels with one scale each.

A message is ceil(n / block) encoded blocks. Each has a signed scale of 16 bits and block * bits / 8 bytes; the last
block is padded with zeros. Byte k of a block holds its elements k, k + W, k + 2 W ... (W bytes a block), lowest bits
first. A number that is not finite makes the scale of its block NaN, so the whole block decodes to NaN.

The `reference_*` functions define the format, in plain PyTorch. On a CPU with a C compiler, kernels.c computes the same
bits in one pass over memory; on CUDA, torch compiles the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paragan.comm.compression.native_kernels import load_kernels
from paragan.core.devices import backend_of

NUM_PARTIAL_SUMS = 16  # as in kernels.c: sums are added in this order
MIN_NORMAL_SCALE = 2.0**-96  # reciprocals of smaller scales overflow

# how a block's scale follows from its numbers; "signed_absmax" is minus the number of largest magnitude
ScaleRule = Literal["signed_absmax", "absmax", "norm", "sum"]
SCALE_RULES: dict[ScaleRule, int] = {"signed_absmax": 0, "absmax": 1, "norm": 2, "sum": 3}  # as in kernels.c


def num_blocks(n: int, block: int) -> int:
    """Return how many blocks n numbers fill."""
    return -(-n // block)


def encoded_block_bytes(block: int, bits: int) -> int:
    """Return the bytes of an encoded block: its scale and `block` levels of `bits` bits."""
    return 2 + block * bits // 8


# public functions ---------------------------------------------------------------------------------------------------


def encode_levels(
    x: Tensor, out: Tensor, *, block: int, bits: int, max_level: int, rule: ScaleRule, stochastic: bool, seed: int
) -> None:
    """Quantize to the levels -max_level .. max_level, in units of scale / max_level.

    If max_level is 2^(bits - 1), the level +max_level does not exist. The rule "signed_absmax" then scales so that the
    number of largest magnitude becomes -max_level.

    Args:
        x: [n] float32.
        out: [num_blocks * encoded_block_bytes] uint8.
        block: numbers that share a scale.
        bits: of a level.
        max_level: the level that the scale stands for.
        rule: how the scale is computed.
        stochastic: whether levels are rounded at random, without bias, instead of to nearest.
        seed: of the random numbers.
    """
    if native := _native_kernels(x, out):
        native.encode_levels(
            _data_ptr(x),
            ctypes.c_int64(x.numel()),
            _data_ptr(out),
            block,
            bits,
            max_level,
            SCALE_RULES[rule],
            stochastic,
            ctypes.c_uint32(seed),
        )
    else:
        fixed = {"block": block, "bits": bits, "max_level": max_level, "rule": rule, "stochastic": stochastic}
        _bind(reference_encode_levels, backend_of(x.device).prefers_compile, **fixed)(x, out, seed=seed)


def decode_levels(data: Tensor, out: Tensor, *, block: int, bits: int, max_level: int) -> None:
    """Decode what `encode_levels` wrote into out [n] float32."""
    if native := _native_kernels(out, data):
        native.decode_levels(_data_ptr(data), ctypes.c_int64(out.numel()), _data_ptr(out), block, bits, max_level)
    else:
        fixed = {"block": block, "bits": bits, "max_level": max_level}
        _bind(reference_decode_levels, backend_of(out.device).prefers_compile, **fixed)(data, out)


def encode_signs(x: Tensor, out: Tensor, *, block: int) -> None:
    """Encode the signs of x [n] float32, one bit each; the scale is the mean magnitude of the block."""
    if native := _native_kernels(x, out):
        native.encode_signs(_data_ptr(x), ctypes.c_int64(x.numel()), _data_ptr(out), block)
    else:
        _bind(reference_encode_signs, backend_of(x.device).prefers_compile, block=block)(x, out)


def decode_signs(data: Tensor, out: Tensor, *, block: int) -> None:
    """Decode what `encode_signs` wrote into out [n] float32."""
    if native := _native_kernels(out, data):
        native.decode_signs(_data_ptr(data), ctypes.c_int64(out.numel()), _data_ptr(out), block)
    else:
        _bind(reference_decode_signs, backend_of(out.device).prefers_compile, block=block)(data, out)


def _native_kernels(*tensors: Tensor) -> Any:
    """Return the compiled kernels, if they exist and can take these tensors."""
    is_supported = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return load_kernels() if is_supported else None


@cache
def _bind(reference: Callable[..., None], is_compiled: bool, **fixed: Any) -> Callable[..., None]:
    """Return a reference function with some arguments fixed."""
    function = FixedArguments(reference, **fixed)
    return torch.compile(function, dynamic=True) if is_compiled else function  # pyright: ignore


class FixedArguments(nn.Module):
    """A function with some arguments fixed. It is a module since torch compiles a module's integers as constants.

    Those of a call or a closure would become variables, and a block of unknown size makes slower kernels.
    """

    def __init__(self, function: Callable[..., None], **fixed: Any):
        super().__init__()
        self.function, self.fixed = function, fixed
        # torch compiles at most eight variants of a code object, for all modules together: each has a copy of its own
        self.forward = MethodType(FunctionType(FixedArguments.forward.__code__.replace(), globals()), self)

    def forward(self, *args: Any, **others: Any) -> None:
        self.function(*args, **self.fixed, **others)


def _data_ptr(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


# reference ----------------------------------------------------------------------------------------------------------


def reference_encode_levels(
    x: Tensor, out: Tensor, block: int, bits: int, max_level: int, rule: ScaleRule, stochastic: bool, seed: int
) -> None:
    """Define `encode_levels`."""
    blocks = _to_blocks(x, block)
    packed_scale = _pack_scale(_block_scales(blocks, rule))
    scale = _unpack_scale(packed_scale)
    is_normal = scale.abs() >= MIN_NORMAL_SCALE
    is_nonzero = scale.abs() > 0
    # torch computes number / tensor as number * reciprocal, which rounds twice: divide two tensors
    factor = torch.where(is_normal, torch.full_like(scale, max_level) / scale, 0.0)
    level = torch.where(is_normal, blocks * factor, torch.where(is_nonzero, blocks / scale * max_level, 0.0))
    if stochastic:
        level = (level + _uniform_noise(blocks.shape, seed, x.device)).floor()
    else:
        level = level.round()
    middle = 1 << (bits - 1)
    level = level.clamp(-max_level, min(max_level, middle - 1)).nan_to_num(0.0).to(torch.int16) + middle
    _write_rows(packed_scale, _join_bits(level, bits), out)


def reference_decode_levels(data: Tensor, out: Tensor, block: int, bits: int, max_level: int) -> None:
    """Define `decode_levels`."""
    rows = data.view(num_blocks(out.numel(), block), encoded_block_bytes(block, bits))
    scale = _unpack_scale(_read_scale(rows))
    level = _split_bits(rows[:, 2:], bits).float() - (1 << (bits - 1))
    is_normal = (scale.abs() >= MIN_NORMAL_SCALE) | (scale == 0)
    divisor = torch.full_like(scale, max_level)
    value = torch.where(is_normal, level * (scale / divisor), level / divisor * scale)
    out.copy_(value.view(-1)[: out.numel()])


def reference_encode_signs(x: Tensor, out: Tensor, block: int) -> None:
    """Define `encode_signs`."""
    blocks = _to_blocks(x, block)
    count = torch.full((len(blocks), 1), float(block), device=x.device)
    count[-1] = x.numel() - (len(blocks) - 1) * block
    _write_rows(_pack_scale(_block_scales(blocks, "sum") / count), _join_bits(torch.signbit(blocks), 1), out)


def reference_decode_signs(data: Tensor, out: Tensor, block: int) -> None:
    """Define `decode_signs`."""
    rows = data.view(num_blocks(out.numel(), block), encoded_block_bytes(block, 1))
    scale = _unpack_scale(_read_scale(rows))
    negative = _split_bits(rows[:, 2:], 1).bool()
    out.copy_(torch.where(negative, -scale, scale).view(-1)[: out.numel()])


# Written so that a compiler makes few kernels of it (benchmarks/speed/ptx.py): no view of another dtype, no stack.


def _write_rows(scale: Tensor, codes: Tensor, out: Tensor) -> None:
    """Write encoded blocks to out: scales [blocks, 1], as `_pack_scale` returned them, and codes [blocks, width]."""
    low = (scale & 0xFF).to(torch.uint8)
    high = (scale >> 8 & 0xFF).to(torch.uint8)
    out.copy_(torch.cat([low, high, codes], 1).view(-1))


def _read_scale(rows: Tensor) -> Tensor:
    """Return the scales [blocks, 1] of encoded blocks, for `_unpack_scale`."""
    code = rows[:, :1].to(torch.int32) | rows[:, 1:2].to(torch.int32) << 8
    return torch.where(code < 0x8000, code, code - 0x10000)


def _join_bits(levels: Tensor, bits: int) -> Tensor:
    """[blocks, block] numbers of `bits` bits -> [blocks, width] uint8."""
    parts = levels.to(torch.int32).view(len(levels), 8 // bits, -1)
    return (parts << _shifts(bits, levels.device)).sum(1).to(torch.uint8)


def _split_bits(codes: Tensor, bits: int) -> Tensor:
    """[blocks, width] uint8 -> [blocks, block] numbers of `bits` bits."""
    parts = codes[:, None].to(torch.int32) >> _shifts(bits, codes.device)
    return (parts & ((1 << bits) - 1)).flatten(1)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return how far the numbers in one byte are shifted, [8 / bits, 1]."""
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device)[:, None]


def _to_blocks(x: Tensor, block: int) -> Tensor:
    """[n] -> [blocks, block], padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def _block_scales(blocks: Tensor, rule: ScaleRule) -> Tensor:
    """Return the scale of each block [blocks, block] -> [blocks, 1]; NaN if one of its numbers is not finite."""
    absmax = blocks.abs().amax(1, keepdim=True)
    is_finite = blocks.isfinite().all(1, keepdim=True)
    if rule == "absmax":
        scale = absmax
    elif rule == "signed_absmax":
        scale = torch.where(blocks.amin(1, keepdim=True) == -absmax, absmax, -absmax)
    elif rule == "sum":
        scale = _ordered_sum(blocks.abs())
    else:
        normalized = blocks / torch.where(absmax > 0, absmax, 1.0)
        # torch's square root in float32 may differ in the last bit
        scale = absmax * _ordered_sum(normalized * normalized).double().sqrt().float()
    return torch.where(is_finite, scale, torch.nan)


def _pack_scale(scale: Tensor) -> Tensor:
    """Encode scales [blocks, 1] float32 as int16: the exponent and 6 bits of the fraction, rounded up, then the sign.

    The first bit marks scales that were multiplied by 2^64, because they may be denormal.
    """
    magnitude = scale.abs()
    is_small = magnitude < MIN_NORMAL_SCALE
    bits = torch.where(is_small, magnitude * 2.0**64, magnitude).view(torch.int32)
    code = ((bits + 0x1FFFF) >> 17 << 1).clamp(max=0x7F7E) + (scale < 0)
    code = torch.where(scale.isnan(), 0x7FC0, code)
    return torch.where(is_small, code - 0x8000, code).to(torch.int16)


def _unpack_scale(code: Tensor) -> Tensor:
    """Decode what `_pack_scale` wrote, to float32."""
    scale = ((code.to(torch.int32) & 0x7FFE) << 16).view(torch.float32)
    scale = torch.where(code < 0, scale * 2.0**-64, scale)
    return torch.where((code & 1) == 1, -scale, scale)


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum rows [blocks, block] -> [blocks, 1] in the order of kernels.c, for the same rounding."""
    columns = x.view(len(x), -1, NUM_PARTIAL_SUMS)
    partial = torch.zeros_like(columns[:, 0])
    for k in range(columns.shape[1]):
        partial = partial + columns[:, k]
    total = torch.zeros_like(partial[:, :1])
    for j in range(NUM_PARTIAL_SUMS):
        total = total + partial[:, j : j + 1]
    return total


def _uniform_noise(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return random numbers in [0, 1) that depend on position and seed (Ellis, "lowbias32")."""
    word = 0xFFFFFFFF
    h = torch.arange(shape.numel(), device=device).view(shape) & word
    h = (h * 0x9E3779B9 + seed) & word
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & word
    h = ((h ^ (h >> 15)) * 0x735A2D97) & word
    return ((h ^ (h >> 15)) >> 8).float() * 2.0**-24
