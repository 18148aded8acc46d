"""The networks of DCGAN in float64, where rounding is negligible: `--nets=benchmarks.lib.float64_nets:Float64DCGAN`."""

from __future__ import annotations

import time

from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.nets import DCGAN
from paragan.nets.spec import Spec


class Float64(nn.Module):
    """A network whose parameters and passes are float64; `pause_s` is waited out before each pass."""

    def __init__(self, net: nn.Module, pause_s: float = 0.0):
        super().__init__()
        self.net = net.double()
        self.pause_s = pause_s

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        time.sleep(self.pause_s)
        return self.net(x.double(), y)


@config_class
class Float64DCGAN(DCGAN):
    """DCGAN in float64."""

    name: str = "float64-dcgan"  # pyright: ignore[reportIncompatibleVariableOverride]
    pause_s: float = 0.0
    """Seconds that D waits before each pass: a run of few images then takes long enough to lose many ranks."""

    def generator(self, spec: Spec) -> nn.Module:
        return Float64(super().generator(spec))

    def discriminator(self, spec: Spec) -> nn.Module:
        return Float64(super().discriminator(spec), self.pause_s)
