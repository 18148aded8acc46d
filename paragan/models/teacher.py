"""The generators of a per-label run as the teacher of a distilled one. They are frozen, and not in checkpoints."""

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
    """Maps latents [N, latent] and labels [N] to images, each from the generator of its label (loaded when needed)."""

    sampler: PerLabelSampler

    @staticmethod
    def load(
        folder: Path, spec: Spec, latent_size: int, classes: Sequence[str], device: torch.device, nets: Any = None
    ) -> Teacher:
        """Load the generators of a run folder. UsageError if they do not fit the student's spec, latent and classes."""
        model = load_model(folder, device, nets)
        if not isinstance(model.sampler, PerLabelSampler):
            raise UsageError(f"{folder}: one generator for all labels. Use a run of --strategy per-label")
        if missing := labels_without_generator(folder, model):
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UsageError(
                f"{folder}: no generator yet for label {', '.join(missing[:5])}{more}. Resume that run first"
            )
        if model.spec.array_shape != spec.array_shape:
            raise UsageError(f"--data: shape {spec.shape} differs from that of {folder}: {model.spec.shape}")
        if not spec.classes:
            raise UsageError(f"data.labels=false: {folder} has a generator for each label. Use --data.labels=true")
        if tuple(classes) != model.classes:
            raise UsageError(
                f"--data: the classes differ from those of {folder}: {_format_classes(classes)}, "
                f"not {_format_classes(model.classes)}"
            )
        teacher_latent_size = model.sampler.for_label(0).latent_size
        for field, value, required in (
            ("data.resolution", spec.resolution, model.spec.resolution),
            ("data.channels", spec.channels, model.spec.channels),
            ("nets.latent", latent_size, teacher_latent_size),
        ):
            if value != required:
                raise UsageError(f"--{field}={value}: the generators in {folder} have {required}. Use {required}")
        return Teacher(model.sampler)

    @torch.no_grad()
    def __call__(self, latents: Tensor, labels: Tensor) -> Tensor:
        order = labels.argsort(stable=True)
        present_labels, counts = labels[order].unique_consecutive(return_counts=True)
        parts = latents[order].split(counts.tolist())
        labels_and_parts = zip(present_labels.tolist(), parts)
        images = [self.sampler.for_label(label).generate(part, None) for label, part in labels_and_parts]
        return torch.cat(images)[order.argsort()]


def _format_classes(classes: Sequence[str]) -> str:
    return ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
