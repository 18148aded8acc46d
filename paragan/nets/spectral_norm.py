"""Spectral norm whose power iteration runs once per optimizer step, before the first lane.

Miyato et al., "Spectral Normalization for Generative Adversarial Networks", 2018. Torch iterates in every forward in
training mode, so the number of forwards (lanes, ranks, penalties) would change the training. Here forwards do not
change the vectors u and v; only `power_iteration` does:

    train_mode(net)                # instead of net.train()
    for step in range(steps):
        power_iteration(net)
        ...                        # any number of forwards

Works on any network, with torch's parametrization or its older hook; u and v are in the state dict. Small layers of one
shape are iterated in one batched product: a network of forty layers has about ten shapes.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization
from torch.nn.utils.spectral_norm import SpectralNorm as SpectralHook  # torch's older form

from paragan.core.devices import backend_of

# Largest matrices that are batched, in numbers: above, memory traffic takes the time, not the number of calls. Measured
# on two CPU cores (1.0 times at 20,000 numbers, 1.3 times faster at 2,000); a guess for devices with streams.
MAX_BATCHED_NUMBERS = 1 << 14
MAX_BATCHED_NUMBERS_ON_STREAMS = 1 << 20
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _SpectralNormOfValues(_SpectralNorm):
    """Torch's, but for a weight without values (a fake tensor) there are no power iterations.

    Making a norm takes 15 of them. In an estimate of memory (plan/memory.py) their calls would take most of the time.
    """

    def _power_method(self, weight_mat: Tensor, n_power_iterations: int) -> None:
        if not isinstance(weight_mat, FakeTensor):
            super()._power_method(weight_mat, n_power_iterations)


def add_spectral_norm(module: nn.Module) -> nn.Module:
    """Divide the weight of `module` by its largest singular value, and return `module`. Initialise the weight first."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    dim = 1 if isinstance(module, _TRANSPOSED_CONVOLUTIONS) else 0  # of the outputs
    register_parametrization(module, "weight", _SpectralNormOfValues(weight, dim=dim))
    return module


def has_spectral_norm(net: nn.Module) -> bool:
    """Return whether any weight of `net` has spectral norm."""
    return any(isinstance(part, _SpectralNorm) or any(_spectral_hooks(part)) for part in net.modules())


def train_mode(net: nn.Module) -> nn.Module:
    """Call `net.train()`, but without power iteration in forwards; return `net`."""
    return freeze_power_iteration(net.train())


def freeze_power_iteration(net: nn.Module) -> nn.Module:
    """Disable power iteration in forwards until the next `net.train()`; return `net`.

    A module with torch's older hook iterates if the module itself is in training mode. It is put in eval mode, which
    makes no other difference to a convolution, linear or embedding layer.
    """
    for part in net.modules():
        if isinstance(part, _SpectralNorm) or any(_spectral_hooks(part)):
            part.training = False
    return net


@torch.no_grad()
def power_iteration(net: nn.Module) -> None:
    """Update u and v of every spectral norm of `net` from its current weights.

    One update is torch's own: `n_power_iterations` iterations, which is 1 by default.
    """
    by_shape: dict[tuple[object, ...], list[tuple[_SpectralNorm, Tensor]]] = defaultdict(list)
    for part in net.modules():
        if isinstance(part, ParametrizationList):
            norm = part[0]
            if len(part) == 1 and isinstance(norm, _SpectralNorm) and part.original.dim() > 1:
                matrix = norm._reshape_weight_to_matrix(part.original)  # [O, I], or [O, I k k] of a convolution
                by_shape[*matrix.shape, norm.n_power_iterations, norm.eps].append((norm, matrix))
            else:
                _iterate_chain(part)
        for hook in _spectral_hooks(part):
            hook.compute_weight(part, do_power_iteration=True)
    for layers in by_shape.values():
        _iterate_batched(*zip(*layers))


def _iterate_batched(norms: tuple[_SpectralNorm, ...], matrices: tuple[Tensor, ...]) -> None:
    """Run torch's power iteration on layers whose matrices all are [O, I]; large ones one by one."""
    first = norms[0]
    has_streams = backend_of(matrices[0].device).has_streams
    max_numbers = MAX_BATCHED_NUMBERS_ON_STREAMS if has_streams else MAX_BATCHED_NUMBERS
    if len(norms) == 1 or matrices[0].numel() > max_numbers:
        for norm, matrix in zip(norms, matrices):
            norm._power_method(matrix, norm.n_power_iterations)
        return
    weights = torch.stack(matrices)  # [L, O, I]
    v = torch.stack([norm._v for norm in norms])[..., None]
    u = v  # a placeholder before the first iteration
    for _ in range(first.n_power_iterations):
        u = F.normalize(weights @ v, dim=1, eps=first.eps)
        v = F.normalize(weights.mT @ u, dim=1, eps=first.eps)
    torch._foreach_copy_([norm._u for norm in norms], list(u[..., 0]))
    torch._foreach_copy_([norm._v for norm in norms], list(v[..., 0]))


def _iterate_chain(chain: ParametrizationList) -> None:
    """Evaluate the chain once with spectral norms in training mode: each takes the result of those before it."""
    norms = [part for part in chain if isinstance(part, _SpectralNorm)]
    if not norms:
        return
    for norm in norms:
        norm.training = True
    chain()
    for norm in norms:
        norm.training = False


def _spectral_hooks(module: nn.Module) -> Iterator[SpectralHook]:
    return (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralHook))
