"""Read an unconditional or class-conditional diffusion model from a folder that a `diffusers` pipeline was saved to.

    model_index.json, scheduler/scheduler_config.json, unet/config.json, unet/diffusion_pytorch_model.safetensors

Only JSON and safetensors are read: pickles in the folder are not opened, and Python files not run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.schema import from_dict
from paragan.nets import DiffusersUNet, Spec
from paragan.nets.diffusers_unet import import_diffusers
from paragan.nets.variance_preserving import NoiseSchedule, Prediction, schedule_sigmas

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model"
SCHEDULERS = ("DDPMScheduler", "DDIMScheduler")
AUTOENCODERS = ("vae", "vqvae", "movq", "vqgan")
TEXT_COMPONENTS = ("text_encoder", "tokenizer")
UNSUPPORTED_NOISE = ("trained_betas", "rescale_betas_zero_snr")
# The noise that a student starts from, where the schedule goes on: that of EDM's sampler. The error of an epsilon is
# multiplied by sigma, and 15 is about where the schedule of the models ends that DMD2 distils (Stable Diffusion).
LARGEST_SIGMA: dict[Prediction, float] = {"epsilon": 15.0, "v_prediction": 80.0, "sample": 80.0}


def is_pipeline(folder: Path) -> bool:
    """Return whether a folder holds a `diffusers` pipeline, or a part of one."""
    files = (INDEX, "unet/config.json", f"{WEIGHTS}.safetensors", f"{WEIGHTS}.bin")
    return any((folder / name).is_file() for name in files)


def pipeline_weights_dir(folder: Path) -> Path:
    """Return the folder of the weights of a pipeline."""
    return folder / "unet"


def read_pipeline(folder: Path) -> DiffusersUNet:
    """Return the configuration of the denoiser that a pipeline has.

    Raises:
        UsageError: it is not a model of images with no condition but a class, or files are missing.
    """
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"distill_from={folder}: has no {INDEX}. Use the folder of a whole pipeline, as save_pretrained writes it"
        )
    _check_components(folder, _read_json(folder, INDEX))
    unet = _read_json(folder, "unet/config.json")
    _check_weight_files(folder)
    noise = _read_noise_schedule(folder)
    nets = DiffusersUNet(
        # dropout would draw from torch's generator; training here repeats bit for bit
        unet={name: value for name, value in unet.items() if not name.startswith("_")} | {"dropout": 0.0},
        scheduler=noise,
    )
    sigmas = schedule_sigmas(nets.alphas_cumprod())
    if not (sigmas.isfinite().all() and (sigmas.diff() > 0).all()):
        raise UsageError(f"distill_from={folder}: the noise of its scheduler does not grow, or is infinite at the end")
    sigma_max = min(LARGEST_SIGMA[noise.prediction_type], float(sigmas[-1]))
    return dataclasses.replace(nets, sigma_min=float(sigmas[0]), sigma_max=sigma_max)


def pipeline_spec(folder: Path, nets: DiffusersUNet, spec: Spec | None) -> Spec:
    """Return the images of a pipeline: their resolution, channels and classes.

    Args:
        folder: of the pipeline.
        nets: its configuration.
        spec: of the data, whose resolution stands for that of a pipeline that records none.

    Raises:
        UsageError: they are not numbers.
    """
    try:
        resolution = nets.resolution()
        channels = int(nets.unet.get("in_channels", 3))
        classes = int(nets.unet.get("num_class_embeds") or 0)
        return Spec(resolution or (spec.resolution if spec else 0), channels, classes)
    except (TypeError, ValueError) as error:
        raise UsageError(f"distill_from={folder}: unet/config.json cannot be used: {error}") from error


def load_pipeline_weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights of a pipeline's UNet2DModel, float32, from safetensors; names of older versions are converted.

    Raises:
        UsageError: they cannot be read, or do not belong to unet/config.json.
    """
    try:
        model, info = import_diffusers().UNet2DModel.from_pretrained(
            pipeline_weights_dir(folder),
            use_safetensors=True,
            local_files_only=True,
            low_cpu_mem_usage=False,
            output_loading_info=True,
        )
    except Exception as error:  # diffusers raises many kinds
        message = " ".join(str(error).split())[:200]
        raise UsageError(f"distill_from={folder}: its weights cannot be loaded: {message}") from error
    differing = [*info["missing_keys"], *info["unexpected_keys"]]
    if differing:
        raise UsageError(
            f"distill_from={folder}: its weights do not fit unet/config.json; the first names that differ: "
            f"{', '.join(differing[:3])}"
        )
    return model.state_dict()


def _check_components(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise UsageError unless a pipeline consists of a UNet2DModel and a scheduler of DDPM."""
    classes = {
        name: entry[1]
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    }
    unet = classes.get("unet", "")
    text = [name for name in classes if name.startswith(TEXT_COMPONENTS)]
    if text or unet == "UNet2DConditionModel":
        raise UsageError(
            f"distill_from={folder}: is conditioned on text ({', '.join([*text, unet])}), and the data have no "
            "prompts. Use a pipeline with a UNet2DModel, which has no condition, or a class"
        )
    autoencoders = [name for name in classes if name in AUTOENCODERS]
    if autoencoders:
        raise UsageError(
            f"distill_from={folder}: makes latents that its {autoencoders[0]} decodes, and the data are images. Use a "
            "pipeline that makes pixels"
        )
    others = [f"{name} ({value})" for name, value in classes.items() if name not in ("unet", "scheduler")]
    if unet != "UNet2DModel" or index["unet"][0] != "diffusers" or others:
        components = ", ".join([*([f"unet ({unet})"] if unet else []), *others])
        raise UsageError(
            f"distill_from={folder}: its networks are {components or 'none'}. Use a pipeline with a UNet2DModel of "
            "diffusers alone, such as DDPMPipeline"
        )
    scheduler = classes.get("scheduler")
    if scheduler not in SCHEDULERS:
        raise UsageError(
            f"distill_from={folder}: its scheduler is {scheduler}. Use DDPMScheduler.from_config(scheduler.config) if "
            "its betas are those of DDPM"
        )


def _read_noise_schedule(folder: Path) -> NoiseSchedule:
    config = _read_json(folder, "scheduler/scheduler_config.json")
    for field in UNSUPPORTED_NOISE:
        if config.get(field):
            raise UsageError(
                f"distill_from={folder}: its scheduler has {field}. Use a pipeline whose betas are linear, "
                "scaled_linear or squaredcos_cap_v2"
            )
    fields = [field.name for field in dataclasses.fields(NoiseSchedule)]
    try:
        return from_dict(NoiseSchedule, {name: config[name] for name in fields if name in config})
    except UsageError as error:
        raise UsageError(f"distill_from={folder}: scheduler/scheduler_config.json: {error}") from error


def _check_weight_files(folder: Path) -> None:
    """Raise UsageError if a pipeline has no safetensors, in one file or in several with an index."""
    weights = pipeline_weights_dir(folder)
    if any((weights / f"{WEIGHTS}.safetensors{suffix}").is_file() for suffix in ("", ".index.json")):
        return
    files = sorted(file.name for file in weights.glob(f"{WEIGHTS}*"))
    if f"{WEIGHTS}.bin" in files:
        raise UsageError(
            f"distill_from={folder}: unet/{WEIGHTS}.bin is a pickle, whose loading can run code. Convert it where you "
            f"trust it: DDPMPipeline.from_pretrained({str(folder)!r}, use_safetensors=False).save_pretrained(FOLDER)"
        )
    raise UsageError(
        f"distill_from={folder}: has no unet/{WEIGHTS}.safetensors, but {', '.join(files) or 'no weights'}. Save it "
        "with save_pretrained(FOLDER), without a variant"
    )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"distill_from={folder}: {name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"distill_from={folder}: {name} holds no fields")
    return content
