"""The objective of G and D: an adversarial loss, penalties, class losses and augmentation. See docs/objectives.md.

Penalties that need gradients of D with respect to images (exact R1 and R2, gp) differentiate D twice. What the
objective remembers from step to step (LeCam's means, ADA's p) is in `losses/running_state.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from paragan.core.errors import UsageError
from paragan.core.running_mean import RunningMean
from paragan.core.schema import config_class
from paragan.core.types import Batch, DiscriminatorFn, DiscriminatorOutput, Loss, run_discriminator
from paragan.losses.augment import ADA, Augment, NoAugment
from paragan.losses.class_losses import classification_loss, contrastive_loss
from paragan.losses.consistency import augmentation_consistency, latent_consistency, latent_diversity
from paragan.losses.gan_losses import GAN_LOSSES
from paragan.losses.noise_levels import add_noise_by_level
from paragan.losses.path_length import check_generator, path_length_penalty
from paragan.losses.penalties import (
    centering_penalty,
    finite_difference_penalty,
    grad_norm_squared,
    gradient_penalty,
    lecam_penalty,
    orthogonal_penalty,
)
from paragan.losses.running_state import AugmentProbability, LeCamEMA, ObjectiveState, state_of, state_of_generator

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepInterval = Annotated[int, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Term = tuple[str, float, Tensor]  # name, weight, value


@config_class
class Adversarial:
    """An adversarial loss, the weights of the terms added to it (0: none), and the augmentation of D's images.

    loss             : the adversarial loss
    r1               : gamma; adds gamma / 2 E|grad D|^2 on reals
    r1_every         : add it every so many steps, multiplied by r1_every ("lazy")
    r2               : as r1, on fakes
    r2_every         : as r1_every, on fakes
    r1_r2_method     : exact: D is differentiated twice; finite_difference: |grad D|^2 is estimated from D's logits on
                       noisy images, without second derivatives
    difference_sigma : standard deviation of that noise, where images are in [-1, 1]
    center           : weight of E(D(x) + D(G(z)))^2, which keeps the logits around 0
    gp               : lambda; adds lambda E(|grad D| - 1)^2 between reals and fakes
    clip             : c; after every step of D its weights are clamped to [-c, c] (Arjovsky et al. 2017)
    path_length      : weight of path length regularization of G, which needs styles (StyleGAN2: 2)
    path_length_every : add it every so many steps of G, multiplied by it
    path_length_decay : decay of the mean path length per step in which it is added
    lecam            : weight of LeCam: keeps D's logits on each side near the running mean of the other side
    lecam_decay      : decay of these means per step
    cr               : weight of consistency of D under flips and shifts, on reals
    bcr              : the same on reals and on fakes
    zcr              : weight of consistency of D on fakes of perturbed latents
    zcr_g            : weight of the difference between these fakes, which G maximises
    zcr_sigma        : size of the perturbation, in standard deviations of a latent
    orthogonal       : weight of orthogonality of the filters of G (Brock et al. 2019: 1e-4)
    d_orthogonal     : the same for D
    classifier       : weight of the cross entropy of D's classifier: for D on reals and fakes, for G on its fakes
    contrastive      : weight of the 2C loss on D's embeddings: for D on reals, for G on its fakes
    temperature      : of the 2C loss
    noise_levels     : K above 1: D sees each image K times, with more and more noise towards the first. G returns as
                       many images in training (nets=gat)
    least_signal     : the factor on the first of these images; that on the last is 1
    augment          : augmentation of the images that D gets: none, diffaugment or ada
    """

    loss: Literal["hinge", "nonsaturating", "least_squares", "wasserstein", "relativistic"] = "hinge"
    r1: Weight = 0.0
    r1_every: StepInterval = 1
    r2: Weight = 0.0
    r2_every: StepInterval = 1
    r1_r2_method: Literal["exact", "finite_difference"] = "exact"
    difference_sigma: PositiveNumber = 0.01
    center: Weight = 0.0
    gp: Weight = 0.0
    clip: Weight = 0.0
    path_length: Weight = 0.0
    path_length_every: StepInterval = 4
    path_length_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    lecam: Weight = 0.0
    lecam_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    cr: Weight = 0.0
    bcr: Weight = 0.0
    zcr: Weight = 0.0
    zcr_g: Weight = 0.0
    zcr_sigma: PositiveNumber = 0.05
    orthogonal: Weight = 0.0
    d_orthogonal: Weight = 0.0
    classifier: Weight = 0.0
    contrastive: Weight = 0.0
    temperature: PositiveNumber = 1.0
    noise_levels: Annotated[int, Field(ge=1)] = 1
    least_signal: Annotated[float, Field(gt=0, lt=1)] = 0.125
    augment: Augment = NoAugment()
    name: Literal["adversarial"] = "adversarial"

    # properties that the trainer uses ---------------------------------------------------------------------

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice."""
        return self.gp > 0 or (self._is_exact and (self.r1 > 0 or self.r2 > 0))

    @property
    def _is_exact(self) -> bool:
        return self.r1_r2_method == "exact"

    def penalties_due(self, step: int) -> tuple[bool, bool, bool]:
        """Return which of R1, R2 and path length are due in a step. Steps with equal values compute the same."""
        intervals = ((self.r1, self.r1_every), (self.r2, self.r2_every), (self.path_length, self.path_length_every))
        r1, r2, path_length = (weight > 0 and step % every == 0 for weight, every in intervals)
        return r1, r2, path_length

    @property
    def latent_perturbation(self) -> float:
        """Standard deviation of the perturbation of latents, for a second batch of fakes; 0: no second batch."""
        return self.zcr_sigma if self.zcr or self.zcr_g else 0.0

    @property
    def replayed_fields(self) -> tuple[str, ...]:
        """The fields of G's output, beside the images, that D's loss uses."""
        return ("levels",) if self.noise_levels > 1 else ()

    @property
    def required_d_conditioning(self) -> str:
        """The `d_conditioning` that D must have for this objective; "" if logits are enough."""
        if self.classifier:
            return "classifier"
        return "contrastive" if self.contrastive else ""

    @property
    def uses_fakes(self) -> bool:
        """Return True: the losses need fakes."""
        return True

    @property
    def is_paired(self) -> bool:
        """Whether G's loss needs one real image for each fake."""
        return GAN_LOSSES[self.loss].is_paired

    def check(self) -> None:
        """Raise `UsageError` if two fields contradict each other. `config/validate.py` checks them against the run."""
        if not (self._is_exact or self.r1 or self.r2):
            raise UsageError(
                f"objective.r1_r2_method={self.r1_r2_method}: objective.r1 and objective.r2 are 0. Use objective.r1=1, "
                "or objective.r1_r2_method=exact"
            )
        if self.cr and self.bcr:
            raise UsageError(
                f"objective.bcr={self.bcr:g}: already includes objective.cr={self.cr:g}. Set one of them to 0"
            )
        if self.classifier and self.contrastive:
            raise UsageError(
                f"objective.classifier={self.classifier:g}: D has one head, and objective.contrastive="
                f"{self.contrastive:g} needs another. Set one of them to 0"
            )
        if self.noise_levels > 1 and (self.zcr or self.zcr_g):
            raise UsageError(
                f"objective.noise_levels={self.noise_levels}: D sees several images of each fake, and objective.zcr "
                "makes one of a nearby latent. Use objective.zcr=0 and objective.zcr_g=0"
            )
        if isinstance(self.augment, ADA) and not GAN_LOSSES[self.loss].is_signed:
            raise UsageError(
                f"objective.augment=ada: needs a loss for which the sign of D's logits tells reals from fakes, and "
                f"objective.loss={self.loss} is none. Use objective.loss=hinge or nonsaturating, or "
                "objective.augment=diffaugment"
            )

    def make_state(self, step_images: int) -> ObjectiveState | None:
        """Return the initial state of this objective, for `attach_state`; None if it needs none.

        Args:
            step_images: Real images of one step of D, over all ranks.
        """
        ada = self.augment if isinstance(self.augment, ADA) else None
        if not self.lecam and not ada:
            return None
        return ObjectiveState(
            LeCamEMA(self.lecam_decay) if self.lecam else None,
            AugmentProbability(ada.target, step_images / (1000 * ada.kimg)) if ada else None,
        )

    def make_g_state(self, g: nn.Module) -> nn.Module | None:
        """Return the initial state of this objective that belongs to G, for `attach_state`; None if it needs none.

        Raises:
            UsageError: G has no styles, which the path length needs.
        """
        if not self.path_length:
            return None
        check_generator(g)
        return RunningMean(self.path_length_decay)

    # the two losses -------------------------------------------------------------------------------------

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = False
    ) -> Loss:
        """Compute D's loss on a batch of reals and a batch of fakes.

        Args:
            d: The discriminator.
            real: Real images.
            fake: Fakes; `perturbed` is set if `latent_perturbation` is not 0.
            step: Number of D's step, for `r1_every` and `r2_every`.
            concat_real_fake: Run D once on reals and fakes together. Ignored in steps with exact R1 or R2, which need
                the gradient of one part alone.
        """
        r1, r2, _ = self.penalties_due(step)
        real = self._augmented(d, real, "D/real")
        fake = self._augmented(d, fake, "D/fake")
        if r1 and self._is_exact:
            real = _requires_grad(real)
        if r2 and self._is_exact:
            fake = _requires_grad(fake)
        with cached():  # spectral norm divides D's weights once for all calls
            if concat_real_fake and not (self._is_exact and (r1 or r2)):
                on_real, on_fake = _run_concatenated(d, real, fake)
            else:
                on_real = run_discriminator(d, real.images, real.labels)
                on_fake = run_discriminator(d, fake.images, fake.labels)
            terms = list(self._consistency_terms(d, real, fake, on_real, on_fake))
            if r1:
                value = self._squared_slope(d, real, on_real.image_logits, "finite difference/real")
                terms.append(("D/r1", self.r1 / 2 * self.r1_every, value))
            if r2:
                value = self._squared_slope(d, fake, on_fake.image_logits, "finite difference/fake")
                terms.append(("D/r2", self.r2 / 2 * self.r2_every, value))
        if self.center:
            terms.append(("D/center", self.center, centering_penalty(on_real.image_logits, on_fake.image_logits)))
        if self.gp > 0:
            terms.append(("D/gp", self.gp, gradient_penalty(d, real, fake)))
        terms += self._class_terms("D", on_real, real) if self.required_d_conditioning else ()
        terms += self._class_terms("D/fake", on_fake, fake) if self.classifier else ()
        total = on_real.mean(GAN_LOSSES[self.loss].d(on_real.logits, on_fake.logits))
        parts = {"scores/real": on_real.logits.detach().mean(), "scores/fake": on_fake.logits.detach().mean()}
        return self._update_state(d, on_real.image_logits, on_fake.image_logits, _add_terms(total, terms, parts))

    def _squared_slope(self, d: DiscriminatorFn, batch: Batch, logits: Tensor, stream: str) -> Tensor:
        """Return E |grad D|^2 by the chosen method; for the exact one, the images require a gradient."""
        if self._is_exact:
            return grad_norm_squared(logits, batch.images)
        return finite_difference_penalty(d, batch, logits, self.difference_sigma, stream)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        """Compute G's loss on a batch of its fakes; `real` is used if `is_paired`."""
        fake = self._augmented(d, fake, "G/fake")
        with cached() if self.is_paired else contextlib.nullcontext():
            on_fake = run_discriminator(d, fake.images, fake.labels)
            on_real = self._real_logits(d, real) if self.is_paired else on_fake.logits
        terms = list(self._class_terms("G", on_fake, fake)) if self.required_d_conditioning else []
        if self.zcr_g:
            terms.append(("G/zcr", -self.zcr_g, latent_diversity(fake)))
        parts: dict[str, Tensor] = {}
        if self.penalties_due(step)[2]:
            mean = state_of_generator(fake.generator, "objective.path_length")
            assert isinstance(mean, RunningMean)
            value, parts["G/mean_path_length"] = path_length_penalty(fake, mean)
            terms.append(("G/path_length", self.path_length * self.path_length_every, value))
        return _add_terms(on_fake.mean(GAN_LOSSES[self.loss].g(on_real, on_fake.logits)), terms, parts)

    @torch.no_grad()
    def _real_logits(self, d: DiscriminatorFn, real: Batch) -> Tensor:
        real = self._augmented(d, real, "G/real")
        return run_discriminator(d, real.images, real.labels).logits

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """Return the term of a player's loss ("G" or "D") that depends on its weights only, or None."""
        weight = {"G": self.orthogonal, "D": self.d_orthogonal}[player]
        if not weight:
            return None
        value = orthogonal_penalty(net)
        return Loss(weight * value, {f"{player}/orthogonal": value.detach()})

    def _augmented(self, d: DiscriminatorFn, batch: Batch, stream: str) -> Batch:
        """Return the batch as D sees it: augmented, and with noise if there are levels.

        Perturbed fakes get the same augmentation as their originals, and so do the images of all levels.
        """
        p = _augment_probability(d).p if isinstance(self.augment, ADA) else None

        def augment(x: Tensor) -> Tensor:
            if isinstance(self.augment, NoAugment):
                return x
            return self.augment(x, batch.rng, f"augment/{stream}", p)

        if self.noise_levels > 1:
            levels = batch.fields.get("levels")  # of fakes
            if levels is None:
                levels = augment(batch.images)[:, None].expand(-1, self.noise_levels, -1, -1, -1)
            else:
                levels = torch.stack([augment(x) for x in levels.unbind(1)], 1)
            images = add_noise_by_level(levels, self.least_signal, batch.rng, f"levels/{stream}")
            return dataclasses.replace(batch, images=images)
        perturbed = None if batch.perturbed is None else augment(batch.perturbed)
        return dataclasses.replace(batch, images=augment(batch.images), perturbed=perturbed)

    def _consistency_terms(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, on_real: DiscriminatorOutput, on_fake: DiscriminatorOutput
    ) -> Iterator[Term]:
        if self.cr or self.bcr:
            yield "D/cr", self.cr or self.bcr, augmentation_consistency(d, real, on_real.logits, "consistency/real")
        if self.bcr:
            yield "D/cr_fake", self.bcr, augmentation_consistency(d, fake, on_fake.logits, "consistency/fake")
        if self.zcr:
            yield "D/zcr", self.zcr, latent_consistency(d, fake, on_fake.logits)

    def _class_terms(self, prefix: str, output: DiscriminatorOutput, batch: Batch) -> Iterator[Term]:
        if self.classifier:
            yield f"{prefix}/classifier", self.classifier, classification_loss(output, batch.labels)
        if self.contrastive:
            value = contrastive_loss(output, batch.labels, batch.rng.per_lane, self.temperature)
            yield f"{prefix}/contrastive", self.contrastive, value

    def _update_state(self, d: DiscriminatorFn, on_real: Tensor, on_fake: Tensor, loss: Loss) -> Loss:
        """Add LeCam's term to the loss, and update the state with D's logits."""
        parts = dict(loss.parts)
        total = loss.total
        if self.lecam:
            ema = state_of(d).lecam_ema
            assert ema is not None
            value = lecam_penalty(on_real, on_fake, ema.means) * ema.is_initialized
            total = total + self.lecam * value
            parts["D/lecam"] = value.detach()
            ema.update(on_real, on_fake)
        if isinstance(self.augment, ADA):
            probability = _augment_probability(d)
            parts["D/augment_p"] = probability.p.clone()
            probability.update(on_real)
        return Loss(total, parts)


@dataclasses.dataclass(frozen=True)
class ObjectiveWrapper:
    """An objective that forwards everything to another one; subclasses override parts."""

    inner: Adversarial | ObjectiveWrapper

    @property
    def second_order(self) -> bool:
        return self.inner.second_order

    @property
    def uses_fakes(self) -> bool:
        return self.inner.uses_fakes

    @property
    def latent_perturbation(self) -> float:
        return self.inner.latent_perturbation

    @property
    def replayed_fields(self) -> tuple[str, ...]:
        return self.inner.replayed_fields

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = False
    ) -> Loss:
        return self.inner.discriminator(d, real, fake, step, concat_real_fake)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return self.inner.generator(d, fake, real, step)

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return self.inner.weight_penalty(player, net)


class ConcatRealFake(ObjectiveWrapper):
    """The same objective, with one pass of D over reals and fakes together.

    They are concatenated lane by lane, so that the groups of batch norm stay the same.
    """

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = True
    ) -> Loss:
        return self.inner.discriminator(d, real, fake, step, concat_real_fake)


def _requires_grad(batch: Batch) -> Batch:
    """Return the batch with images that require a gradient."""
    return dataclasses.replace(batch, images=batch.images.detach().requires_grad_(True))


def _augment_probability(d: DiscriminatorFn) -> AugmentProbability:
    """Return ADA's state of a D."""
    probability = state_of(d).augment_probability
    assert probability is not None
    return probability


def _run_concatenated(d: DiscriminatorFn, real: Batch, fake: Batch) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
    """Run D once on the reals followed by the fakes; batch norm gets the same groups as in two passes."""
    labels = None
    if real.labels is not None and fake.labels is not None:
        labels = torch.cat([real.labels, fake.labels])
    return run_discriminator(d, torch.cat([real.images, fake.images]), labels).split(len(real.images))


def _add_terms(total: Tensor, terms: list[Term], parts: dict[str, Tensor]) -> Loss:
    """Return the total plus the weighted terms, which become parts under their names."""
    for name, weight, value in terms:
        total = total + weight * value
        parts[name] = value.detach()
    return Loss(total, parts)
