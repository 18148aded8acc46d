"""Train `tokenizer` and `super-resolution` on CIFAR-10 with and without the adversarial loss, and score both.

    python -m benchmarks.quality.reconstruction tokenizer --cifar FOLDER --resnet20 F [--json F]
    python -m benchmarks.quality.reconstruction super-resolution --cifar FOLDER --resnet20 F [--json F]

FOLDER holds train_part*of3.npz and test1k_exact.npz; F is the state dict of a ResNet-20 (benchmarks/lib/
cifar_resnet20.py). Variants without the adversarial loss train G alone, for as many images. Scores are those of the
1,000 test images: PSNR (mean over images, of 8-bit values), fd_resnet20 (Fréchet distance in the features of the
ResNet-20: not FID), and how many reconstructions it classifies correctly. The degradation of super-resolution is drawn
once for every test image, the same for all variants; bicubic enlargement is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import paragan as pg
from benchmarks.lib.cifar_resnet20 import CifarFeatures, cifar_features
from benchmarks.lib.timing import describe_machine, format_table, save_json
from benchmarks.quality.quality import run_paragan
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, primary_array
from paragan.eval.frechet import RunningMoments, frechet_distance
from paragan.eval.paired import psnrs
from paragan.nets.codebook import VectorQuantizer

ReconstructFn = Callable[[Batch], Tensor]  # a batch -> images [N, 3, 32, 32] in [-1, 1]
PICTURE_COLUMNS = 16
PERCEPTUAL = ("--objective.perceptual_features=benchmarks.lib.cifar_resnet20:cifar_features",)
BATCH = 250


def variants(recipe: str) -> dict[str, tuple[bool, tuple[str, ...]]]:
    """Return, by name of the variant, whether it has an adversarial loss, and its settings."""
    if recipe == "super-resolution":
        return {"L1": (False, ()), "L1 + adversarial": (True, ())}
    perceptual = ("--objective.perceptual=0.1", *PERCEPTUAL)
    return {
        "L1": (False, ()),
        "L1 + perceptual": (False, perceptual),
        "L1 + perceptual + adversarial": (True, perceptual),
    }


def join_cifar(folder: Path, target: Path) -> Path:
    """Write the parts of the training images to one file."""
    if not target.exists():
        parts = [np.load(file) for file in sorted(folder.glob("train_part*of3.npz"))]
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(target, images=np.concatenate([part["images"] for part in parts]))
    return target


def train(recipe: str, data: Path, folder: Path, adversarial: bool, kimg: float, settings: tuple[str, ...]) -> float:
    """Train a run, unless it is finished. Return its seconds of training."""
    if not (folder / "report.html").exists():
        late = () if adversarial else (f"--d.start_kimg={kimg - 0.2:g}", "--objective.adversarial_weight=0")
        output = ("--output.checkpoint_kimg=1e9", "--evaluation.metrics=[]", f"--kimg={kimg:g}", f"--run-dir={folder}")
        run_paragan("train", recipe, f"--data={data}", *late, *settings, *output)
    lines = (folder / "stats.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["Timing/total_s"])


class HeldOut:
    """The test images, and the scores of reconstructions of them."""

    def __init__(self, cifar: Path, features: CifarFeatures):
        test = np.load(cifar / "test1k_exact.npz")
        self.images = torch.from_numpy(test["images"]).permute(0, 3, 1, 2).contiguous()  # uint8
        self.labels = torch.from_numpy(test["labels"]).long()
        self.features = features

    def batches(self) -> list[Batch]:
        """Return the test images as batches, with the random numbers of a degradation."""
        x = self.images.float() / 127.5 - 1
        return [Batch(part, None, LaneRng(0, i * BATCH, (0,), len(part))) for i, part in enumerate(x.split(BATCH))]

    @torch.no_grad()
    def score(self, reconstruct: ReconstructFn) -> dict[str, float]:
        """Score the reconstructions of all test images: [N, 3, 32, 32] in [-1, 1] of a batch."""
        made = torch.cat([reconstruct(batch) for batch in self.batches()])
        made = made.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
        moments = []
        for images in (self.images, made):
            moments.append(RunningMoments(64))
            for part in (images.float() / 127.5 - 1).split(BATCH):
                moments[-1].update(self.features.pooled(part).double())
        correct = torch.cat([self.features.classify(part) for part in (made.float() / 127.5 - 1).split(BATCH)])
        return {
            "psnr": float(psnrs(made, self.images, 0).mean()),
            "fd_resnet20": float(frechet_distance(*(m.compute() for m in moments)).value),
            "accuracy": float((correct == self.labels).float().mean()),
        }


@torch.no_grad()
def codebook_use(g: Any, held_out: HeldOut) -> dict[str, float]:
    """Return how many codes the test images use, and the perplexity of their distribution."""
    if not isinstance(getattr(g, "quantizer", None), VectorQuantizer):
        return {}
    codes = torch.cat([g(batch.images).codes.flatten() for batch in held_out.batches()])
    share = codes.bincount(minlength=len(g.quantizer.codebook)).double() / len(codes)
    entropy = -(share * share.clamp(min=1e-30).log()).sum()
    return {"codes_in_use": int((share > 0).sum()), "codes": len(share), "perplexity": float(entropy.exp())}


def load_run(folder: Path, data: Path) -> tuple[Any, ReconstructFn]:
    """Return the averaged G of a run, and the function from a batch to reconstructions."""
    model = pg.load(folder, dataset=pg.load_data(str(data), resolution=32))
    g, conditioning_input = model.sampler.g.eval(), model.sampler.source.conditioning_input
    return g, lambda batch: primary_array(g(conditioning_input(batch), None))


@torch.no_grad()
def save_picture(rows: Sequence[ReconstructFn], held_out: HeldOut, path: Path) -> None:
    """Save the first test images as a picture with a row for each function, enlarged three times."""
    batch = held_out.batches()[0]
    lines = [torch.cat(list(row(batch)[:PICTURE_COLUMNS]), 2) for row in rows]
    pixels = torch.cat(lines, 1).add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.resize((3 * image.width, 3 * image.height), Image.Resampling.NEAREST).save(path, optimize=True)


def bicubic(batch: Batch) -> Tensor:
    """Enlarge the degraded images of a batch."""
    from paragan.nets import SuperResolution

    small = SuperResolution().conditioning_input(batch)
    return F.interpolate(small, scale_factor=2.0, mode="bicubic")


def format_rows(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all variants."""
    names = ["psnr", "fd_resnet20", "accuracy", "codes_in_use", "perplexity", "train_s"]
    table = [[name, *(f"{row[key]:.4g}" if key in row else "" for key in names)] for name, row in rows.items()]
    return format_table(["", *names], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=["tokenizer", "super-resolution"])
    parser.add_argument("--cifar", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--resnet20", required=True, metavar="F")
    parser.add_argument("--kimg", type=float, default=500.0)
    parser.add_argument("--variants", help="names, separated by ; (default: all)")
    parser.add_argument("--settings", nargs="*", default=[], help="more settings, of all variants: device.kind=cuda")
    parser.add_argument("--runs", type=Path, default=Path("runs/reconstruction"), metavar="DIR")
    parser.add_argument("--json", metavar="F")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help="test images: a row for each variant, then the data"
    )
    options = parser.parse_args()
    os.environ["CIFAR_RESNET20"] = str(Path(options.resnet20).absolute())
    held_out = HeldOut(options.cifar, cifar_features())
    data = join_cifar(options.cifar, options.runs / "cifar.npz")
    result: dict[str, Any] = {"machine": describe_machine(), "kimg": options.kimg, "settings": options.settings}
    rows = result["rows"] = {"the data": held_out.score(lambda batch: batch.images)}
    pictured: list[ReconstructFn] = []
    if options.recipe == "super-resolution":
        rows["bicubic"] = held_out.score(bicubic)
        pictured.append(bicubic)
    for name, (adversarial, settings) in variants(options.recipe).items():
        if options.variants and name not in options.variants.split(";"):
            continue
        folder = options.runs / f"{options.recipe} {name}".replace(" + ", "-").replace(" ", "-")
        more = tuple(f"--{setting}" for setting in options.settings)
        train_s = train(options.recipe, data, folder, adversarial, options.kimg, (*settings, *more))
        g, reconstruct = load_run(folder, data)
        rows[name] = held_out.score(reconstruct) | codebook_use(g, held_out) | {"train_s": train_s}
        pictured.append(reconstruct)
        print(f"{name}: {rows[name]}", flush=True)
        if options.json:
            save_json(options.json, result)
    if options.picture:
        save_picture([*pictured, lambda batch: batch.images], held_out, options.picture)
    print(format_rows(rows))


if __name__ == "__main__":
    main()
