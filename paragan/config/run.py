"""A run: everything that determines a training, as one frozen record."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paragan.config.batch_ramp import Ramp, batch_stages, round_up
from paragan.config.sections import (
    DataOptions,
    DeviceOptions,
    EvaluationOptions,
    HealthOptions,
    HealthOrSwitch,
    InputFingerprints,
    NonNegativeInt,
    OutputOptions,
    PositiveInt,
    RollbackOptions,
)
from paragan.config.user_code import AnyNets, AnyObjective
from paragan.core.image_encoding import is_user_code
from paragan.core.schema import config_class, from_dict, name_shorthand, path_shorthand, to_dict
from paragan.game.ema import EMAConfig
from paragan.losses.adversarial import Adversarial
from paragan.nets import DCGAN
from paragan.nets.feature_discriminator import FeatureOptions
from paragan.optim.optimizers import DiscriminatorOptim, PlayerOptim, as_discriminator_optim
from paragan.strategies.async_paragan import Async
from paragan.strategies.auto import Auto, AutoChoice
from paragan.strategies.gossip_dposg import Decentralized
from paragan.strategies.per_label_wcgan import PerLabel
from paragan.strategies.presets import fill_from_preset
from paragan.strategies.quantized_dqgan import Quantized
from paragan.strategies.sync import Sync

DEFAULT_DISTILL_WEIGHT = 3.0  # the best on the digits
AnyStrategy = Annotated[
    Sync | Quantized | Decentralized | Async | PerLabel | Auto,
    Field(discriminator="name"),
    BeforeValidator(fill_from_preset),
    name_shorthand,
]


@config_class
class Run:
    """A complete training run. `paragan train run.yaml` repeats it.

    recipe         : the name of the recipe it began with
    data           : what to train on
    nets           : the two networks
    objective      : the two losses
    g, d           : how each player learns
    d_steps        : steps of D in a round, for one of G
    d_features     : feature maps of a frozen network that D sees
    ema            : the moving average of G's parameters
    strategy       : how ranks work together
    batch          : images of a step, over all ranks
    g_batch        : images that G makes in its turn (0: as many as batch)
    ramp           : how the batch grows: KIMG:BATCH,... or [[KIMG, BATCH], ...]; learning rates follow by g.lr_scaling
                     and d.lr_scaling
    lanes          : virtual data-parallel ranks that share the batch; results do not depend on the number of real ones
    kimg           : length, in thousands of real images that D sees
    seed           : of everything random
    init_from      : a run or model to take the initial weights from
    distill_from   : a per-label run whose generators G also learns from (see `paragan merge`), or a diffusion model
    distill_weight : the weight of the distance to their images in G's loss (0: not used)
    evaluation     : what is measured
    output         : what is written
    health         : when the run counts as unhealthy
    on_divergence  : what to do then
    device         : where and how it is computed
    auto_choice    : with strategy=auto: how the strategy was chosen
    fingerprints   : what is read, by content, so that moved files are recognised
    timeout_s      : how long an exchange may take; a rank that died is noticed at once, one that hangs after this
    reasons        : why settings are as they are, one line each; only for people
    """

    recipe: str = "custom"
    data: Annotated[DataOptions, path_shorthand] = DataOptions()
    nets: AnyNets = DCGAN()
    objective: AnyObjective = Adversarial()
    g: PlayerOptim = PlayerOptim()
    d: Annotated[DiscriminatorOptim, BeforeValidator(as_discriminator_optim)] = DiscriminatorOptim()
    d_steps: PositiveInt = 1
    d_features: FeatureOptions = FeatureOptions()
    ema: EMAConfig = EMAConfig()
    strategy: AnyStrategy = Sync()
    batch: PositiveInt = 64
    g_batch: NonNegativeInt = 0
    ramp: Ramp = ()
    lanes: PositiveInt = 8
    kimg: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    init_from: str = ""
    distill_from: str = ""
    distill_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_DISTILL_WEIGHT
    evaluation: EvaluationOptions = EvaluationOptions()
    output: OutputOptions = OutputOptions()
    health: HealthOrSwitch = HealthOptions()
    on_divergence: Annotated[RollbackOptions, name_shorthand] = RollbackOptions()
    device: DeviceOptions = DeviceOptions()
    auto_choice: AutoChoice = AutoChoice()
    fingerprints: InputFingerprints = InputFingerprints()
    timeout_s: Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False)] = 300.0
    reasons: tuple[str, ...] = ()

    @property
    def total_images(self) -> int:
        """The length of the run in images, a whole number of rounds."""
        images = math.ceil(round(self.kimg * 1000, 6))
        start, batch = self._stage(images - 1)
        return start + round_up(images - start, batch * self.d_steps)

    @property
    def total_rounds(self) -> int:
        """The length of the run in rounds."""
        starts = [*self.stages, (self.total_images, 0)]
        spans = ((min(b, self.total_images) - a, batch) for (a, batch), (b, _) in itertools.pairwise(starts))
        return sum(span // (batch * self.d_steps) for span, batch in spans if span > 0)

    def images_after(self, rounds: int) -> int:
        """Return how many real images D has seen after so many rounds."""
        starts = [start for start, _ in self.stages]
        images = 0
        for (start, batch), end in itertools.zip_longest(self.stages, starts[1:]):
            stage_rounds = rounds if end is None else min(rounds, (end - start) // (batch * self.d_steps))
            images += stage_rounds * batch * self.d_steps
            rounds -= stage_rounds
        return images

    def current_round_images(self, images: int) -> int:
        """Return the real images of the round that contains image number `images`."""
        return self.batch_at(images) * self.d_steps

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(first image, batch) of every stage of the ramp."""
        return list(batch_stages(self.batch, self.d_steps, self.ramp))

    def batch_at(self, images: int) -> int:
        """Return the total batch of the round that starts after so many images."""
        return self._stage(images)[1]

    def _stage(self, images: int) -> tuple[int, int]:
        return [stage for stage in self.stages if stage[0] <= max(0, images)][-1]

    @property
    def per_label(self) -> PerLabel | None:
        """The strategy, if it trains a game of its own for every label."""
        return self.strategy.per_label

    @property
    def round_images(self) -> int:
        """The real images of one round (of the first, if the batch grows)."""
        return self.batch * self.d_steps


def to_saved_dict(run: Run) -> dict[str, Any]:
    """Return the plain record that is written to files, without secrets in the address of the data."""
    return to_dict(dataclasses.replace(run, data=dataclasses.replace(run.data, path=run.data.redacted_path)))


def with_lanes(run: Run, lanes: int) -> Run:
    """Return the run with another number of lanes of the same size."""
    fields = {name: getattr(run, name) // run.lanes * lanes for name in ("batch", "g_batch")}
    fields["ramp"] = tuple((kimg, batch // run.lanes * lanes) for kimg, batch in run.ramp)
    return dataclasses.replace(run, lanes=lanes, **fields)


def load_without_user_code(data: dict[str, Any]) -> Run:
    """Read a run without the parts that may import user code: strategy (its wire), networks, objective, and decoder."""
    run = from_dict(Run, {name: part for name, part in data.items() if name not in ("strategy", "nets", "objective")})
    if is_user_code(run.data.decoder):
        return dataclasses.replace(run, data=dataclasses.replace(run.data, decoder=""))
    return run


def may_change_on_resume(name: str) -> bool:
    """Return whether a resumed run may differ in this dotted field (its length, device and outputs, not its result)."""
    fields = (
        "kimg",
        "auto_choice",
        "fingerprints",
        "reasons",
        "timeout_s",
        "output",
        "health",
        "on_divergence",
        "device.kind",
        "device.threads",
        "device.concat_real_fake",
        "device.channels_last",
        "device.pad_channels",
        "device.huge_pages",
        "device.deterministic",
        "data.max_bad_fraction",
        "data.max_pixels",
        "data.decoder",
        "data.originals",
        "data.remote",
        "data.prefetch",
        "evaluation",
        "strategy.peer_timeout_s",
        "strategy.shard_optimizer",
        "strategy.min_ranks",
        "strategy.split",
        "strategy.minutes",
        "strategy.ranks_per_label",
        "strategy.rare_below",
        "strategy.lease_s",
        "strategy.wait_for_all",
    )
    return any(name == field or name.startswith(field + ".") for field in fields)


def may_differ_when_joining(name: str) -> bool:
    """Return whether a rank may differ in this dotted field from those whose training it joins.

    What follows a round (lines, samples, scores, checkpoints, the end) is done by all ranks together.
    """
    shared = ("kimg", "output", "evaluation", "health", "on_divergence", "strategy")
    return may_change_on_resume(name) and name.partition(".")[0] not in shared
