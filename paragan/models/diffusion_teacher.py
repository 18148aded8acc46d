"""The diffusion model that a generator of one step is distilled from. It is frozen, and not in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragan.core.errors import UsageError
from paragan.models.model import load_model, resolve_nets
from paragan.nets import EDM, Spec
from paragan.nets.edm import Denoiser, ScoreCritic

CPU = torch.device("cpu")


def load_denoiser(folder: Path, spec: Spec | None = None, device: torch.device = CPU) -> tuple[Denoiser, EDM]:
    """Load the denoiser of a run or model folder, and its config.

    Args:
        spec: of the data that a student learns on.

    Raises:
        UsageError: it is no diffusion model, or of other data.
    """
    model = load_model(folder, device)
    denoiser: Any = getattr(model.sampler, "g", None)
    nets = resolve_nets(model.config.get("net"), None, folder)
    if not isinstance(denoiser, Denoiser) or nets.steps == 1:
        raise UsageError(f"distill_from={folder}: is no diffusion model. Use a run of `paragan train diffusion`")
    if spec is not None:
        fields = (("data.resolution", "resolution"), ("data.channels", "channels"), ("data.labels", "classes"))
        for field, name in fields:
            of_data = getattr(spec, name)
            of_teacher = getattr(model.spec, name)
            if of_data != of_teacher:
                raise UsageError(
                    f"--{field}: the teacher in {folder} makes images of {name} {of_teacher}, and the data have "
                    f"{of_data}. Use data of {name} {of_teacher}"
                )
    return denoiser.eval().requires_grad_(False), nets


def start_as_teacher(g: nn.Module, d: nn.Module, teacher: Denoiser) -> None:
    """Give the U-nets of a student and of its critic the weights of the teacher."""
    assert isinstance(g, Denoiser)
    assert isinstance(d, ScoreCritic)
    for net in (g.unet, d.denoiser.unet):
        net.load_state_dict(teacher.unet.state_dict())
