"""Spectral norm with one law: power iteration runs once per optimizer step, before the first lane.

Miyato et al., "Spectral Normalization for Generative Adversarial Networks", 2018. Torch iterates at every
forward in training mode, so the number of forwards (lanes, ranks, penalties) would change what is trained.
Here the vectors u, v are held during forwards, and only `power_iteration` moves them:

    train_mode(net)                # instead of net.train()
    for step in range(steps):
        power_iteration(net)
        ...                        # any number of forwards

Works on any network, with torch's parametrization or its older hook; u and v are in the state dict. Layers of one
shape are iterated together, in one batched product: a network of forty layers has about ten shapes.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm as SpectralHook  # torch's older form

# The largest matrices worth laying side by side, in numbers: beyond, it is memory that takes time, not the number of
# calls. Measured on two cores (1.0 times at 20,000, 1.3 times faster at 2,000); for other devices a guess.
MAX_BATCHED_NUMBERS = {"cpu": 1 << 14, "cuda": 1 << 20}


def add_spectral_norm(module: nn.Module) -> nn.Module:
    """`module` itself, its weight divided by its largest singular value. Initialise the weight before."""
    return parametrizations.spectral_norm(module)


def has_spectral_norm(net: nn.Module) -> bool:
    """Whether any weight of `net` has a spectral norm."""
    return any(isinstance(part, _SpectralNorm) or any(_spectral_hooks(part)) for part in net.modules())


def train_mode(net: nn.Module) -> nn.Module:
    """`net.train()`, except that forwards do not iterate; returns `net`."""
    return freeze_power_iteration(net.train())


def freeze_power_iteration(net: nn.Module) -> nn.Module:
    """Keep forwards from iterating, until the next `net.train()`; returns `net`.

    A module with torch's older hook iterates when it is itself in training mode: it is put in eval mode,
    which a convolution, linear or embedding layer does not otherwise notice.
    """
    for part in net.modules():
        if isinstance(part, _SpectralNorm) or any(_spectral_hooks(part)):
            part.training = False
    return net


@torch.no_grad()
def power_iteration(net: nn.Module) -> None:
    """One update of u and v in every spectral norm of `net`, from the weights as they are now.

    An update is torch's own: `n_power_iterations` of them, 1 unless the network's author asked for more.
    """
    alike: dict[tuple[object, ...], list[tuple[_SpectralNorm, Tensor]]] = defaultdict(list)
    for part in net.modules():
        if isinstance(part, ParametrizationList):
            norm = part[0]
            if len(part) == 1 and isinstance(norm, _SpectralNorm) and part.original.dim() > 1:
                matrix = norm._reshape_weight_to_matrix(part.original)  # [O, I], of a convolution [O, I k k]
                alike[*matrix.shape, norm.n_power_iterations, norm.eps].append((norm, matrix))
            else:
                _iterate_chain(part)
        for hook in _spectral_hooks(part):
            hook.compute_weight(part, do_power_iteration=True)
    for layers in alike.values():
        _iterate_batched(*zip(*layers))


def _iterate_batched(norms: tuple[_SpectralNorm, ...], matrices: tuple[Tensor, ...]) -> None:
    """Torch's power iteration of layers whose matrices are all [O, I]. Large ones take turns: laying them side by
    side would cost more than a product of each."""
    first = norms[0]
    if len(norms) == 1 or matrices[0].numel() > MAX_BATCHED_NUMBERS.get(matrices[0].device.type, 0):
        for norm, matrix in zip(norms, matrices):
            norm._power_method(matrix, norm.n_power_iterations)
        return
    weights = torch.stack(matrices)  # [L, O, I]
    v = torch.stack([norm._v for norm in norms])[..., None]
    u = v  # of no use before the first iteration
    for _ in range(first.n_power_iterations):
        u = F.normalize(weights @ v, dim=1, eps=first.eps)
        v = F.normalize(weights.mT @ u, dim=1, eps=first.eps)
    torch._foreach_copy_([norm._u for norm in norms], list(u[..., 0]))
    torch._foreach_copy_([norm._v for norm in norms], list(v[..., 0]))


def _iterate_chain(chain: ParametrizationList) -> None:
    """Evaluate the chain once, spectral norms in training mode: each sees the result of those before it."""
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
