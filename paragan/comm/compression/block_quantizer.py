"""Block quantizers: a float vector as blocks of few-bit levels with one scale each.

A message is ceil(n / block) records, each a scale of 16 bits, with a sign, and block * bits / 8 bytes; the last block
is filled up with zeros. Byte k of a block holds its elements k, k + W, k + 2 W ... (W bytes a block), lowest bits
first.

What is not finite is never hidden: its whole block has a NaN scale and decodes to NaN.

The functions here are the definition, in plain PyTorch. On a CPU with a C compiler kernels.c does the same to the bit,
in one pass over memory; on CUDA torch compiles the plain form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from paragan.comm.compression.native_kernels import load_kernels
from paragan.core.devices import backend_of

NUM_PARTIAL_SUMS = 16  # partial sums, as in kernels.c
MIN_NORMAL_SCALE = 2.0**-96  # below, reciprocals overflow

ScaleRule = Literal["extreme", "largest", "norm", "sum"]
SCALE_RULES: dict[ScaleRule, int] = {"extreme": 0, "largest": 1, "norm": 2, "sum": 3}


def num_blocks(n: int, block: int) -> int:
    """How many blocks n numbers fill."""
    return -(-n // block)


def encoded_block_bytes(block: int, bits: int) -> int:
    return 2 + block * bits // 8


# what is called -----------------------------------------------------------------------------------------------------


def encode_levels(
    x: Tensor, out: Tensor, *, block: int, bits: int, max_level: int, rule: ScaleRule, stochastic: bool, seed: int
) -> None:
    """x [n] float32 to levels -top .. top, in units of scale / top; out: [records * record_bytes] uint8. Where top is
    2^(bits - 1) there is no level +top. The rule "extreme" scales so that the largest number becomes -top."""
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
        _select_implementation(reference_encode_levels, x)(x, out, block, bits, max_level, rule, stochastic, seed)


def decode_levels(data: Tensor, out: Tensor, *, block: int, bits: int, max_level: int) -> None:
    """The other way: out [n] float32."""
    if native := _native_kernels(out, data):
        native.decode_levels(_data_ptr(data), ctypes.c_int64(out.numel()), _data_ptr(out), block, bits, max_level)
    else:
        _select_implementation(reference_decode_levels, out)(data, out, block, bits, max_level)


def encode_signs(x: Tensor, out: Tensor, *, block: int) -> None:
    """x [n] float32 to one bit each; the scale is the mean magnitude of the block."""
    if native := _native_kernels(x, out):
        native.encode_signs(_data_ptr(x), ctypes.c_int64(x.numel()), _data_ptr(out), block)
    else:
        _select_implementation(reference_encode_signs, x)(x, out, block)


def decode_signs(data: Tensor, out: Tensor, *, block: int) -> None:
    """The other way: out [n] float32."""
    if native := _native_kernels(out, data):
        native.decode_signs(_data_ptr(data), ctypes.c_int64(out.numel()), _data_ptr(out), block)
    else:
        _select_implementation(reference_decode_signs, out)(data, out, block)


def _native_kernels(*tensors: Tensor) -> Any:
    """The compiled kernels, where they can take these tensors."""
    fit = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    return load_kernels() if fit else None


def _select_implementation(reference: Callable[..., None], x: Tensor) -> Callable[..., None]:
    return _compiled(reference) if backend_of(x.device).prefers_compile else reference


@cache
def _compiled(reference: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(reference, dynamic=True)  # pyright: ignore[reportUnknownMemberType]


def _data_ptr(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


# the definition -----------------------------------------------------------------------------------------------------


def reference_encode_levels(
    x: Tensor, out: Tensor, block: int, bits: int, max_level: int, rule: ScaleRule, stochastic: bool, seed: int
) -> None:
    blocks = _to_blocks(x, block)
    code_of_scale = _pack_scale(_block_scales(blocks, rule))
    scale = _unpack_scale(code_of_scale)
    large, some = scale.abs() >= MIN_NORMAL_SCALE, scale.abs() > 0
    up = torch.where(
        large, torch.full_like(scale, max_level) / scale, 0.0
    )  # top / scale would be top times a reciprocal
    level = torch.where(large, blocks * up, torch.where(some, blocks / scale * max_level, 0.0))
    if stochastic:
        level = (level + _uniform_noise(blocks.shape, seed, x.device)).floor()
    else:
        level = level.round()
    middle = 1 << (bits - 1)
    level = level.clamp(-max_level, min(max_level, middle - 1)).nan_to_num(0.0).to(torch.int16) + middle
    into = out.view(len(blocks), encoded_block_bytes(block, bits))
    into[:, :2].view(torch.int16).copy_(code_of_scale)
    parts = level.to(torch.uint8).view(len(blocks), 8 // bits, -1)
    code = parts[:, 0]
    for j in range(1, 8 // bits):
        code = code | parts[:, j] << (bits * j)
    into[:, 2:].copy_(code)


def reference_decode_levels(data: Tensor, out: Tensor, block: int, bits: int, max_level: int) -> None:
    rows = data.view(num_blocks(out.numel(), block), encoded_block_bytes(block, bits))
    scale = _unpack_scale(rows[:, :2].view(torch.int16))
    mask, middle = (1 << bits) - 1, 1 << (bits - 1)
    parts = [((rows[:, 2:] >> (bits * j)) & mask).float() - middle for j in range(8 // bits)]
    level = torch.stack(parts, 1).view(len(rows), block)
    normal = (scale.abs() >= MIN_NORMAL_SCALE) | (scale == 0)
    tops = torch.full_like(scale, max_level)
    value = torch.where(normal, level * (scale / tops), level / tops * scale)
    out.copy_(value.view(-1)[: out.numel()])


def reference_encode_signs(x: Tensor, out: Tensor, block: int) -> None:
    blocks = _to_blocks(x, block)
    count = torch.full((len(blocks), 1), float(block), device=x.device)
    count[-1] = x.numel() - (len(blocks) - 1) * block
    into = out.view(len(blocks), encoded_block_bytes(block, 1))
    into[:, :2].view(torch.int16).copy_(_pack_scale(_block_scales(blocks, "sum") / count))
    parts = torch.signbit(blocks).to(torch.uint8).view(len(blocks), 8, -1)
    code = parts[:, 0]
    for j in range(1, 8):
        code = code | parts[:, j] << j
    into[:, 2:].copy_(code)


def reference_decode_signs(data: Tensor, out: Tensor, block: int) -> None:
    rows = data.view(num_blocks(out.numel(), block), encoded_block_bytes(block, 1))
    scale = _unpack_scale(rows[:, :2].view(torch.int16))[:, None]
    negative = torch.stack([(rows[:, 2:] >> j) & 1 for j in range(8)], 1).bool()
    out.copy_(torch.where(negative, -scale, scale).view(-1)[: out.numel()])


def _to_blocks(x: Tensor, block: int) -> Tensor:
    """[n] -> [records, block], filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def _block_scales(blocks: Tensor, rule: ScaleRule) -> Tensor:
    """[records, block] -> [records, 1]: the number of largest magnitude, negated ("extreme"), that magnitude, the norm,
    or the sum of magnitudes; NaN where one is not finite. Sums are taken in the order of kernels.c."""
    largest = blocks.abs().amax(1, keepdim=True)
    finite = blocks.isfinite().all(1, keepdim=True)
    if rule == "largest":
        scale = largest
    elif rule == "extreme":
        scale = torch.where(blocks.amin(1, keepdim=True) == -largest, largest, -largest)
    elif rule == "sum":
        scale = _ordered_sum(blocks.abs())
    else:
        near = blocks / torch.where(largest > 0, largest, 1.0)
        scale = largest * _ordered_sum(near * near).double().sqrt().float()  # torch's own in float32 may be one bit off
    return torch.where(finite, scale, torch.nan)


def _pack_scale(scale: Tensor) -> Tensor:
    """[records, 1] float32 to 16 bits as int16: the exponent and 6 bits of the fraction, rounded up, then the sign. The
    first bit marks those that are 2^64 times too large: scales may be denormal."""
    size = scale.abs()
    small = size < MIN_NORMAL_SCALE
    bits = torch.where(small, size * 2.0**64, size).view(torch.int32)
    code = ((bits + 0x1FFFF) >> 17 << 1).clamp(max=0x7F7E) + (scale < 0)
    code = torch.where(scale.isnan(), 0x7FC0, code)
    return torch.where(small, code - 0x8000, code).to(torch.int16)


def _unpack_scale(code: Tensor) -> Tensor:
    """The other way, to float32."""
    scale = ((code.to(torch.int32) & 0x7FFE) << 16).view(torch.float32)
    scale = torch.where(code < 0, scale * 2.0**-64, scale)
    return torch.where((code & 1) == 1, -scale, scale)


def _ordered_sum(x: Tensor) -> Tensor:
    lanes = x.view(len(x), -1, NUM_PARTIAL_SUMS)
    total = torch.zeros_like(lanes[:, 0])
    for k in range(lanes.shape[1]):
        total = total + lanes[:, k]
    result = torch.zeros_like(total[:, :1])
    for j in range(NUM_PARTIAL_SUMS):
        result = result + total[:, j : j + 1]
    return result


def _uniform_noise(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Random numbers in [0, 1) from their positions (Ellis, "lowbias32")."""
    word = 0xFFFFFFFF
    h = torch.arange(shape.numel(), device=device).view(shape) & word
    h = (h * 0x9E3779B9 + seed) & word
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & word
    h = ((h ^ (h >> 15)) * 0x735A2D97) & word
    return ((h ^ (h >> 15)) >> 8).float() * 2.0**-24
