"""Where a round's time goes: every product and convolution by its shape, how much of it is filling, and the rest."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paragan.core.devices import backend_of, cpu_features

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution: "convolution", aten.convolution_backward: "its gradients"}
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.mv)
OTHER_OPS = "all else"


@dataclass(frozen=True)
class Operation:
    """name, and shape as people write it: images x channels x size -> channels, kernel;  padding: of its tiles"""

    name: str
    shape: str = ""
    padding_share: float = 0.0


class OpTimerMode(TorchDispatchMode):
    """Seconds of every operation played inside, by what it is."""

    def __init__(self, device: torch.device, tile: Tile):
        super().__init__()
        self.device, self.tile = device, tile
        self.seconds: dict[Operation, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        backend_of(self.device).synchronize(self.device)
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        backend_of(self.device).synchronize(self.device)
        self.seconds[self._identify(func._overloadpacket, args)] += time.perf_counter() - start
        return out

    def _identify(self, packet: Any, args: Sequence[Any]) -> Operation:
        if packet in CONVOLUTIONS:
            backward = packet is aten.convolution_backward
            x, weight = (args[1], args[2]) if backward else (args[0], args[1])
            stride, *_, transposed, _, groups = args[4:10] if backward else args[3:9]
            return self._identify_convolution(CONVOLUTIONS[packet], x, weight, stride, transposed, groups)
        if packet in MATMULS:
            a, b = (x for x in args if isinstance(x, torch.Tensor) and (packet is not aten.addmm or x is not args[0]))
            n, k, m = a.shape[-2], a.shape[-1], b.shape[-1] if b.dim() > 1 else 1
            return Operation("product", f"{n} x {k} x {m}", round(self.tile.padding_share(n, k, m), 4))
        return Operation(OTHER_OPS)

    def _identify_convolution(
        self, name: str, x: Any, weight: Any, stride: Sequence[int], transposed: bool, groups: int
    ) -> Operation:
        n, inputs, *size = x.shape
        outputs = weight.shape[1] * groups if transposed else weight.shape[0]
        kernel, shown = weight.shape[2:], "x".join(map(str, size))
        grown = " up" if transposed else "" if math.prod(stride) == 1 else " down"
        one_each = groups == inputs > 1  # channels lie side by side in what is multiplied
        product = (self.tile.inner, outputs) if one_each else (inputs // groups, outputs // groups)
        padding = self.tile.padding_share(n * math.prod(size), *product)
        grouped = f" in {groups} groups" if groups > 1 else ""
        about = f"{n} x {inputs} x {shown} -> {outputs}, {'x'.join(map(str, kernel))}{grown}{grouped}"
        return Operation(name, about, round(padding, 4))


def profile_ops(fn: Callable[[], object], device: torch.device, tile: Tile, rounds: int = 2) -> dict[Operation, float]:
    """Seconds of one round by operation, most first; what Python takes between them is not in it."""
    with OpTimerMode(device, tile) as counted:
        for _ in range(rounds):
            fn()
    return dict(sorted(((op, s / rounds) for op, s in counted.seconds.items()), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Tile:
    """Of a product [rows, inner] x [inner, columns]. A convolution's rows are pixels, its columns channels."""

    rows: int
    inner: int
    columns: int

    def padding_share(self, rows: int, inner: int, columns: int) -> float:
        """The share of multiplications that are of filling, where every side is filled up to whole tiles."""
        sides = ((rows, self.rows), (inner, self.inner), (columns, self.columns))
        return 1 - math.prod(n / (-(-n // tile) * tile) for n, tile in sides)


TPU_TILE = Tile(8, 128, 128)


TENSOR_CORE_TILES = {"float32": Tile(8, 4, 8), "bf16": Tile(8, 8, 8)}  # in 16 bytes each way


def tile_for(device: torch.device, precision: str) -> Tile:
    """As vendors state them: tensor cores, AMX (16 rows of 64 bytes), AVX-512 (64 bytes), AVX2 (32)."""
    if device.type == "xla":
        return TPU_TILE
    if device.type == "cuda":
        return TENSOR_CORE_TILES[precision]
    features, bf16 = cpu_features(), precision == "bf16"
    if bf16 and "amx_bf16" in features:
        return Tile(16, 32, 16)
    wide = 16 if "avx512f" in features else 8
    return Tile(1, 2 if bf16 else 1, wide)
