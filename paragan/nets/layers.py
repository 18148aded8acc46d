"""Building blocks of the families: a factory of initialised layers, group norm, and activation checkpointing."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from paragan.nets.resample import DownConv, UpConv
from paragan.nets.spectral_norm import add_spectral_norm


@dataclass(frozen=True)
class LayerFactory:
    """Makes layers: weights by `initialise(weight, gain)`, biases 0; then spectral norm.

    Weights are initialised first, because spectral norm starts its power iteration from them.

    initialise       : called as `initialise(weight, gain)`
    spectral         : whether layers have spectral norm
    residual_gain    : gain in residual branches; 1 elsewhere
    fused_resampling : fuse convolutions with the up- or downsampling next to them (exact, and cheaper)
    """

    initialise: Callable[[Tensor, float], object]
    spectral: bool = False
    residual_gain: float = 1.0
    fused_resampling: bool = True

    def __call__(self, layer: nn.Conv2d | nn.Linear | nn.Embedding, gain: float = 1.0) -> nn.Module:
        """Initialise `layer` and return it."""
        self.initialise(layer.weight, gain)
        if not isinstance(layer, nn.Embedding) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
        return add_spectral_norm(layer) if self.spectral else layer

    def conv(self, a: int, b: int, kernel: int, gain: float = 1.0) -> nn.Module:
        """[N, a, H, W] -> [N, b, H, W]."""
        return self(nn.Conv2d(a, b, kernel, padding=kernel // 2), gain)

    def up(self, a: int, b: int, kernel: int, gain: float = 1.0) -> nn.Module:
        """[N, a, H, W] -> [N, b, 2 H, 2 W]."""
        layer = UpConv(a, b, kernel, padding=kernel // 2)
        layer.fused_resampling = self.fused_resampling
        return self(layer, gain)

    def down(self, a: int, b: int, kernel: int, gain: float = 1.0) -> nn.Module:
        """[N, a, H, W] -> [N, b, H / 2, W / 2]."""
        layer = DownConv(a, b, kernel, padding=kernel // 2)
        layer.fused_resampling = self.fused_resampling
        return self(layer, gain)


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm of at most 32 groups of at least 4 channels (Wu and He 2018), as many as divide them."""
    groups = next(count for count in range(min(32, max(1, channels // 4)), 0, -1) if channels % count == 0)
    return nn.GroupNorm(groups, channels)


def maybe_checkpoint(block: Callable[..., Tensor], checkpointing: bool, *inputs: Any) -> Tensor:
    """Return `block(*inputs)`. With `checkpointing` its activations are recomputed in backward instead of stored.

    Batch moments are not counted twice: a player counts them in the forward pass of a turn only.
    """
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(_run_uncached, block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)


def _run_uncached(block: Callable[..., Tensor], *inputs: Any) -> Tensor:
    with _no_parametrize_cache():
        return block(*inputs)


@contextlib.contextmanager
def _no_parametrize_cache() -> Iterator[None]:
    """Disable torch's `parametrize.cached` inside, so that parametrized weights are computed at every use.

    Checkpointing needs the same computation in both passes, and the second pass has no cache.
    """
    previous = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = previous
