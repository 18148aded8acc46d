"""The diffusion model that a generator of one step is distilled from. It is frozen, and not in checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragan.core.errors import UsageError
from paragan.models.diffusers_pipeline import (
    is_pipeline,
    load_pipeline_weights,
    pipeline_spec,
    pipeline_weights_dir,
    read_pipeline,
)
from paragan.models.load_generator import resolve_nets
from paragan.models.model import load_model
from paragan.models.model_files import find_model_dir
from paragan.nets import DenoiserConfig, Spec
from paragan.nets.denoiser import Denoiser, ScoreCritic

CPU = torch.device("cpu")


def load_denoiser(
    folder: Path, spec: Spec | None = None, device: torch.device = CPU
) -> tuple[Denoiser, DenoiserConfig]:
    """Load the denoiser of a run or model folder or of a `diffusers` pipeline, and its config.

    Args:
        spec: of the data that a student learns on.

    Raises:
        UsageError: it is no diffusion model, or of other data.
    """
    if is_pipeline(folder):
        denoiser, nets = _load_pipeline(folder, spec)
    else:
        denoiser, nets = _load_trained(folder, spec)
    return denoiser.to(device).eval().requires_grad_(False), nets


def student_nets(folder: Path, spec: Spec) -> DenoiserConfig:
    """Return the networks of a student: those of the teacher in `folder`, with one step and a critic.

    Raises:
        UsageError: as `load_denoiser`, but for the weights of a pipeline, which are not read.
    """
    if is_pipeline(folder):
        nets = read_pipeline(folder)
        _check_same_data(folder, pipeline_spec(folder, nets, spec), spec)
    else:
        _, nets = _load_trained(folder, spec)
    return dataclasses.replace(nets.for_spec(spec), steps=1, critic="score")


def teacher_weights_dir(folder: Path) -> Path:
    """Return the folder of the weights of a teacher. UsageError if there are none."""
    return pipeline_weights_dir(folder) if is_pipeline(folder) else find_model_dir(folder)


def start_as_teacher(g: nn.Module, d: nn.Module, teacher: Denoiser) -> None:
    """Give the U-nets of a student and of its critic the weights of the teacher."""
    assert isinstance(g, Denoiser)
    assert isinstance(d, ScoreCritic)
    for denoiser in (g, d.denoiser):
        denoiser.load_state_dict(teacher.state_dict())


def _load_trained(folder: Path, spec: Spec | None) -> tuple[Denoiser, DenoiserConfig]:
    model = load_model(folder)
    denoiser: Any = getattr(model.sampler, "g", None)
    nets = resolve_nets(model.config.get("net"), None, folder)
    if not isinstance(denoiser, Denoiser) or nets.steps == 1:
        raise UsageError(
            f"distill_from={folder}: is no diffusion model. Use a run of `paragan train diffusion`, or the folder of a "
            "diffusers pipeline"
        )
    _check_same_data(folder, model.spec, spec)
    return denoiser, nets


def _load_pipeline(folder: Path, spec: Spec | None) -> tuple[Denoiser, DenoiserConfig]:
    nets = read_pipeline(folder)
    spec_of_pipeline = pipeline_spec(folder, nets, spec)
    _check_same_data(folder, spec_of_pipeline, spec)
    nets = nets.for_spec(spec_of_pipeline)
    nets.check(spec_of_pipeline)
    denoiser = nets.denoiser(spec_of_pipeline)
    network: Any = denoiser.unet
    network.model.load_state_dict(load_pipeline_weights(folder))
    return denoiser, nets


def _check_same_data(folder: Path, teacher: Spec, data: Spec | None) -> None:
    """Raise UsageError if a teacher makes other images than a student learns on."""
    if data is None:
        return
    for field, name in (("resolution", "resolution"), ("channels", "channels"), ("labels", "classes")):
        of_data = getattr(data, name)
        of_teacher = getattr(teacher, name)
        if of_data == of_teacher:
            continue
        if name != "classes":
            advice = f"--data.{field}={of_teacher}"
        elif of_teacher:
            advice = f"data of {of_teacher} classes"
        else:
            advice = "--data.labels=false"
        raise UsageError(
            f"--data.{field}: the teacher in {folder} makes images of {name} {of_teacher}, and the data have "
            f"{of_data}. Use {advice}"
        )
