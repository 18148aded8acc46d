"""What a device multiplies at once, and how much of a product is filling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...devices import cpu_features


@dataclass(frozen=True)
class Tile:
    """Of a product [rows, inner] x [inner, columns]. A convolution's rows are pixels, its columns channels."""

    rows: int
    inner: int
    columns: int

    def padding(self, rows: int, inner: int, columns: int) -> float:
        """The share of multiplications that are of filling, where every side is filled up to whole tiles."""
        sides = ((rows, self.rows), (inner, self.inner), (columns, self.columns))
        return 1 - math.prod(n / (-(-n // tile) * tile) for n, tile in sides)


TPU = Tile(8, 128, 128)
TENSOR_CORES = {"float32": Tile(8, 4, 8), "bf16": Tile(8, 8, 8)}  # in 16 bytes each way


def tile_of(device: torch.device, precision: str) -> Tile:
    """As vendors state them: tensor cores, AMX (16 rows of 64 bytes), AVX-512 (64 bytes), AVX2 (32)."""
    if device.type == "xla":
        return TPU
    if device.type == "cuda":
        return TENSOR_CORES[precision]
    features, bf16 = cpu_features(), precision == "bf16"
    if bf16 and "amx_bf16" in features:
        return Tile(16, 32, 16)
    wide = 16 if "avx512f" in features else 8
    return Tile(1, 2 if bf16 else 1, wide)
