"""A user-defined compressor: three levels per number, five numbers per byte.

    paragan train digits --ranks 2 --strategy.wire=examples.own_wire:Ternary
    paragan train digits --ranks 2 --strategy.wire=examples.own_wire:Ternary --strategy.wire.threshold=1

A compressor has a name, a size (`nbytes`), its accuracy (`delta`, `feedback`), `encode` and `decode`. The exchange does
the rest: shards, both directions, error feedback, checkpoints, predicted and counted bytes.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from paragan.core.schema import config_class

PER_BYTE = 5  # 3^5 = 243


@config_class
class Ternary:
    """Each number becomes 0 or plus or minus one scale, the mean magnitude of the large numbers (Li et al. 2016).

    threshold : numbers below this become 0, in mean magnitudes of the vector
    """

    name: str = "ternary"
    threshold: float = 0.7
    lossy: ClassVar[bool] = True
    feedback: ClassVar[float] = 0.5

    def nbytes(self, n: int) -> int:
        return 4 + -(-n // (4 * PER_BYTE)) * 4

    def delta(self, n: int) -> float:
        return max(0.0, 1 - self.threshold) ** 2 / n

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        size = x.abs()
        large = ~(size < self.threshold * size.mean(dtype=torch.float64))  # nan and infinities count as large
        scale = size.where(large, 0).sum(dtype=torch.float64) / large.sum().clamp(min=1)
        digits = (x.sign() * large + 1).nan_to_num().to(torch.uint8)
        digits = nn.functional.pad(digits, (0, PER_BYTE * (len(out) - 4) - len(x)))
        powers = 3 ** torch.arange(PER_BYTE, dtype=torch.uint8, device=x.device)
        out[:4].view(torch.float32).copy_(scale)
        out[4:] = (digits.view(-1, PER_BYTE) * powers).sum(1, dtype=torch.uint8)

    def decode(self, data: Tensor, out: Tensor) -> None:
        powers = 3 ** torch.arange(PER_BYTE, dtype=torch.uint8, device=data.device)
        digits = data[4:, None] // powers % 3
        torch.mul(digits.view(-1)[: len(out)].float() - 1, data[:4].view(torch.float32), out=out)
