"""What an objective remembers from step to step: buffers in a child of D's network, which D does not call.

There they go wherever D's other buffers go: into checkpoints, to the team of G, into copies of D. `see` counts in D's
own turn only (`tracking`), what is counted is summed over lanes and team (`moments`), and applied once a step
(`settle`), as game/player.py does with every layer that couples images. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paragan.core.errors import Unusable
from paragan.core.types import Net

NAME = "kept_by_objective"
INTERVAL = 4  # steps of D from one look at the reals' signs to the next (Karras et al. 2020)


class Anchors(nn.Module):
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
    def known(self) -> Tensor:
        return self.steps.clamp(max=1)

    @torch.no_grad()
    def see(self, on_real: Tensor, on_fake: Tensor) -> None:
        if self.tracking:
            self.moments[0].add_(on_real.sum())
            self.moments[1].add_(on_fake.sum())
            self.moments[2].add_(len(on_real))

    @torch.no_grad()
    def settle(self) -> None:
        count = self.moments[2]
        some = (count > 0).to(self.steps.dtype)
        self.steps += some
        rate = (1 / self.steps.clamp(min=1)).clamp(min=1 - self.decay) * some
        self.means.lerp_((self.moments[:2] / count.clamp(min=1)).to(self.means.dtype), rate)
        self.moments.zero_()


class Chance(nn.Module):
    """The chance p, a scalar, with which ADA changes an image (Karras et al. 2020, section 3).

    Every fourth step it moves by a fixed amount, up if the mean sign of D's logits on reals is above `target`, else
    down. We keep it between 0 and 1, where the authors let it pass 1.

    pace : by how much for each step of D
    """

    lane_batch: int | None = None
    tracking: bool = False
    p: Tensor
    signs: Tensor
    moments: Tensor

    def __init__(self, target: float, pace: float):
        super().__init__()
        self.target, self.pace = target, pace
        self.register_buffer("p", torch.zeros(()))
        self.register_buffer("signs", torch.zeros(3))  # their sum, of how many, and the steps they were counted in
        self.register_buffer("moments", torch.zeros(2), persistent=False)

    @torch.no_grad()
    def see(self, on_real: Tensor) -> None:
        if self.tracking:
            self.moments[0].add_(on_real.sign().sum())
            self.moments[1].add_(len(on_real))

    @torch.no_grad()
    def settle(self) -> None:
        self.signs[:2] += self.moments
        self.signs[2] += self.moments[1] > 0
        self.moments.zero_()
        due = self.signs[2] >= INTERVAL
        above = torch.sign(self.signs[0] / self.signs[1].clamp(min=1) - self.target)
        self.p.add_(above * due * (self.pace * INTERVAL)).clamp_(0, 1)
        self.signs *= ~due


class Kept(nn.Module):
    """All that an objective keeps."""

    def __init__(self, anchors: Anchors | None, chance: Chance | None):
        super().__init__()
        self.anchors, self.chance = anchors, chance

    def forward(self, x: Tensor) -> Tensor:
        """Nothing, for networks that call whatever children they have."""
        return x


def attach(kept: Kept | None, d: nn.Module) -> None:
    """Give D's network, which has its device already, what an objective keeps; before its player is made."""
    if kept is not None:
        d.add_module(NAME, kept.to(next(d.parameters()).device))


def found_in(d: Net) -> Kept:
    """What is kept with a D, or with a copy of it."""
    kept = dict(d.named_children()).get(NAME) if isinstance(d, nn.Module) else None
    if not isinstance(kept, Kept):
        raise Unusable(
            "objective.lecam and objective.augment=ada remember something with D: attach it (losses/kept.py)"
        )
    return kept


def without(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a D but for what an objective keeps with it, which belongs to the run and not to the model."""
    return {name: value for name, value in tensors.items() if not name.startswith(f"{NAME}.")}
