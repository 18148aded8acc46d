"""Batch norm whose statistics are those of a lane, so that a score does not depend on the number of ranks.

Ioffe and Szegedy, "Batch Normalization", 2015. In a merged forward pass of several lanes every lane is
normalised with its own moments. Running statistics follow one law: the moments of all lanes (and ranks) are
averaged and applied once per step. Hence a forward pass only collects (`moments`), and `settle` applies.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paragan.core.errors import UsageError
from paragan.nets.conditioning import require_labels


class LaneBatchNorm(_BatchNorm):
    """Batch norm per lane of [N, C, ...], any number of further axes; same state dict as `nn.BatchNorm2d`.

    In training mode a batch is `N // lane_batch` consecutive groups along N, each normalised with its own
    mean and biased variance. In eval mode the running statistics are used, as in torch. Without a trainer
    (`lane_batch` None, `tracking` False) it normalises like torch, but running statistics stay as they are.

    `lane_batch` is the number of images per lane; None takes the whole batch as one group. While `tracking`,
    a training forward adds to `moments` [2 C + 1] the sum over groups of the means [C], of the *unbiased*
    variances [C], and the number of groups [1]. `momentum` None averages all steps equally, as in torch.

    Raises `Unusable` from `forward` when `lane_batch` does not divide N.
    """

    lane_batch: int | None = None
    tracking: bool = False
    moments: Tensor

    def __init__(self, channels: int, affine: bool = True, eps: float = 1e-5, momentum: float | None = 0.1):
        super().__init__(channels, eps, momentum, affine)
        _register_moments(self)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [N, C, ...], got {input.dim()}D input")

    def forward(self, input: Tensor, y: Tensor | None = None) -> Tensor:
        """[N, C, ...] to the same shape, dtype and memory format; `y` is ignored (see `batch_norm`)."""
        return _join(self.normalize_lanes(input))

    def normalize_lanes(self, input: Tensor) -> list[Tensor]:
        """The groups of the batch, [N / groups, C, ...] each, normalised; one group in eval mode."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return [self._normalize(input, self.running_mean, self.running_var, training=False)]
        groups = self._num_groups(input.shape[0])
        seen = torch.zeros(groups, 2, self.num_features, dtype=self._stats_dtype(input), device=input.device)
        # Momentum 1 makes the kernel write the mean and unbiased variance it computes anyway into `seen`. On
        # CPU slices and cat are 3 to 7 times faster than var_mean on a view and a scale-and-shift.
        out = [
            self._normalize(part, mean, var, training=True) for part, (mean, var) in zip(_split(input, groups), seen)
        ]
        if self.tracking and self.training:
            self._track(seen)
        return out

    @torch.no_grad()
    def apply_moments(self) -> None:
        """Apply `moments` to the running statistics as one step, then zero them; if empty, do nothing.

        Never waits for the device.
        """
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            count = self.moments[-1]
            some = count > 0
            self.num_batches_tracked += some
            steps = self.num_batches_tracked.clamp(min=1)
            rate = (1 / steps if self.momentum is None else self.momentum) * some
            mean, var = (self.moments[:-1] / count.clamp(min=1)).view(2, -1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate.to(self.running_mean.dtype))
            self.running_var.lerp_(var.to(self.running_var.dtype), rate.to(self.running_var.dtype))
        self.moments.zero_()

    def _num_groups(self, images: int) -> int:
        if self.lane_batch is None:
            return 1
        if images % self.lane_batch:
            raise UsageError(
                f"lane_batch: {images} images are not a whole number of lanes of {self.lane_batch}; "
                f"{images - images % self.lane_batch or self.lane_batch} images would be"
            )
        return images // self.lane_batch

    def _stats_dtype(self, input: Tensor) -> torch.dtype:
        """Statistics have the parameters' dtype, and at least float32 where there are none (bf16 input)."""
        if self.weight is not None:
            return self.weight.dtype
        return torch.promote_types(input.dtype, torch.float32)

    def _normalize(self, x: Tensor, mean: Tensor | None, var: Tensor | None, training: bool) -> Tensor:
        return F.batch_norm(x, mean, var, self.weight, self.bias, training, 1.0, self.eps)

    @torch.no_grad()
    def _track(self, stats: Tensor) -> None:
        self.moments[:-1].add_(stats.sum(0).flatten())  # [groups, 2, C]; += would copy besides
        self.moments[-1].add_(len(stats))


class LaneBatchNorm1d(nn.BatchNorm1d, LaneBatchNorm):
    """`LaneBatchNorm` of [N, C] or [N, C, L]; stands where `nn.BatchNorm1d` stood."""


class LaneBatchNorm2d(nn.BatchNorm2d, LaneBatchNorm):
    """`LaneBatchNorm` of [N, C, H, W]; stands where `nn.BatchNorm2d` stood."""


class LaneBatchNorm3d(nn.BatchNorm3d, LaneBatchNorm):
    """`LaneBatchNorm` of [N, C, D, H, W]; stands where `nn.BatchNorm3d` stood."""


class ConditionalBatchNorm2d(nn.Module):
    """Batch norm per lane with a gain and a bias per class: `gain[y] * normalised(x) + bias[y]`.

    Dumoulin et al., "A Learned Representation for Artistic Style", 2017, eq. 5. Gains start at 1, biases at
    0. The inner `norm` is an ordinary `LaneBatchNorm2d` without parameters: set `lane_batch` and `tracking`
    there.
    """

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = LaneBatchNorm2d(channels, affine=False)
        self.gain = nn.Embedding(classes, channels)
        self.bias = nn.Embedding(classes, channels)
        nn.init.ones_(self.gain.weight)
        nn.init.zeros_(self.bias.weight)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        """[N, C, H, W], int64 [N] in [0, classes) -> [N, C, H, W], dtype and memory format of `x`."""
        y = require_labels(y)
        return _scale_and_shift(self.norm, x, self.gain(y), self.bias(y))


class LinearConditionalBatchNorm2d(nn.Module):
    """Batch norm per lane with a gain and a bias for each image: `(1 + A c) * normalised(x) + B c`.

    c [N, length] holds the class's embedding, a part of z, or both: Brock, Donahue and Simonyan, "Large Scale
    GAN Training for High Fidelity Natural Image Synthesis", 2019, appendix B. `make` initialises A and B.
    """

    def __init__(self, channels: int, length: int, make: Callable[[nn.Linear], nn.Module]):
        super().__init__()
        self.norm = LaneBatchNorm2d(channels, affine=False)
        self.gain = make(nn.Linear(length, channels, bias=False))
        self.bias = make(nn.Linear(length, channels, bias=False))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """[N, C, H, W], [N, length] -> [N, C, H, W], dtype and memory format of `x`."""
        return _scale_and_shift(self.norm, x, 1 + self.gain(c), self.bias(c))


def _scale_and_shift(norm: LaneBatchNorm2d, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """[N, C, H, W] normalised by lane, times `gain` [N, C] plus `bias` [N, C]."""
    normalised = _join(norm.normalize_lanes(x))
    # As fast as addcmul on CPU, and up to twice as fast in bf16.
    return (normalised * gain[:, :, None, None].to(x.dtype)).add_(bias[:, :, None, None].to(x.dtype))


def batch_norm(channels: int, classes: int = 0) -> nn.Module:
    """Batch norm to be called as `norm(x, y)`: conditional with `classes`, ignoring `y` with 0."""
    return ConditionalBatchNorm2d(channels, classes) if classes else LaneBatchNorm2d(channels)


def convert_batch_norm(net: nn.Module) -> list[str]:
    """Make every exact `nn.BatchNorm1d/2d/3d` and `nn.SyncBatchNorm` of `net` a lane version, in place.

    The module objects themselves change class, so parameters, buffers, names, hooks and references to them
    stay. Returns the names of modules that couple a batch but cannot be converted (subclasses, lazy or
    parametrized ones): a trainer has to run these lane by lane. Instance, layer and group norm do not
    couple and are untouched; calls of `F.batch_norm` in a network's own `forward` are not seen.
    """
    left = []
    for name, module in net.named_modules():
        if type(module) in _LANE_CLASSES:
            module.__class__ = _LANE_CLASSES[type(module)]
            _register_moments(module)
        elif isinstance(module, _BatchNorm) and not isinstance(module, LaneBatchNorm):
            left.append(name or type(module).__name__)
    return left


_LANE_CLASSES: dict[type[nn.Module], type[LaneBatchNorm]] = {
    nn.BatchNorm1d: LaneBatchNorm1d,
    nn.BatchNorm2d: LaneBatchNorm2d,
    nn.BatchNorm3d: LaneBatchNorm3d,
    nn.SyncBatchNorm: LaneBatchNorm,
}


def _register_moments(norm: nn.Module) -> None:
    """Give a batch norm its `moments`, zeros beside its other tensors."""
    assert isinstance(norm, LaneBatchNorm)
    near = next((t for t in (norm.running_mean, norm.weight) if t is not None), None)
    device = None if near is None else near.device
    moments = torch.zeros(2 * norm.num_features + 1, dtype=torch.float32, device=device)
    norm.register_buffer("moments", moments, persistent=False)


def _split(x: Tensor, groups: int) -> Sequence[Tensor]:
    return (x,) if groups == 1 else x.chunk(groups)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
