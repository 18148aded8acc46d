"""State of an objective that lasts over steps: buffers in a child module of D's network, which D does not call.

So they are treated as D's other buffers: saved in checkpoints, sent to the team of G, copied with D. They are no part
of model files. `update` counts in D's own turn only (`tracking`); counts are summed over lanes and ranks (`moments`)
and applied once per step (`apply_moments`), as `game/player.py` does with all layers that mix images of a batch.
Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.types import DiscriminatorFn

STATE_NAME = "objective_state"
UPDATE_INTERVAL_STEPS = 4  # steps of D between two updates of ADA's p (Karras et al. 2020)


class LeCamEMA(nn.Module):
    """Running means [2] of D's logits on reals and on fakes, in `means`.

    In the first steps they are plain means over all steps, so that the initial zeros have no influence.
    """

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
        self.register_buffer("moments", torch.zeros(3), persistent=False)  # sum on reals, sum on fakes, count of each

    @property
    def is_initialized(self) -> Tensor:
        """0.0 before the first step, 1.0 after it."""
        return self.steps.clamp(max=1)

    @torch.no_grad()
    def update(self, on_real: Tensor, on_fake: Tensor) -> None:
        """Count D's logits on reals [N] and on fakes [N], while `tracking`."""
        if self.tracking:
            self.moments[0].add_(on_real.sum())
            self.moments[1].add_(on_fake.sum())
            self.moments[2].add_(len(on_real))

    @torch.no_grad()
    def apply_moments(self) -> None:
        """Update the means by `moments`, and zero those."""
        count = self.moments[2]
        any_counted = (count > 0).to(self.steps.dtype)
        self.steps += any_counted
        rate = (1 / self.steps.clamp(min=1)).clamp(min=1 - self.decay) * any_counted
        self.means.lerp_((self.moments[:2] / count.clamp(min=1)).to(self.means.dtype), rate)
        self.moments.zero_()


class AugmentProbability(nn.Module):
    """ADA's probability p, a scalar, of applying an augmentation (Karras et al. 2020, section 3).

    Every fourth step p changes by a fixed amount: up if the mean sign of D's logits on reals is above `target`, else
    down. It stays between 0 and 1; the authors let it exceed 1.

    Args:
        target: Target of the mean sign of D's logits on reals.
        step_size: Change of p per step of D.
    """

    lane_batch: int | None = None
    tracking: bool = False
    p: Tensor
    sign_stats: Tensor
    moments: Tensor

    def __init__(self, target: float, step_size: float):
        super().__init__()
        self.target = target
        self.step_size = step_size
        self.register_buffer("p", torch.zeros(()))
        self.register_buffer("sign_stats", torch.zeros(3))  # sum of signs, number of signs, steps since the last update
        self.register_buffer("moments", torch.zeros(2), persistent=False)  # sum of signs, number of signs

    @torch.no_grad()
    def update(self, on_real: Tensor) -> None:
        """Count D's logits on reals [N], while `tracking`."""
        if self.tracking:
            self.moments[0].add_(on_real.sign().sum())
            self.moments[1].add_(len(on_real))

    @torch.no_grad()
    def apply_moments(self) -> None:
        """Add `moments` to the statistics of signs, zero them, and update p if it is due."""
        self.sign_stats[:2] += self.moments
        self.sign_stats[2] += self.moments[1] > 0
        self.moments.zero_()
        due = self.sign_stats[2] >= UPDATE_INTERVAL_STEPS
        above = torch.sign(self.sign_stats[0] / self.sign_stats[1].clamp(min=1) - self.target)
        self.p.add_(above * due * (self.step_size * UPDATE_INTERVAL_STEPS)).clamp_(0, 1)
        self.sign_stats *= ~due


class ObjectiveState(nn.Module):
    """The whole state of an objective."""

    def __init__(self, lecam_ema: LeCamEMA | None, augment_probability: AugmentProbability | None):
        super().__init__()
        self.lecam_ema = lecam_ema
        self.augment_probability = augment_probability

    def forward(self, x: Tensor) -> Tensor:
        """Return x: a D such as nn.Sequential calls all its children."""
        return x


def attach_state(state: nn.Module | None, net: nn.Module) -> None:
    """Add the state of an objective to the network of a player, which is on its device and no player yet."""
    if state is not None:
        net.add_module(STATE_NAME, state.to(next(net.parameters()).device))


def state_of(d: DiscriminatorFn) -> ObjectiveState:
    """Return the state of the objective in a D or in a copy of it. Raises `UsageError` if there is none."""
    state = dict(d.named_children()).get(STATE_NAME) if isinstance(d, nn.Module) else None
    if not isinstance(state, ObjectiveState):
        raise UsageError(
            "objective.lecam or objective.augment=ada: D has no objective state. Use an nn.Module, and "
            "attach_state(state, d)"
        )
    return state


def state_of_generator(g: nn.Module | None, field: str) -> nn.Module:
    """Return the state of the objective in a G. Raises `UsageError`, which names a field, if there is none."""
    state = dict(g.named_children()).get(STATE_NAME) if g else None
    if state is None:
        raise UsageError(
            f"{field}: G has no objective state. Use attach_state(objective.make_g_state(g), g), and fakes "
            "with generator=g"
        )
    return state


def strip_objective_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of a network without the objective's state, which belongs to the run and not to the model."""
    return {name: value for name, value in tensors.items() if not name.startswith(f"{STATE_NAME}.")}
