"""Networks for tests whose G returns more than a wave: a NamedTuple whose field `wave` D judges."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.core.types import Batch
from paragan.nets import Spec


class Output(NamedTuple):
    """A wave [N, 1, T] and its power [N]."""

    wave: Tensor
    power: Tensor


class Generator(nn.Module):
    """Latents to waves [N, 1, length]."""

    def __init__(self, latent: int, length: int):
        super().__init__()
        self.linear = nn.Linear(latent, length)

    def forward(self, z: Tensor, y: Tensor | None) -> Output:
        wave = self.linear(z).tanh()[:, None]
        return Output(wave, wave.square().mean((1, 2)))


class Discriminator(nn.Module):
    """Waves [N, 1, length] to logits [N]."""

    def __init__(self, length: int):
        super().__init__()
        self.linear = nn.Linear(length, 1)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.linear(x[:, 0])[:, 0]


@config_class
class Nets:
    """Linear networks for waves."""

    name: str = "named-waves"
    latent: int = 3

    def generator(self, spec: Spec) -> nn.Module:
        return Generator(self.latent, spec.shape[-1])

    def discriminator(self, spec: Spec) -> nn.Module:
        return Discriminator(spec.shape[-1])


@config_class
class EnergyNets:
    """Linear networks that make waves of the energies of their frames, a field of the records."""

    name: str = "energies"
    latent: int = 0
    frame: int = 16

    def generator(self, spec: Spec) -> nn.Module:
        return Generator(spec.shape[-1] // self.frame, spec.shape[-1])

    def discriminator(self, spec: Spec) -> nn.Module:
        return Discriminator(spec.shape[-1])

    def conditioning_input(self, real: Batch) -> Tensor:
        return real.fields["energy"]
