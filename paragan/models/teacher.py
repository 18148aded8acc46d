"""The generators of a run per label as a teacher: what each makes of a latent. They are frozen, and no part of a
checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.core.errors import Unusable
from paragan.models.model import load_model, without_generator
from paragan.models.sampler import Merged
from paragan.nets import Spec


@dataclass(frozen=True)
class Teacher:
    """(latents, labels) -> images, each from the generator of its label, which is loaded when first asked for."""

    merged: Merged

    @staticmethod
    def of(
        folder: Path, spec: Spec, latent: int, classes: Sequence[str], device: torch.device, nets: Any = None
    ) -> Teacher:
        """The teacher of a student with this spec, latent and classes. Unusable where they do not fit."""
        model = load_model(folder, device, nets)
        if not isinstance(model.sampler, Merged):
            raise Unusable(f"{folder} has one generator for all labels: give a run of --strategy per-label")
        if missing := without_generator(folder, model):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise Unusable(
                f"{folder} has no generator yet for label {', '.join(missing[:5])}{more}: go on with that run first"
            )
        theirs = model.spec
        if theirs.values != spec.values:
            raise Unusable(f"--data are other numbers than those of {folder}: {spec.shape}, not {theirs.shape}")
        if not spec.classes:
            raise Unusable(f"{folder} tells labels apart, and G is told none: use --data.labels=true")
        if tuple(classes) != model.classes:
            raise Unusable(f"--data has other classes than {folder}: {_listed(classes)}, not {_listed(model.classes)}")
        size = model.sampler.of(0).latent
        for field, mine, wanted in (
            ("data.resolution", spec.resolution, theirs.resolution),
            ("data.channels", spec.channels, theirs.channels),
            ("nets.latent", latent, size),
        ):
            if mine != wanted:
                raise Unusable(
                    f"--{field}={mine}, and the generators in {folder} have {wanted}: use --{field}={wanted}"
                )
        return Teacher(model.sampler)

    @torch.no_grad()
    def __call__(self, latents: Tensor, labels: Tensor) -> Tensor:
        order = labels.argsort(stable=True)
        there, counts = labels[order].unique_consecutive(return_counts=True)
        parts = latents[order].split(counts.tolist())
        made = [self.merged.of(label).g(part, None) for label, part in zip(there.tolist(), parts)]
        return torch.cat(made)[order.argsort()]


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
