"""A generator as one file for other programs: ONNX, or torch.export's .pt2.

    images = graph(z, label)     # float32 [N, latent], int64 [N] (none without classes) -> float32 [N, C, R, R]

Images are in [-1, 1], N is free. Spectral norm and the statistics of batch norm are constants in the graph. Truncation
is the caller's: draw values of z beyond 2 psi again. Every file is run with several N when it is written, and compared
with the network.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paragan.core.atomic_write import aside, refuse_existing
from paragan.core.errors import Failed, Unusable
from paragan.core.rng import generator
from paragan.models.model import Model
from paragan.models.sampler import Latents, Merged, Sampler

Form = Literal["onnx", "torch-export"]
SUFFIX: dict[Form, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
BATCHES = (1, 2, 5)  # that a written graph is tried with
TOLERANCE = 1e-4  # of values in [-1, 1]


def write_graphs(model: Model, form: Form, out: Path) -> list[Path]:
    """Write `out`, which is not there yet; of a model per label, a graph for each label into the folder `out`. Failed
    where one computes something else than the network."""
    suffix = SUFFIX[form]
    if isinstance(model.sampler, Sampler):
        if out.suffix != suffix:
            raise Unusable(f"--out {out}: a graph is one file, named ...{suffix}")
        refuse_existing(out)
        _write(model.sampler, 0 if model.spec.values else model.spec.classes, form, out, _about(model))
        return [out]
    if out.suffix or (out.is_dir() and any(out.iterdir())):
        raise Unusable(f"--out {out}: this model has a generator for every label: name a new folder for their graphs")
    return [_write_label(model, model.sampler, label, form, out) for label in range(model.spec.classes)]


def _write_label(model: Model, parts: Merged, label: int, form: Form, out: Path) -> Path:
    path = out / f"{label:04d}{SUFFIX[form]}"
    _write(parts.of(label), 0, form, path, _about(model) | {"label": model.classes[label]})
    return path


def _about(model: Model) -> dict[str, Any]:
    """What the graph says of itself."""
    return {
        "made by": "paragan",
        "inputs": "z float32 [N, latent], standard normal; label int64 [N], where there are classes",
        "outputs": "images float32 [N, C, H, W] in [-1, 1]; uint8 is round((x + 1) * 127.5), clipped to 0 ... 255",
        "classes": list(model.classes),
    }


def _write(sampler: Sampler, classes: int, form: Form, path: Path, about: dict[str, Any]) -> None:
    if not isinstance(sampler.source, Latents):
        raise Unusable("this generator is given data, not latents: there is no graph of it alone")
    write, read = {"onnx": (_write_onnx, _onnx), "torch-export": (_write_pt2, _pt2)}[form]
    graph = Graph(frozen(sampler.g))
    with aside(path) as hidden, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's exporters, about themselves
        inside = hidden.with_name(hidden.name + SUFFIX[form])
        try:
            write(graph, inputs(3, sampler.latent, classes), inside, about)
            _prove(graph, read(inside), sampler.latent, classes, path)
            inside.rename(hidden)
        finally:
            inside.unlink(missing_ok=True)


class Graph(nn.Module):
    """What is exported: no arguments but tensors, none that may be missing."""

    def __init__(self, g: nn.Module):
        super().__init__()
        self.g = g

    def forward(self, z: Tensor, label: Tensor | None = None) -> Tensor:
        return self.g(z, label)


def frozen(g: nn.Module) -> nn.Module:
    """A copy in eval mode on the CPU, spectral norm multiplied out."""
    net = copy.deepcopy(g).cpu().float().eval().requires_grad_(False)
    for module in list(net.modules()):
        if parametrize.is_parametrized(module):
            _plain(module)
    return net


def _plain(module: nn.Module) -> None:
    """Take parametrizations away, of this module alone: torch's own way would change the class it shares with the
    module that it is a copy of."""
    weights = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # pyright: ignore
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in weights.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def inputs(count: int, latent: int, classes: int) -> tuple[Tensor, ...]:
    """z, and labels where there are classes; a function of the number."""
    rng = generator(0, "graph", position=count)
    z = torch.from_numpy(rng.standard_normal((count, latent), dtype="float32"))
    return (z, torch.from_numpy(rng.integers(classes, size=count))) if classes else (z,)


def _prove(graph: Graph, ran: Callable[..., Tensor], latent: int, classes: int, path: Path) -> None:
    for count in BATCHES:
        given = inputs(count, latent, classes)
        wanted, made = graph(*given), ran(*given)
        apart = float((wanted - made).abs().max()) if wanted.shape == made.shape else float("inf")
        if not apart <= TOLERANCE:
            raise Failed(f"{path}: {count} images are {apart:.2g} from the network's, more than {TOLERANCE:g}")


def _free(given: Sequence[Tensor]) -> dict[str, Any]:
    number = torch.export.Dim("number")
    return {name: {0: number} for name, _ in zip(("z", "label"), given)}


def _write_pt2(graph: Graph, given: tuple[Tensor, ...], path: Path, about: dict[str, Any]) -> None:
    program = torch.export.export(graph, given, dynamic_shapes=_free(given), strict=False)
    torch.export.save(program, path, extra_files={"about.json": json.dumps(about)})


def _pt2(path: Path) -> Callable[..., Tensor]:
    return torch.export.load(path).module()


def _write_onnx(graph: Graph, given: tuple[Tensor, ...], path: Path, about: dict[str, Any]) -> None:
    _need_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    names = ["z", "label"][: len(given)]
    program = torch.onnx.export(
        graph,
        given,
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["images"],
        dynamic_shapes=_free(given),
    )
    assert program is not None
    program.model.metadata_props["paragan"] = json.dumps(about)
    program.save(path, external_data=False)


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401  # pyright: ignore
        import onnxruntime  # noqa: F401  # pyright: ignore
        import onnxscript  # noqa: F401  # pyright: ignore
    except ImportError as error:
        raise Unusable(f"--format onnx needs {error.name}: pip install 'paragan[onnx]'") from error


def _onnx(path: Path) -> Callable[..., Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def ran(*given: Tensor) -> Tensor:
        (made,) = session.run(["images"], {name: x.numpy() for name, x in zip(names, given, strict=True)})
        return torch.from_numpy(made)

    return ran
