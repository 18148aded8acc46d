"""Models that cannot be teachers are refused, and what their messages advise works."""

from __future__ import annotations

from pathlib import Path

import torch

from advice import advises
from paragan.models.teacher import Teacher
from paragan.nets import Spec

CPU = torch.device("cpu")


def load(folder: Path, latent_size: int = 6, resolution: int = 8, channels: int = 1) -> Teacher:
    return Teacher.load(folder, Spec(resolution, channels, 2), latent_size, ["a", "b"], CPU)


def test_a_teacher_is_a_run_as_advised(small, per_label):
    with advises(f"{small}: one generator for all labels. Use a run of --strategy per-label"):
        load(small)
    assert load(per_label)


def test_a_student_has_what_its_teacher_has_as_advised(per_label):
    with advises(f"--nets.latent=8: the generators in {per_label} have 6. Use 6"):
        load(per_label, latent_size=8)
    with advises(f"--data.resolution=16: the generators in {per_label} have 8. Use 8"):
        load(per_label, resolution=16)
    with advises(f"--data.channels=3: the generators in {per_label} have 1. Use 1"):
        load(per_label, channels=3)
    images = load(per_label, latent_size=6, resolution=8, channels=1)(torch.randn(3, 6), torch.tensor([0, 1, 0]))
    assert images.shape == (3, 1, 8, 8)
