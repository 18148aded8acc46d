"""Autocast of the stand-in accelerator: that of the CPU (aten/src/ATen/autocast_mode.cpp): equal numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

LOWER_PRECISION = [
    "conv1d",
    "conv1d.padding",
    "conv2d",
    "conv2d.padding",
    "conv3d",
    "conv3d.padding",
    "bmm",
    "mm",
    "baddbmm",
    "addmm",
    "addbmm",
    "linear",
    "_convolution.deprecated",
    "matmul",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "prelu",
    "scaled_dot_product_attention",
]
FLOAT32 = [
    "avg_pool3d",
    "binary_cross_entropy",
    "grid_sampler",
    "prod",
    "quantile",
    "mse_loss",
    "huber_loss",
    "smooth_l1_loss",
    "l1_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "linalg_matrix_norm",
    "linalg_svdvals",
    "linalg_eigh",
    "linalg_eigvalsh",
    "linalg_inv",
    "linalg_pinv",
    "linalg_qr",
    "linalg_svd",
    "fft_fft",
    "fft_ifft",
    "fft_fft2",
    "fft_ifft2",
    "fft_rfft",
    "fft_irfft",
    "stft",
]
WIDEST = ["stack", "cat", "index_copy"]
NAME = "mock"
_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_casts: dict[int, tuple[Tensor, Tensor]] = {}  # leaves that were cast, until autocast ends


def register(library: torch.library.Library) -> None:
    """Register the casts of all operations that autocast changes."""
    kinds = {_lower: LOWER_PRECISION, _to_float32: FLOAT32, _to_widest: WIDEST}
    for cast, names in kinds.items():
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None:
                library.impl(name, functools.partial(_run_cast, op, cast), "AutocastPrivateUse1")
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        _casts.clear()

    torch.clear_autocast_cache = clear_both


def _run_cast(op: Any, cast: Callable[[Any], Callable[[Any], Any]], *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_key):
        args, kwargs = tree_map(cast((args, kwargs)), (args, kwargs))
        return op(*args, **kwargs)


def _lower(arguments: Any) -> Callable[[Any], Any]:
    dtype = torch.get_autocast_dtype(NAME)
    return lambda x: _cached_cast(x, dtype)


def _to_float32(arguments: Any) -> Callable[[Any], Any]:
    return lambda x: _cached_cast(x, torch.float32)


def _to_widest(arguments: Any) -> Callable[[Any], Any]:
    leaves = [x for x in torch.utils._pytree.tree_leaves(arguments) if _is_eligible(x)]
    is_wide = any(x.dtype == torch.float32 for x in leaves)
    dtype = torch.float32 if is_wide else torch.get_autocast_dtype(NAME)
    return lambda x: _cached_cast(x, dtype)


def _is_eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME and x.is_floating_point() and x.dtype != torch.float64


def _cached_cast(x: Any, dtype: torch.dtype) -> Any:
    if not _is_eligible(x) or x.dtype == dtype:
        return x
    is_weight = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    if not (is_weight and torch.is_autocast_cache_enabled()):
        return x.to(dtype)
    if id(x) not in _casts:
        _casts[id(x)] = x, x.to(dtype)
    return _casts[id(x)][1]
