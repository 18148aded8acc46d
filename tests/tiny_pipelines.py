"""Tiny `diffusers` pipelines of the digits, in folders as that package saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

TINY_UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 8],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": 4,
    "num_class_embeds": 10,
}


def make_pipeline(
    folder: Path,
    prediction: str = "epsilon",
    betas: str = "linear",
    scheduler: type[Any] = diffusers.DDPMScheduler,
    **unet: Any,
) -> Any:
    """Save a pipeline with random weights and return it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = diffusers.UNet2DModel(**TINY_UNET | unet).eval()
        for p in network.parameters():
            nn.init.normal_(p, std=0.2)
    pipeline = diffusers.DDPMPipeline(network, scheduler(beta_schedule=betas, prediction_type=prediction))
    pipeline.save_pretrained(folder)
    return pipeline


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
