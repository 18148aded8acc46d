"""Time every operation of a round: products and convolutions by shape, with the padding of their tiles."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paragan.core.backends import cpu_features
from paragan.core.devices import backend_of

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution: "convolution", aten.convolution_backward: "convolution backward"}
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.mv)
OTHER_OPS = "other"


@dataclass(frozen=True)
class Operation:
    """A kind of operation."""

    name: str
    shape: str = ""  # "images x channels x size -> channels, kernel" of a convolution
    padding_share: float = 0.0  # of the multiplications in its tiles


class OpTimerMode(TorchDispatchMode):
    """Measure the seconds of every operation inside. The device is synchronized after each."""

    def __init__(self, device: torch.device, tile: Tile):
        super().__init__()
        self.device = device
        self.tile = tile
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
            n, k = a.shape[-2:]
            m = b.shape[-1] if b.dim() > 1 else 1
            return Operation("product", f"{n} x {k} x {m}", round(self.tile.padding_share(n, k, m), 4))
        return Operation(OTHER_OPS)

    def _identify_convolution(
        self, name: str, x: Any, weight: Any, stride: Sequence[int], transposed: bool, groups: int
    ) -> Operation:
        n, inputs, *size = x.shape
        outputs = weight.shape[1] * groups if transposed else weight.shape[0]
        shape = f"{n} x {inputs} x {'x'.join(map(str, size))} -> {outputs}, {'x'.join(map(str, weight.shape[2:]))}"
        if transposed:
            shape += " up"
        elif math.prod(stride) > 1:
            shape += " down"
        if groups > 1:
            shape += f" in {groups} groups"
        if groups == inputs > 1:  # depthwise: the channels are next to each other in the product
            padding = self.tile.padding_share(n * math.prod(size), self.tile.inner, outputs)
        else:
            padding = self.tile.padding_share(n * math.prod(size), inputs // groups, outputs // groups)
        return Operation(name, shape, round(padding, 4))


def profile_ops(fn: Callable[[], object], device: torch.device, tile: Tile, rounds: int = 2) -> dict[Operation, float]:
    """Return the seconds of one call of `fn` by operation, the largest first, without the time of Python."""
    with OpTimerMode(device, tile) as timer:
        for _ in range(rounds):
            fn()
    return dict(sorted(((op, s / rounds) for op, s in timer.seconds.items()), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Tile:
    """Tile of a product [rows, inner] x [inner, columns]. A convolution has pixels as rows and channels as columns."""

    rows: int
    inner: int
    columns: int

    def padding_share(self, rows: int, inner: int, columns: int) -> float:
        """Return the fraction of multiplications that are padding, if every side is padded to whole tiles."""
        sides = ((rows, self.rows), (inner, self.inner), (columns, self.columns))
        return 1 - math.prod(n / (-(-n // tile) * tile) for n, tile in sides)


TPU_TILE = Tile(8, 128, 128)
TENSOR_CORE_TILES = {"float32": Tile(8, 4, 8), "bf16": Tile(8, 8, 8)}  # 16 bytes per row


def tile_for(device: torch.device, precision: str) -> Tile:
    """Return the vendor's tile: tensor cores, AMX (16 rows of 64 bytes), AVX-512 (64 bytes) or AVX2 (32 bytes)."""
    if device.type == "xla":
        return TPU_TILE
    if device.type == "cuda":
        return TENSOR_CORE_TILES[precision]
    features = cpu_features()
    if precision == "bf16" and "amx_bf16" in features:
        return Tile(16, 32, 16)
    columns = 16 if "avx512f" in features else 8
    return Tile(1, 2 if precision == "bf16" else 1, columns)
