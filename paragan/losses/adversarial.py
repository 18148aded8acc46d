"""What G and D want of each other: an adversarial loss, and what may be added to it: docs/objectives.md."""

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
from paragan.core.schema import config_class
from paragan.core.types import Batch, DiscriminatorFn, DiscriminatorOutput, Loss, run_discriminator
from paragan.losses.augment import ADA, Augment, NoAugment
from paragan.losses.class_losses import classification_loss, contrastive_loss
from paragan.losses.consistency import augmentation_consistency, latent_consistency, latent_diversity
from paragan.losses.gan_losses import GAN_LOSSES
from paragan.losses.penalties import grad_norm_squared, gradient_penalty, lecam_penalty, orthogonal_penalty
from paragan.losses.running_state import AugmentProbability, LeCamEMA, ObjectiveState, state_of

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepInterval = Annotated[int, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Term = tuple[str, float, Tensor]  # its name, its weight, and what it is


@config_class
class Adversarial:
    """A loss by name, what is added to it with a weight each (0: nothing), and what is done to the images that D sees.

    r1            : gamma; adds gamma / 2 E|grad D|^2 on reals every `r1_every` steps, times r1_every ("lazy")
    r2            : the same on fakes
    gp            : lambda; adds lambda E(|grad D| - 1)^2 between reals and fakes
    clip          : c; after every step of D each of its weights is put back into [-c, c] (Arjovsky et al. 2017)
    lecam         : D's logits on reals and fakes stay near running means of those of the other side
    lecam_decay   : of these means, a step
    cr, bcr       : D says the same of images mirrored and shifted: of reals, or of reals and of fakes
    zcr           : D says the same of fakes whose latents are nearby
    zcr_g         : and G makes these fakes different
    zcr_sigma     : how far nearby is, in standard deviations of a latent
    orthogonal    : different filters of G stay orthogonal (Brock et al. 2019: 1e-4);  d_orthogonal: those of D
    classifier    : of the cross entropy of D's classifier (a D that has one), on reals and fakes; G's on its own
    contrastive   : of the 2C loss on D's embeddings (a D that gives them), on reals; G's on its own
    temperature   : in that
    augment       : none, diffaugment or ada
    """

    loss: Literal["hinge", "nonsaturating", "least_squares", "wasserstein", "relativistic"] = "hinge"
    r1: Weight = 0.0
    r1_every: StepInterval = 1
    r2: Weight = 0.0
    r2_every: StepInterval = 1
    gp: Weight = 0.0
    clip: Weight = 0.0
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
    augment: Augment = NoAugment()

    # what others ask of it ------------------------------------------------------------------------------

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice."""
        return self.r1 > 0 or self.r2 > 0 or self.gp > 0

    def penalties_due(self, step: int) -> tuple[bool, bool]:
        """Which steps are computed alike: those in which R1, and R2, are due."""
        return self.r1 > 0 and step % self.r1_every == 0, self.r2 > 0 and step % self.r2_every == 0

    @property
    def latent_perturbation(self) -> float:
        """How far from its latents G makes images a second time; 0: it does not."""
        return self.zcr_sigma if self.zcr or self.zcr_g else 0.0

    @property
    def required_d_conditioning(self) -> str:
        """What of D beside its logits is listened to: the `d_conditioning` of networks that give it."""
        return "classifier" if self.classifier else "contrastive" if self.contrastive else ""

    @property
    def is_paired(self) -> bool:
        """Whether G's loss needs a real for each of its images."""
        return GAN_LOSSES[self.loss].is_paired

    def check(self) -> None:
        """Unusable where two of its parts do not go together. Those that depend on the run: train/run.py."""
        if self.cr and self.bcr:
            raise UsageError(f"objective.bcr={self.bcr:g} has objective.cr={self.cr:g} in it: set one of them to 0")
        if self.classifier and self.contrastive:
            raise UsageError(
                f"objective.classifier={self.classifier:g} and objective.contrastive={self.contrastive:g} are two ways "
                "for D to learn labels, and a D has one: set the other to 0"
            )
        if isinstance(self.augment, ADA) and not GAN_LOSSES[self.loss].is_signed:
            raise UsageError(
                f"objective.augment=ada follows the sign of D's logits, which objective.loss={self.loss} gives no "
                "meaning: use hinge or nonsaturating, or objective.augment=diffaugment"
            )

    def make_state(self, step_images: int) -> ObjectiveState | None:
        """What it is to remember with D (`attach`), fresh. images: reals of one step of D, over all ranks."""
        ada = self.augment if isinstance(self.augment, ADA) else None
        if not self.lecam and not ada:
            return None
        return ObjectiveState(
            LeCamEMA(self.lecam_decay) if self.lecam else None,
            AugmentProbability(ada.target, step_images / (1000 * ada.kimg)) if ada else None,
        )

    # the two losses -------------------------------------------------------------------------------------

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = False
    ) -> Loss:
        """one_call: D judges reals and fakes in one pass, where no penalty needs the slopes of one of them alone."""
        r1, r2 = self.penalties_due(step)
        real, fake = self._augmented(d, real, "D/real"), self._augmented(d, fake, "D/fake")
        real, fake = _requires_grad(real, r1), _requires_grad(fake, r2)
        with cached():  # spectral norm divides D's weights once for all calls
            on_real, on_fake = (
                _run_concatenated(d, real, fake)
                if concat_real_fake and not (r1 or r2)
                else _run_separately(d, real, fake)
            )
            terms = list(self._consistency_terms(d, real, fake, on_real, on_fake))
        if r1:
            terms.append(("D/r1", self.r1 / 2 * self.r1_every, grad_norm_squared(on_real.logits, real.images)))
        if r2:
            terms.append(("D/r2", self.r2 / 2 * self.r2_every, grad_norm_squared(on_fake.logits, fake.images)))
        if self.gp > 0:
            terms.append(("D/gp", self.gp, gradient_penalty(d, real, fake)))
        terms += self._class_terms("D", on_real, real) if self.required_d_conditioning else ()
        terms += self._class_terms("D/fake", on_fake, fake) if self.classifier else ()
        total = GAN_LOSSES[self.loss].d(on_real.logits, on_fake.logits).mean()
        parts = {"scores/real": on_real.logits.detach().mean(), "scores/fake": on_fake.logits.detach().mean()}
        return self._update_state(d, on_real.logits, on_fake.logits, _add_terms(total, terms, parts))

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        fake = self._augmented(d, fake, "G/fake")
        with cached() if self.is_paired else contextlib.nullcontext():
            on_fake = run_discriminator(d, fake.images, fake.labels)
            on_real = self._real_logits(d, real) if self.is_paired else on_fake.logits
        terms = list(self._class_terms("G", on_fake, fake)) if self.required_d_conditioning else []
        if self.zcr_g:
            terms.append(("G/zcr", -self.zcr_g, latent_diversity(fake)))
        return _add_terms(GAN_LOSSES[self.loss].g(on_real, on_fake.logits).mean(), terms, {})

    @torch.no_grad()
    def _real_logits(self, d: DiscriminatorFn, real: Batch) -> Tensor:
        real = self._augmented(d, real, "G/real")
        return run_discriminator(d, real.images, real.labels).logits

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """What is added to a player's loss for its weights alone."""
        weight = {"G": self.orthogonal, "D": self.d_orthogonal}[player]
        if not weight:
            return None
        value = orthogonal_penalty(net)
        return Loss(weight * value, {f"{player}/orthogonal": value.detach()})

    def _augmented(self, d: DiscriminatorFn, batch: Batch, stream: str) -> Batch:
        """A batch as D gets to see it. Nearby fakes are changed as those are that they are compared with."""
        if isinstance(self.augment, NoAugment):
            return batch
        chance = state_of(d).augment_probability if isinstance(self.augment, ADA) else None
        p = chance.p if chance else None
        images, nearby = (
            None if x is None else self.augment(x, batch.rng, f"augment/{stream}", p)
            for x in (batch.images, batch.perturbed)
        )
        assert images is not None
        return dataclasses.replace(batch, images=images, perturbed=nearby)

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
        """The loss with LeCam's term, and what D said counted for the steps to come."""
        parts = dict(loss.parts)
        total = loss.total
        if self.lecam:
            anchors = state_of(d).lecam_ema
            assert anchors is not None
            value = lecam_penalty(on_real, on_fake, anchors.means) * anchors.is_initialized
            total, parts["D/lecam"] = total + self.lecam * value, value.detach()
            anchors.update(on_real, on_fake)
        if isinstance(self.augment, ADA):
            chance = state_of(d).augment_probability
            assert chance is not None
            parts["D/augment_p"] = chance.p.clone()
            chance.update(on_real)
        return Loss(total, parts)


@dataclasses.dataclass(frozen=True)
class ObjectiveWrapper:
    """An objective around another, which it is but for what a subclass changes."""

    inner: Adversarial | ObjectiveWrapper

    @property
    def second_order(self) -> bool:
        return self.inner.second_order

    @property
    def latent_perturbation(self) -> float:
        return self.inner.latent_perturbation

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = False
    ) -> Loss:
        return self.inner.discriminator(d, real, fake, step, concat_real_fake)

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        return self.inner.generator(d, fake, real, step)

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        return self.inner.weight_penalty(player, net)


class ConcatRealFake(ObjectiveWrapper):
    """The same objective, with D judging reals and fakes in one pass."""

    def discriminator(
        self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int, concat_real_fake: bool = True
    ) -> Loss:
        return self.inner.discriminator(d, real, fake, step, concat_real_fake)


def _requires_grad(batch: Batch, enabled: bool) -> Batch:
    """With images that a gradient can be taken at."""
    return dataclasses.replace(batch, images=batch.images.detach().requires_grad_(True)) if enabled else batch


def _run_separately(d: DiscriminatorFn, real: Batch, fake: Batch) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
    return run_discriminator(d, real.images, real.labels), run_discriminator(d, fake.images, fake.labels)


def _run_concatenated(d: DiscriminatorFn, real: Batch, fake: Batch) -> tuple[DiscriminatorOutput, DiscriminatorOutput]:
    """The same from one pass: reals, then fakes, lane by lane each, so that batch norm sees the same groups."""
    labels = None
    if real.labels is not None and fake.labels is not None:
        labels = torch.cat([real.labels, fake.labels])
    return run_discriminator(d, torch.cat([real.images, fake.images]), labels).split(len(real.images))


def _add_terms(total: Tensor, terms: list[Term], parts: dict[str, Tensor]) -> Loss:
    for name, weight, value in terms:
        total = total + weight * value
        parts[name] = value.detach()
    return Loss(total, parts)
