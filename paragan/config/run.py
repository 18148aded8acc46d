"""A run: everything that decides what a training does, as one frozen record; and the game built from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Annotated, Any

from pydantic import Field

from paragan.config.batch_ramp import Ramp, rounded_up, stages
from paragan.config.sections import AnyHealth, Count, Data, Device, Evaluation, Guard, Health, Output, Positive
from paragan.config.user_code import AnyNets, AnyObjective
from paragan.core.schema import build, by_name, plain, record
from paragan.game.ema import Decay
from paragan.losses.adversarial import Adversarial
from paragan.nets import DCGAN
from paragan.optim.optimizers import Side
from paragan.strategies.async_paragan import Async
from paragan.strategies.auto import Auto, Chosen
from paragan.strategies.per_label_wcgan import Labels, Lockstep, Mixing, PerLabel
from paragan.strategies.sync import Sync

WEIGHT = 3.0  # of a teacher: what does best on the digits
Strategy = Annotated[Lockstep | Mixing | Async | Labels | Auto, Field(discriminator="name"), by_name]


@record
class Run:
    """A complete training run. `paragan train run.yaml` repeats it.

    batch : images of a step, over all ranks;  lanes : logical workers that share it
    g_batch : images that G makes in its turn (0: as many as batch)
    ramp  : how the batch grows: KIMG:BATCH,... or [[KIMG, BATCH], ...]; rates follow as g.rule and d.rule say
    kimg  : how long, in thousands of real images shown to D
    teacher : a run per label whose generators G also learns from (see `paragan merge`)
    teacher_weight : of the distance to their images in G's loss (0: only D is listened to)
    chosen : where the strategy was left open (auto): for how many ranks it was chosen
    timeout_s : how long an exchange may take; a rank that died is noticed at once, one that hangs after this
    about : why it is as it is, a line each; for people
    """

    recipe: str = "custom"
    data: Data = Data()
    nets: AnyNets = DCGAN()
    objective: AnyObjective = Adversarial()
    g: Side = Side()
    d: Side = Side()
    d_steps: Positive = 1
    average: Decay = Decay()
    strategy: Strategy = Sync()
    batch: Positive = 64
    g_batch: Count = 0
    ramp: Ramp = ()
    lanes: Positive = 8
    kimg: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    init_from: str = ""
    teacher: str = ""
    teacher_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = WEIGHT
    evaluation: Evaluation = Evaluation()
    output: Output = Output()
    health: AnyHealth = Health()
    guard: Annotated[Guard, by_name] = Guard()
    device: Device = Device()
    chosen: Chosen = Chosen()
    timeout_s: Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False)] = 300.0
    about: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """How long the run is, in whole rounds of images."""
        asked = math.ceil(round(self.kimg * 1000, 6))
        start, batch = self._stage(asked - 1)
        return start + rounded_up(asked - start, batch * self.d_steps)

    @property
    def rounds(self) -> int:
        """How many rounds it has."""
        starts = [*self.stages, (self.images, 0)]
        spans = ((min(b, self.images) - a, batch) for (a, batch), (b, _) in itertools.pairwise(starts))
        return sum(span // (batch * self.d_steps) for span, batch in spans if span > 0)

    def round_at(self, images: int) -> int:
        """Real images of the round that has begun by then, as its batch is there."""
        return self.batch_at(images) * self.d_steps

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(first image, batch) of every stage of the ramp."""
        return list(stages(self.batch, self.d_steps, self.ramp))

    def batch_at(self, images: int) -> int:
        """The total batch of the round that has begun after so many images."""
        return self._stage(images)[1]

    def _stage(self, images: int) -> tuple[int, int]:
        return [stage for stage in self.stages if stage[0] <= max(0, images)][-1]

    @property
    def per_label(self) -> PerLabel | None:
        """The strategy, where every label has a game of its own."""
        return self.strategy if isinstance(self.strategy, PerLabel) else None

    @property
    def round(self) -> int:
        """Real images of one round; of the first, where the batch grows."""
        return self.batch * self.d_steps


def written(run: Run) -> dict[str, Any]:
    """The plain record as files have it, without what is secret in its address."""
    return plain(dataclasses.replace(run, data=dataclasses.replace(run.data, path=run.data.told)))


def on_lanes(run: Run, lanes: int) -> Run:
    """A run of so many lanes of a run, or of more like them: one rank's part of it."""
    fields = {name: getattr(run, name) // run.lanes * lanes for name in ("batch", "g_batch")}
    fields["ramp"] = tuple((kimg, batch // run.lanes * lanes) for kimg, batch in run.ramp)
    return dataclasses.replace(run, lanes=lanes, **fields)


def without_code(record: dict[str, Any]) -> Run:
    """The run of a plain record but for what may be code of the user's own: how ranks agree, networks and objective."""
    return build(Run, {name: part for name, part in record.items() if name not in ("strategy", "nets", "objective")})


def differing(name: str) -> bool:
    """Whether a resumed run may differ in this field: how long, where, and what it writes."""
    may = (
        "kimg",
        "chosen",
        "about",
        "timeout_s",
        "output",
        "health",
        "guard",
        "device.kind",
        "device.threads",
        "device.one_call",
        "device.channels_last",
        "device.pad_channels",
        "device.huge_pages",
        "data.bad_share",
        "data.reach",
        "data.feed",
        "evaluation",
        "strategy.lost_after_s",
        "strategy.split",
        "strategy.minutes",
        "strategy.ranks",
        "strategy.rare",
        "strategy.lease_s",
        "strategy.wait",
    )
    return any(name == field or name.startswith(field + ".") for field in may)
