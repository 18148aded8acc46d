"""The generators of a run per label as a teacher: what each makes of a latent. They are frozen, and no part of a
checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.models.model import labels_without_generator, load_model
from paragan.models.sampler import PerLabelSampler
from paragan.nets import Spec


@dataclass(frozen=True)
class Teacher:
    """(latents, labels) -> images, each from the generator of its label, which is loaded when first asked for."""

    sampler: PerLabelSampler

    @staticmethod
    def load(
        folder: Path, spec: Spec, latent_size: int, classes: Sequence[str], device: torch.device, nets: Any = None
    ) -> Teacher:
        """The teacher of a student with this spec, latent and classes. Unusable where they do not fit."""
        model = load_model(folder, device, nets)
        if not isinstance(model.sampler, PerLabelSampler):
            raise UsageError(f"{folder} has one generator for all labels: give a run of --strategy per-label")
        if missing := labels_without_generator(folder, model):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UsageError(
                f"{folder} has no generator yet for label {', '.join(missing[:5])}{more}: go on with that run first"
            )
        theirs = model.spec
        if theirs.array_shape != spec.array_shape:
            raise UsageError(f"--data are other numbers than those of {folder}: {spec.shape}, not {theirs.shape}")
        if not spec.classes:
            raise UsageError(f"{folder} tells labels apart, and G is told none: use --data.labels=true")
        if tuple(classes) != model.classes:
            raise UsageError(
                f"--data has other classes than {folder}: {_format_classes(classes)}, not {_format_classes(model.classes)}"
            )
        size = model.sampler.for_label(0).latent_size
        for field, mine, wanted in (
            ("data.resolution", spec.resolution, theirs.resolution),
            ("data.channels", spec.channels, theirs.channels),
            ("nets.latent", latent_size, size),
        ):
            if mine != wanted:
                raise UsageError(
                    f"--{field}={mine}, and the generators in {folder} have {wanted}: use --{field}={wanted}"
                )
        return Teacher(model.sampler)

    @torch.no_grad()
    def __call__(self, latents: Tensor, labels: Tensor) -> Tensor:
        order = labels.argsort(stable=True)
        there, counts = labels[order].unique_consecutive(return_counts=True)
        parts = latents[order].split(counts.tolist())
        made = [self.sampler.for_label(label).g(part, None) for label, part in zip(there.tolist(), parts)]
        return torch.cat(made)[order.argsort()]


def _format_classes(classes: Sequence[str]) -> str:
    return ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
