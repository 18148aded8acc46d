"""Weights of losses that follow gradients: the adaptive weight of VQGAN, and the balancer of EnCodec.

Both are modules that belong to G, so that what they remember is in its checkpoints. They differentiate the losses with
respect to G's images once; the total that they return passes the weighted sum of these gradients on, so that D and
feature networks run backward once per step and not once for each weight.

Departure: weights come from the gradients of the steps before, over all lanes and ranks, and not from this rank's
current ones. So n ranks equal one, and no step waits for a message in the middle of its loss. The first step measures,
with weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError

EPSILON = 1e-4  # is added to the norm of the adversarial gradient, as in VQGAN's code


class AdaptiveWeight(nn.Module):
    """The adversarial weight |grad reconstruction| / (|grad adversarial| + 1e-4), gradients of G's last layer.

    Esser et al., "Taming Transformers for High-Resolution Image Synthesis", 2021, eq. 7. The norms are those of the
    mean loss over all lanes and ranks.

    weight : [] the weight of the next step; a step whose gradients are not finite leaves it as it was

    Args:
        last_layer: the weight of G's last layer.
        max_weight: upper bound of the weight (VQGAN's code: 1e4).
        decay: of the moving average of the weight over steps; 0: that of the last step, as in VQGAN.
    """

    synchronised: ClassVar[tuple[str, ...]] = ("gradients", "rows")
    needs_all_ranks: ClassVar[bool] = False  # ranks that train a G of their own have a weight of their own

    weight: Tensor
    gradients: Tensor
    rows: Tensor

    def __init__(self, last_layer: Tensor, max_weight: float = 1e4, decay: float = 0.0):
        super().__init__()
        self._last_layer = (last_layer,)  # in a tuple: it is no parameter of this module
        self.max_weight = max_weight
        self.decay = decay
        like = last_layer.detach()
        self.register_buffer("weight", like.new_zeros(()))
        self.register_buffer("gradients", like.new_zeros(2, like.numel()), persistent=False)
        self.register_buffer("rows", like.new_zeros(()), persistent=False)

    def forward(self, images: Tensor, reconstruction: Tensor, adversarial: Tensor, factor: float = 1.0) -> Tensor:
        """Return the total, reconstruction + weight * factor * adversarial.

        Args:
            images: [N, ...] that G has made.
            reconstruction: a scalar, a mean over images, which depends on G through `images` only.
            adversarial: the same.
            factor: constant part of the weight.
        """
        weight = self.weight * factor
        if not (torch.is_grad_enabled() and images.requires_grad):
            return reconstruction + weight * adversarial
        at_images = [_gradient(loss, images) for loss in (reconstruction, adversarial)]
        for total, gradient in zip(self.gradients, at_images):
            (at_layer,) = torch.autograd.grad(images, self._last_layer, gradient, retain_graph=True)
            total += at_layer.detach().flatten() * len(images)
        self.rows += len(images)
        value = reconstruction.detach() + weight * adversarial.detach()
        return with_gradient(value, images, at_images[0] + weight.to(images.dtype) * at_images[1])

    @torch.no_grad()
    def apply_synchronised(self) -> None:
        """Set the weight of the next step from the sums of this one. Never waits for the device."""
        reconstruction, adversarial = torch.linalg.vector_norm(self.gradients / self.rows.clamp(min=1), dim=1)
        weight = (reconstruction / (adversarial + EPSILON)).clamp(max=self.max_weight)
        average = torch.where(self.weight > 0, torch.lerp(weight, self.weight, self.decay), weight)
        is_usable = (self.rows > 0) & average.isfinite()
        self.weight.copy_(torch.where(is_usable, average, self.weight))
        self.gradients.zero_()
        self.rows.zero_()


class Balancer(nn.Module):
    """Scales losses so that their gradients at G's output have the norms that their weights say.

    Défossez et al., "High Fidelity Neural Audio Compression", 2022, eq. 7: loss i gets the weight
    `total_norm` * w_i / (sum of all w) / (mean norm of its gradient). Norms are of the gradient of an image's own loss,
    averaged over images and, with `decay`, over steps.

    Args:
        weights: w by the name of the loss, each above 0.
        decay: of the mean norms, per step.
        total_norm: norm of the total gradient, of one image, if the gradients are parallel.
    """

    synchronised: ClassVar[tuple[str, ...]] = ("sums",)
    needs_all_ranks: ClassVar[bool] = False

    norms: Tensor
    corrections: Tensor
    sums: Tensor

    def __init__(self, weights: Mapping[str, float], decay: float = 0.999, total_norm: float = 1.0):
        super().__init__()
        self.weights = dict(weights)
        self.decay = decay
        self.total_norm = total_norm
        self.register_buffer("norms", torch.zeros(len(self.weights)))  # moving averages, not yet divided by:
        self.register_buffer("corrections", torch.zeros(len(self.weights)))  # the sum of their factors
        self.register_buffer("sums", torch.zeros(2, len(self.weights)), persistent=False)  # of norms, of images

    def forward(
        self, images: Tensor, losses: Mapping[str, Tensor], factors: Mapping[str, float] | None = None
    ) -> Tensor:
        """Return the weighted total of the losses.

        Args:
            images: [N, ...] that G has made.
            losses: scalars by name, means over images, which depend on G through `images` only. Some may be missing.
            factors: by which the weights of some are multiplied.
        """
        scales = self._scales(losses, factors or {})
        value = torch.stack([scales[name] * loss.detach() for name, loss in losses.items()]).sum()
        if not (torch.is_grad_enabled() and images.requires_grad):
            return value
        total = torch.zeros_like(images)
        for name, loss in losses.items():
            gradient = _gradient(loss, images)
            norms = gradient.detach().flatten(1).to(self.sums.dtype).norm(dim=1) * len(images)
            index = list(self.weights).index(name)
            self.sums[0, index] += norms.sum()
            self.sums[1, index] += len(images)
            total += scales[name].to(images.dtype) * gradient
        return with_gradient(value, images, total)

    def _scales(self, losses: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
        unknown = [name for name in losses if name not in self.weights]
        if unknown:
            raise UsageError(f"losses[{unknown[0]!r}]: has no weight. Use {', '.join(self.weights)}")
        sum_of_weights = sum(self.weights[name] for name in losses)
        scales: dict[str, Tensor] = {}
        for index, (name, weight) in enumerate(self.weights.items()):
            share = self.total_norm * weight * factors.get(name, 1.0) / sum_of_weights
            norm = self.norms[index] / self.corrections[index].clamp(min=1e-12)
            scales[name] = torch.where(norm > 0, share / norm, torch.zeros_like(norm))
        return scales

    @torch.no_grad()
    def apply_synchronised(self) -> None:
        """Move the mean norms by the sums of this step. Never waits for the device."""
        norms = self.sums[0] / self.sums[1].clamp(min=1)
        is_usable = (self.sums[1] > 0) & norms.isfinite()
        decay = torch.where(is_usable, self.decay, 1.0).to(norms.dtype)
        self.norms.mul_(decay).add_(torch.where(is_usable, norms, 0) * (1 - decay))
        self.corrections.mul_(decay).add_(1 - decay)
        self.sums.zero_()


class _ExplicitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None, None


def with_gradient(value: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the scalar `value`, whose gradient with respect to x is `gradient`."""
    return _ExplicitGradient.apply(x, value, gradient)  # pyright: ignore


def _gradient(loss: Tensor, images: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, images, retain_graph=True)  # losses may share a pass of D
    return gradient
