"""The objective of autoencoders, codecs and upscalers: a distance to the data, and an adversarial loss.

G gets an input that belongs to a real sample (`conditioning_input`), so fake i is to equal real i. Terms, with the
weights of the configuration: distances of the images, features of D (feature matching), features of a fixed network
(perceptual), what G itself returns as a loss (`outputs`: commitment, KL), and the adversarial loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from paragan.core.errors import UsageError
from paragan.core.frozen_features import frozen_maps, make_frozen
from paragan.core.schema import config_class
from paragan.core.spectrograms import MelConfig, log_mel
from paragan.core.types import Batch, DiscriminatorFn, DiscriminatorOutput, Loss, run_discriminator
from paragan.losses.adversarial import Adversarial, Weight
from paragan.losses.gradient_weights import AdaptiveWeight, Balancer
from paragan.losses.running_state import ObjectiveState, state_of_generator

Terms = dict[str, tuple[float, Tensor]]  # by name: weight and value
PositiveWeight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@config_class
class Reconstruction:
    """A distance between G's images and the data, plus an adversarial loss.

    l1, l2              : weights of the mean absolute and of the mean squared difference
    perceptual          : weight of the distance of features of a fixed network
    perceptual_features : that network, as module:callable; the callable returns an nn.Module: images in [-1, 1] -> a
                          list of feature maps [N, C, ...]
    mel                 : of waves: weight of the mean absolute difference of logarithmic mel spectrograms (45 in
                          HiFi-GAN)
    spectrogram         : the spectrogram of this term
    feature_matching    : weight of the distance of D's features (2 in HiFi-GAN); D has to return them
    outputs             : weights of scalars that G returns beside the images, such as {commitment: 0.25}
    adversarial_weight  : weight of the adversarial loss
    weighting           : fixed: terms are added with their weights. adaptive: terms that need D are also multiplied by
                          the ratio of the gradients at G's last layer (VQGAN). balanced: each weight is the share of
                          its term in the gradient at G's output (EnCodec)
    max_adaptive_weight : upper bound of the adaptive ratio
    balancer_decay      : decay of the mean norms of gradients, per step, in balanced
    adversarial         : the adversarial loss and the penalties of D
    """

    name: Literal["reconstruction"] = "reconstruction"
    l1: Weight = 1.0
    l2: Weight = 0.0
    perceptual: Weight = 0.0
    perceptual_features: str = ""
    mel: Weight = 0.0
    spectrogram: MelConfig = MelConfig()
    feature_matching: Weight = 0.0
    outputs: Mapping[str, Weight] = Field(default_factory=dict)
    adversarial_weight: Weight = 1.0
    weighting: Literal["fixed", "adaptive", "balanced"] = "fixed"
    max_adaptive_weight: Annotated[float, Field(gt=0, le=1e30)] = 1e4
    balancer_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adversarial: Adversarial = Adversarial()

    # properties that the trainer uses ---------------------------------------------------------------------

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice."""
        return self.adversarial.second_order

    @property
    def clip(self) -> float:
        """Bound of D's weights; 0: none."""
        return self.adversarial.clip

    def check(self) -> None:
        """Raise `UsageError` if two fields contradict each other."""
        self.adversarial.check()
        if bool(self.perceptual) != bool(self.perceptual_features):
            raise UsageError(
                f"objective.perceptual={self.perceptual:g}: needs objective.perceptual_features, and the other way "
                "round. Set both, such as --objective.perceptual=1 --objective.perceptual_features=mine:features"
            )
        if self.perceptual_features:
            make_frozen("objective.perceptual_features", self.perceptual_features)
        if not any((self.l1, self.l2, self.perceptual, self.mel)):
            raise UsageError("objective.l1=0: no distance to the data is left. Use --objective.l1=1")
        unsupported = {
            "zcr": self.adversarial.latent_perturbation,
            "classifier": self.adversarial.classifier,
            "contrastive": self.adversarial.contrastive,
            "path_length": self.adversarial.path_length,
            "orthogonal": self.adversarial.orthogonal + self.adversarial.d_orthogonal,
        }
        for field, value in unsupported.items():
            if value:
                raise UsageError(
                    f"objective.adversarial.{field}: has no effect beside a distance to the data. "
                    f"Use objective.adversarial.{field}=0"
                )
        if self.feature_matching and self.adversarial.augment.name != "none":
            raise UsageError(
                f"objective.feature_matching={self.feature_matching:g}: compares images that are not augmented. Use "
                "objective.adversarial.augment=none, or objective.feature_matching=0"
            )

    def check_waves(self, shape: Sequence[int], sample_rate: int = 0) -> None:
        """Raise `UsageError` if spectrograms are compared, and the data are no waves of this rate (Hz, 0: unknown)."""
        if not self.mel:
            return
        self.spectrogram.check("objective.spectrogram")
        least = max(self.spectrogram.n_fft, self.spectrogram.hop)
        if len(shape) != 2 or shape[0] != 1 or shape[1] < least:
            raise UsageError(
                f"objective.mel={self.mel:g}: compares waves [1, T] of at least {least} samples, and the data are "
                f"{list(shape)}. Use objective.mel=0 objective.l1=1, or audio"
            )
        if sample_rate not in (0, self.spectrogram.sample_rate):
            raise UsageError(
                f"objective.spectrogram.sample_rate={self.spectrogram.sample_rate}: the audio has {sample_rate} Hz. "
                f"Use objective.spectrogram.sample_rate={sample_rate}"
            )

    def make_state(self, step_images: int) -> ObjectiveState | None:
        """Return what D remembers for the adversarial loss; None if it needs nothing."""
        return self.adversarial.make_state(step_images)

    def make_g_state(self, g: nn.Module) -> nn.Module | None:
        """Return what G remembers for the weighting of its terms; None if that is fixed."""
        if self.weighting == "balanced":
            return Balancer(self._image_weights(), self.balancer_decay)
        if self.weighting == "fixed":
            return None
        last_layer = getattr(g, "last_layer", None)
        if not isinstance(last_layer, Tensor):
            raise UsageError(
                "objective.weighting=adaptive: G has no last_layer. Let its class have a property last_layer that "
                "returns the weight of its last layer, or use objective.weighting=fixed"
            )
        return AdaptiveWeight(last_layer, self.max_adaptive_weight)

    def _image_weights(self) -> dict[str, float]:
        weights = {
            "l1": self.l1,
            "l2": self.l2,
            "perceptual": self.perceptual,
            "mel": self.mel,
            "feature_matching": self.feature_matching,
            "adversarial": self.adversarial_weight,
        }
        return {name: weight for name, weight in weights.items() if weight}

    # the two losses -----------------------------------------------------------------------------------------

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        """Compute D's loss: that of the adversarial terms."""
        return self.adversarial.discriminator(d, real, fake, step)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        """Compute G's loss; D is not called while `fake.adversarial_weight` is 0."""
        reconstruction = self._distances(fake, real)
        adversarial: Terms = {}
        if fake.adversarial_weight and self.adversarial_weight:
            adversarial = self._adversarial_terms(d, fake, real, step)
        total, parts = self._combine(fake, reconstruction, adversarial)
        for name, weight in self.outputs.items():
            value = self._output(fake, name)
            total = total + weight * value
            parts[f"G/{name}"] = value.detach()
        return Loss(total, parts)

    def _output(self, fake: Batch, name: str) -> Tensor:
        """Return the mean of a scalar that G returned beside the images."""
        losses = [key for key, value in fake.fields.items() if value.is_floating_point() and value.dim() <= 1]
        if name not in losses:
            known = f"names of {', '.join(losses)}" if losses else "objective.outputs={}"
            raise UsageError(f"objective.outputs: G returns no scalar {name!r}. Use {known}")
        return fake.fields[name].float().mean()

    def _distances(self, fake: Batch, real: Batch) -> Terms:
        """Return the terms that need no D."""
        x, target = fake.images.float(), real.images.float()
        terms: Terms = {}
        if self.l1:
            terms["l1"] = self.l1, (x - target).abs().mean()
        if self.l2:
            terms["l2"] = self.l2, (x - target).square().mean()
        if self.perceptual:
            maps, expected = (self._perceptual_maps(images) for images in (x, target))
            terms["perceptual"] = self.perceptual, feature_distance(maps, expected)
        if self.mel:
            terms["mel"] = self.mel, self._mel_distance(x, target)
        return terms

    def _perceptual_maps(self, images: Tensor) -> Sequence[Tensor]:
        """Return the feature maps of images."""
        return frozen_maps("objective.perceptual_features", self.perceptual_features, images)

    def _mel_distance(self, waves: Tensor, target: Tensor) -> Tensor:
        """Return the mean absolute difference of the logarithmic mel spectrograms of waves [N, 1, T]."""
        self.check_waves(tuple(waves.shape[1:]))
        return (log_mel(waves, self.spectrogram) - log_mel(target, self.spectrogram)).abs().mean()

    def _adversarial_terms(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Terms:
        """Return the terms that need D."""
        recorder = _OutputRecorder(d)
        with cached():  # parametrized weights of D are computed once for both calls
            loss = self.adversarial.generator(recorder if self.feature_matching else d, fake, real, step)
            if self.feature_matching:
                with torch.no_grad():
                    on_real = run_discriminator(d, real.images, real.labels)
        terms: Terms = {"adversarial": (self.adversarial_weight, loss.total)}
        if self.feature_matching:
            on_fake = recorder.outputs[0]
            if not on_fake.features:
                raise UsageError(
                    f"objective.feature_matching={self.feature_matching:g}: D returns no features. Return a "
                    "paragan.DiscriminatorOutput with features, or use objective.feature_matching=0"
                )
            terms["feature_matching"] = self.feature_matching, feature_distance(on_fake.features, on_real.features)
        return terms

    def _combine(self, fake: Batch, reconstruction: Terms, adversarial: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of all terms, and their values by name."""
        terms = reconstruction | adversarial
        parts = {f"G/{name}": value.detach() for name, (_, value) in terms.items()}
        ramp = fake.adversarial_weight
        if self.weighting == "balanced":
            factors = dict.fromkeys(adversarial, ramp)
            return state_of_generator(fake.generator, "objective.weighting")(
                fake.images, {name: x for name, (_, x) in terms.items()}, factors
            ), parts
        distance = _weighted_sum(reconstruction)
        if not adversarial:
            return distance, parts
        if self.weighting == "fixed":
            return distance + ramp * _weighted_sum(adversarial), parts
        state: Any = state_of_generator(fake.generator, "objective.weighting")
        parts["G/adaptive_weight"] = state.weight.clone()
        # the ratio follows the size of what it multiplies, so the constant weight comes after it
        relative = {name: (weight / self.adversarial_weight, value) for name, (weight, value) in adversarial.items()}
        factor = self.adversarial_weight * ramp
        return state(fake.images, distance, _weighted_sum(relative), factor), parts

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """Return no term: weights are not penalised."""
        return None


class _OutputRecorder:
    """A D that records what it returns."""

    def __init__(self, d: DiscriminatorFn):
        self.d = d
        self.outputs: list[DiscriminatorOutput] = []

    def __call__(self, images: Tensor, labels: Tensor | None) -> DiscriminatorOutput:
        self.outputs.append(run_discriminator(self.d, images, labels))
        return self.outputs[-1]


def _weighted_sum(terms: Terms) -> Tensor:
    return torch.stack([weight * value for weight, value in terms.values()]).sum()


def feature_distance(a: Any, b: Any) -> Tensor:
    """Return the sum over feature maps of the mean absolute difference (feature matching, Larsen et al. 2016). Scalar.

    Args:
        a: feature maps [N, ...], a list.
        b: the same, of the data; they get no gradient.
    """
    distances = [(x.float() - y.detach().float()).abs().mean() for x, y in zip(a, b, strict=True)]
    return torch.stack(distances).sum()
