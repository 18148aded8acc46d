"""What an objective remembers from step to step: buffers in a child of D's network, which D does not call.

There they go wherever D's other buffers go: into checkpoints, to the team of G, into copies of D. `see` counts in D's
own turn only (`tracking`), what is counted is summed over lanes and team (`moments`), and applied once a step
(`settle`), as game/player.py does with every layer that couples images. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorFn

STATE_NAME = "objective_state"
UPDATE_INTERVAL_STEPS = 4  # steps of D from one look at the reals' signs to the next (Karras et al. 2020)


class LeCamEMA(nn.Module):
    """Running means [2] of D's logits on reals and on fakes, in `means`. Before the first step they are unknown:
    `known` is 0 then, and 1 after. While young they are plain means of all steps: what they began with is forgotten."""

    lane_batch: int | None = None
    tracking: bool = False
    means: Tensor
    steps: Tensor
    moments: Tensor

    def __init__(self, decay: float):
        super().__init__()
        self.decay = decay
        self.register_buffer("means", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("moments", torch.zeros(3), persistent=False)  # sums of both, and how many of each

    @property
    def is_initialized(self) -> Tensor:
        return self.steps.clamp(max=1)

    @torch.no_grad()
    def update(self, on_real: Tensor, on_fake: Tensor) -> None:
        if self.tracking:
            self.moments[0].add_(on_real.sum())
            self.moments[1].add_(on_fake.sum())
            self.moments[2].add_(len(on_real))

    @torch.no_grad()
    def apply_moments(self) -> None:
        count = self.moments[2]
        some = (count > 0).to(self.steps.dtype)
        self.steps += some
        rate = (1 / self.steps.clamp(min=1)).clamp(min=1 - self.decay) * some
        self.means.lerp_((self.moments[:2] / count.clamp(min=1)).to(self.means.dtype), rate)
        self.moments.zero_()


class AugmentProbability(nn.Module):
    """The chance p, a scalar, with which ADA changes an image (Karras et al. 2020, section 3).

    Every fourth step it moves by a fixed amount, up if the mean sign of D's logits on reals is above `target`, else
    down. We keep it between 0 and 1, where the authors let it pass 1.

    pace : by how much for each step of D
    """

    lane_batch: int | None = None
    tracking: bool = False
    p: Tensor
    sign_stats: Tensor
    moments: Tensor

    def __init__(self, target: float, step_size: float):
        super().__init__()
        self.target, self.step_size = target, step_size
        self.register_buffer("p", torch.zeros(()))
        self.register_buffer("sign_stats", torch.zeros(3))  # their sum, of how many, and the steps they were counted in
        self.register_buffer("moments", torch.zeros(2), persistent=False)

    @torch.no_grad()
    def update(self, on_real: Tensor) -> None:
        if self.tracking:
            self.moments[0].add_(on_real.sign().sum())
            self.moments[1].add_(len(on_real))

    @torch.no_grad()
    def apply_moments(self) -> None:
        self.sign_stats[:2] += self.moments
        self.sign_stats[2] += self.moments[1] > 0
        self.moments.zero_()
        due = self.sign_stats[2] >= UPDATE_INTERVAL_STEPS
        above = torch.sign(self.sign_stats[0] / self.sign_stats[1].clamp(min=1) - self.target)
        self.p.add_(above * due * (self.step_size * UPDATE_INTERVAL_STEPS)).clamp_(0, 1)
        self.sign_stats *= ~due


class ObjectiveState(nn.Module):
    """All that an objective keeps."""

    def __init__(self, lecam_ema: LeCamEMA | None, augment_probability: AugmentProbability | None):
        super().__init__()
        self.lecam_ema, self.augment_probability = lecam_ema, augment_probability

    def forward(self, x: Tensor) -> Tensor:
        """Nothing, for networks that call whatever children they have."""
        return x


def attach_state(state: ObjectiveState | None, d: nn.Module) -> None:
    """Give D's network, which has its device already, what an objective keeps; before its player is made."""
    if state is not None:
        d.add_module(STATE_NAME, state.to(next(d.parameters()).device))


def state_of(d: DiscriminatorFn) -> ObjectiveState:
    """What is kept with a D, or with a copy of it."""
    kept = dict(d.named_children()).get(STATE_NAME) if isinstance(d, nn.Module) else None
    if not isinstance(kept, ObjectiveState):
        raise UsageError(
            "objective.lecam and objective.augment=ada remember something with D: attach it (losses/kept.py)"
        )
    return kept


def strip_objective_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a D but for what an objective keeps with it, which belongs to the run and not to the model."""
    return {name: value for name, value in tensors.items() if not name.startswith(f"{STATE_NAME}.")}
