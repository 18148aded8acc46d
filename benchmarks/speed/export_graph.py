"""Every family as ONNX and as torch.export.

`python -m benchmarks.speed.export_graph [--resolution 32] [--classes 4] [--json F]`

Small networks with random weights, with and without classes. What is shown: how far the graph's images are from the
network's, for batches that were not there when it was written, and how long writing and proving took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from paragan.models import export_graph
from paragan.models.export_graph import SUFFIXES, ExportedGenerator, example_inputs, export_graphs, frozen_copy
from paragan.models.model import Model
from paragan.models.sampler import LabelPrior, LatentSource, Sampler
from paragan.nets import DCGAN, R3GAN, SAGAN, SNGAN, BigGAN, BigGANDeep, ContraGAN, Spec
from paragan.nets.attention import SelfAttention

BATCHES = (1, 3, 16)
READERS = {"onnx": export_graph._load_onnx, "torch-export": export_graph._load_pt2}


def make_families(resolution: int) -> list[Any]:
    wide = {"width": 8, "d_width": 8}
    return [
        *(DCGAN(width=8), SNGAN(width=8), SAGAN(**wide), BigGAN(**wide, latent=2520), BigGANDeep(**wide)),
        *(ContraGAN(**wide, latent=2520), R3GAN(width=32 * max(1, resolution // 32))),
    ]


def make_model(nets: Any, spec: Spec) -> Model:
    torch.manual_seed(0)
    g: nn.Module = nets.generator(spec).eval()
    for part in g.modules():
        if isinstance(part, SelfAttention):
            nn.init.ones_(part.gamma)  # from its 0, attention would say nothing
    prior = LabelPrior((1 / max(spec.classes, 1),) * spec.classes)
    return Model(Sampler(g, LatentSource(nets.latent), prior), spec, {"classes": list(range(spec.classes))}, Path())


@torch.no_grad()
def measure(nets: Any, spec: Spec, form: Any, folder: Path) -> dict[str, Any]:
    path, of = folder / f"{nets.name}{spec.classes}{SUFFIXES[form]}", make_model(nets, spec)
    began = time.perf_counter()
    export_graphs(of, form, path)
    seconds = time.perf_counter() - began
    ran, graph, separate = READERS[form](path), ExportedGenerator(frozen_copy(of.g)), 0.0
    for count in BATCHES:
        provided = example_inputs(count, nets.latent, spec.classes)
        separate = max(separate, float((ran(*provided) - graph(*provided)).abs().max()))
    return {"nets": nets.name, "classes": spec.classes, "form": form, "apart": separate, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for nets in make_families(options.resolution):
            for classes in (options.classes, 0):
                spec = Spec(options.resolution, 3, classes)
                rows += [measure(nets, spec, form, Path(folder)) for form in SUFFIXES]
    command = f"benchmarks/speed/export_graph.py --resolution {options.resolution} --classes {options.classes}"
    result = {"machine": describe_machine(), "command": command, "rows": rows}
    print(format_machine(result["machine"]))
    displayed = [[r["nets"], r["classes"], r["form"], f"{r['apart']:.1e}", f"{r['seconds']:.1f}"] for r in rows]
    print(format_table(["nets", "classes", "form", "apart", "seconds"], displayed))
    save_json(options.json, result)


if __name__ == "__main__":
    main()
