"""A Hugging Face Space: a page to sample from a model of paragan, with Gradio.

    pip install 'gradio>=6'                                # needs Pillow 12
    MODEL=digits-model python examples/space/app.py        # a folder of `paragan export`, or user/name on the hub

To publish it, make a Space with the SDK Gradio, and put this file, requirements.txt and README.md into it, beside the
folder `model` that `paragan export MODEL --out model` wrote.
"""

from __future__ import annotations

import os

import gradio as gr
import numpy as np
from PIL import Image

import paragan as pg
from paragan.core.image_grid import make_grid

MAX_IMAGES = 64
MIN_PX = 64  # of an image on the page: smaller ones are enlarged
ANY = "any"


def build_page(model: pg.Model) -> gr.Blocks:
    """Return the page of a model of images."""

    def sample(label: str, count: float, truncation: float, seed: float) -> Image.Image:
        labels = None if label == ANY else [f"index:{model.classes.index(label)}"]
        images = model.sample(int(count), labels, truncation, int(seed))
        return make_grid(np.asarray(images), scale=max(1, MIN_PX // max(images.shape[1:3])))

    title = f"{model.config.get('recipe', 'a model')} trained with paragan"
    with gr.Blocks(title=title) as page:
        gr.Markdown(f"# {title}\nTrained on {model.kimg:,.0f} thousand images.")
        with gr.Row():
            with gr.Column(scale=1):
                label = gr.Dropdown([ANY, *model.classes], value=ANY, label="class", visible=bool(model.classes))
                count = gr.Slider(1, MAX_IMAGES, 16, step=1, label="images")
                truncation = gr.Slider(0.05, 1, 1, label="truncation: lower is closer to the mean")
                seed = gr.Number(0, label="seed", precision=0, minimum=0)
                button = gr.Button("Sample", variant="primary")
            image = gr.Image(label="samples", format="png", scale=2)
        inputs = [label, count, truncation, seed]
        button.click(sample, inputs, image, api_name="sample")
        page.load(sample, inputs, image, api_visibility="private")
    return page


if __name__ == "__main__":
    build_page(pg.load(os.environ.get("MODEL", "model"))).launch()
