"""A generator and a discriminator of the user's own, for a `ScalingManager` and as the networks of a run."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from paragan.api.user_networks import UserDiscriminator, UserGenerator, UserNetwork
from paragan.config.user_code import user_code_digest
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import ConditioningFn
from paragan.nets import Spec
from paragan.plan.profile.profile_cache import structure_digest


class Estimator:
    """A generator and a discriminator.

    A ScalingManager trains them from their present weights. Until it is closed, or another one trains them, they are in
    its hands: none of their parameters requires a gradient between rounds.

    Args:
        generator: an `nn.Module`, (z [N, latent], y [N] or None) -> images [N, C, H, W] in [-1, 1]; or, as in the
            paper, an object with `model_fn(latent_var, y)` that has its layers as attributes.
        discriminator: an `nn.Module`, (x, y) -> logits [N], or an object with `model_fn(x, y) -> output, out_logit`.
            Logits with more dimensions (of a patch discriminator, [N, 1, H, W]) are averaged for each image before
            the loss. Other outputs, such as a `DiscriminatorOutput`, reach the objective unchanged.
        conditioning_input: what G gets instead of z, from a batch of reals, row by row (for an autoencoder
            `lambda real: real.images`).
    """

    def __init__(self, generator: Any, discriminator: Any, conditioning_input: ConditioningFn | None = None):
        self.conditioning_input = conditioning_input
        self._networks = (generator, discriminator)
        self.generator = UserGenerator(generator)
        self.discriminator = UserDiscriminator(discriminator)
        self.latent: int | None = getattr(generator, "latent", None)
        self.source_digest = user_code_digest(generator, discriminator)

    def make_trainable(self) -> tuple[nn.Module, nn.Module]:
        """Return both networks, without anything that an earlier training has attached to them.

        They share their layers with `generator` and `discriminator`, and start from the present weights.
        """
        self.generator.unfreeze()
        self.discriminator.unfreeze()
        generator, discriminator = self._networks
        return UserGenerator(generator), UserDiscriminator(discriminator)


@config_class
class EstimatorNets:
    """The networks of an `Estimator` in a run. What is measured before training are copies of them.

    structure : a digest of the networks and their source files, for what is cached; empty before they are known
    """

    name: str = "estimator"
    latent: int = 1
    structure: str = ""

    @staticmethod
    def of(gan: Estimator, latent: int) -> EstimatorNets:
        """Return the networks of an Estimator, whose latents have this size unless it has its own."""
        structure = f"{structure_digest(gan.generator, gan.discriminator)} {gan.source_digest}"
        nets = EstimatorNets(latent=gan.latent or latent, structure=structure)
        vars(nets)["estimator"] = gan  # no field: it is in no file
        return nets

    @property
    def conditioning_input(self) -> ConditioningFn | None:
        gan: Estimator | None = vars(self).get("estimator")
        return gan.conditioning_input if gan else None

    def generator(self, spec: Spec) -> nn.Module:
        return self._copy("generator")

    def discriminator(self, spec: Spec) -> nn.Module:
        return self._copy("discriminator")

    def _copy(self, role: str) -> nn.Module:
        network: UserNetwork = getattr(vars(self)["estimator"], role)
        trainable = network.find_trainable()
        try:
            copied = copy.deepcopy(network)
        except Exception as error:  # user code may raise anything
            raise UsageError(f"{role}: the networks cannot be copied: {error}") from error
        for name, p in copied.named_parameters():
            if not nn.parameter.is_lazy(p):
                p.requires_grad_(name in trainable)
        return copied
