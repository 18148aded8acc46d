"""Compare the latents that a teacher makes with those that a student learns on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding
from paragan.core.schema import from_dict
from paragan.models.diffusers_pipeline import is_pipeline
from paragan.models.load_generator import wrap_config_errors
from paragan.models.model_files import find_model_dir, read_model_config


def check_same_encoding(teacher: Path, encoding: ImageEncoding | None) -> None:
    """Check that a teacher makes what a student learns on: images, or latents of one autoencoder and normalisation.

    Args:
        teacher: a run or model folder, or that of a `diffusers` pipeline.
        encoding: of the student's data.

    Raises:
        UsageError: it makes other ones.
    """
    config = {} if is_pipeline(teacher) else read_model_config(find_model_dir(teacher))
    with wrap_config_errors(teacher):
        of_teacher = from_dict(ImageEncoding, config["encoding"]) if "encoding" in config else None
    if _latent_space(of_teacher) == _latent_space(encoding):
        return
    made = f"latents of {of_teacher.decoder}, with mean {_format(of_teacher.mean)}" if of_teacher else "images"
    data = f"latents of {encoding.decoder}, with mean {_format(encoding.mean)}" if encoding else "images"
    raise UsageError(
        f"distill_from={teacher}: makes {made}, and the data are {data}. Use the data that it was trained on"
    )


def _latent_space(encoding: ImageEncoding | None) -> tuple[Any, ...]:
    return (encoding.fingerprint, encoding.mean, encoding.std) if encoding else ()


def _format(means: tuple[float, ...]) -> str:
    shown = ", ".join(f"{mean:.4g}" for mean in means[:4])
    return f"({shown}{', ...' if len(means) > 4 else ''})"
