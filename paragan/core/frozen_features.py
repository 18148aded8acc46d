"""Frozen networks of the user whose feature maps a loss or a discriminator uses.

They are no part of a player: in no optimizer, exchange or checkpoint, and read again wherever a run starts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.user_imports import import_attribute


@functools.cache
def load_frozen(field: str, name: str, device: torch.device) -> nn.Module:
    """Return the frozen network that `module:callable` makes, on a device.

    Args:
        field: of the run that names it, for errors.

    Raises:
        UsageError: it cannot be made.
    """
    return make_frozen(field, name).to(device)


@functools.cache
def make_frozen(field: str, name: str) -> nn.Module:
    """Return the frozen network that `module:callable` makes. Raises as `load_frozen` does."""
    try:
        with torch.random.fork_rng():  # it is made once, and must not change what is drawn after it
            network = import_attribute(name)()
    except (Exception, SystemExit) as error:  # importing a module may run any code
        raise UsageError(
            f"{field}={name}: {type(error).__name__}: {error}. Use module:callable, where the callable returns an "
            "nn.Module, and start in the folder of the module"
        ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"{field}={name}: is a callable that returned {type(network).__name__}. Return an nn.Module")
    return network.eval().requires_grad_(False)


def frozen_maps(field: str, name: str, images: Tensor, taps: Sequence[str] = ()) -> list[Tensor]:
    """Return feature maps [N, ...] of images, which gradients reach.

    Args:
        field: of the run that names the network, for errors.
        name: of the network, module:callable.
        images: [N, C, H, W] in [-1, 1].
        taps: names of the modules whose outputs are returned; without any, what the network returns, a list of maps.

    Raises:
        UsageError: the network has no such module, or does not return maps.
    """
    network = load_frozen(field, name, images.device)
    maps = _run_tapped(field, network, images, taps) if taps else network(images)
    is_list = isinstance(maps, list | tuple) and len(maps) > 0
    if not is_list or not all(isinstance(m, Tensor) and len(m) == len(images) for m in maps):
        raise UsageError(
            f"{field}={name}: the network returned {type(maps).__name__}. Let it return a list of feature maps [N, ...]"
        )
    return list(maps)


def _run_tapped(field: str, network: nn.Module, images: Tensor, taps: Sequence[str]) -> list[Tensor]:
    modules = dict(network.named_modules())
    if missing := [tap for tap in taps if tap not in modules]:
        names = ", ".join(name for name in modules if name and name.count(".") < 2)
        raise UsageError(f"{field}: the network has no module {missing[0]}. Use names of {names}")
    outputs: dict[str, Any] = {}
    hooks = [
        modules[tap].register_forward_hook(lambda module, args, output, tap=tap: outputs.update({tap: output}))
        for tap in taps
    ]
    try:
        network(images)
    finally:
        for hook in hooks:
            hook.remove()
    return [outputs[tap] for tap in taps]
