"""The networks of DCGAN in float64, where rounding is negligible: `--nets=benchmarks.lib.float64_nets:Float64DCGAN`."""

from __future__ import annotations

from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.nets import DCGAN
from paragan.nets.spec import Spec


class Float64(nn.Module):
    """A network whose parameters and passes are float64."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net.double()

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.net(x.double(), y)


@config_class
class Float64DCGAN(DCGAN):
    """DCGAN in float64."""

    name: str = "float64-dcgan"  # pyright: ignore[reportIncompatibleVariableOverride]

    def generator(self, spec: Spec) -> nn.Module:
        return Float64(super().generator(spec))

    def discriminator(self, spec: Spec) -> nn.Module:
        return Float64(super().discriminator(spec))
