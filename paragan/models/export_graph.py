"""Export a generator as one file for other programs: ONNX, or torch.export's .pt2.

    images = graph(z, label)     # float32 [N, latent], int64 [N] (if conditional) -> float32 [N, C, H, W]

Images are in [-1, 1] and N is arbitrary. Spectral norm and batch-norm statistics become constants. Truncation is left
to the caller: draw values of z beyond 2 psi again. Every file is run with several N, and compared with the network,
before it gets its name.
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

from paragan.core.atomic_write import atomic_output, require_absent
from paragan.core.errors import RunError, UsageError
from paragan.core.philox import philox_generator
from paragan.core.types import primary_array
from paragan.models.model import Model
from paragan.models.sampler import PerLabelSampler, Sampler, has_styles

GraphFormat = Literal["onnx", "torch-export"]
SUFFIXES: dict[GraphFormat, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
VERIFIED_BATCH_SIZES = (1, 2, 5)  # batch sizes that a graph is compared with the network on
TOLERANCE = 1e-4  # of values in [-1, 1]


def export_graphs(model: Model, graph_format: GraphFormat, out: Path) -> list[Path]:
    """Write a graph to the new file `out`; for a per-label model, a graph for each label into the new folder `out`.

    Raises:
        RunError: a graph computes something other than the network.
    """
    if model.spec.image_shape:
        raise UsageError("export: makes latents, and a graph has no decoder. Use --format safetensors")
    suffix = SUFFIXES[graph_format]
    if isinstance(model.sampler, Sampler):
        if out.suffix != suffix:
            raise UsageError(f"--out {out}: a graph is one file. Use a name that ends in {suffix}")
        require_absent(out)
        _export(model.sampler, model.spec.classes, graph_format, out, _metadata(model))
        return [out]
    if out.suffix or (out.is_dir() and any(out.iterdir())):
        raise UsageError(f"--out {out}: this model has a generator for each label. Use a new folder")
    return [_export_label(model, model.sampler, label, graph_format, out) for label in range(model.spec.classes)]


def _export_label(
    model: Model, per_label_sampler: PerLabelSampler, label: int, graph_format: GraphFormat, out: Path
) -> Path:
    path = out / f"{label:04d}{SUFFIXES[graph_format]}"
    _export(
        per_label_sampler.for_label(label), 0, graph_format, path, _metadata(model) | {"label": model.classes[label]}
    )
    return path


def _metadata(model: Model) -> dict[str, Any]:
    outputs = "images float32 [N, C, H, W] in [-1, 1]; uint8 is round((x + 1) * 127.5), clipped to 0 ... 255"
    if model.spec.array_shape:
        outputs = f"images: float32 [N, {', '.join(map(str, model.spec.array_shape))}], as the data"
    return {
        "producer": "paragan",
        "inputs": "z float32 [N, latent], standard normal; label int64 [N], if there are classes",
        "outputs": outputs,
        "classes": list(model.classes),
    }


def _export(sampler: Sampler, classes: int, graph_format: GraphFormat, path: Path, metadata: dict[str, Any]) -> None:
    if not sampler.uses_latents:
        raise UsageError("export: this generator takes data, not latents, so it has no graph of its own")
    write, read = {"onnx": (_write_onnx, _load_onnx), "torch-export": (_write_pt2, _load_pt2)}[graph_format]
    graph = ExportedGenerator(frozen_copy(sampler.g), sampler.main_field)
    with atomic_output(path) as hidden, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # from torch's exporters
        file = hidden.with_name(hidden.name + SUFFIXES[graph_format])
        try:
            write(graph, example_inputs(3, sampler.latent_size, classes), file, metadata)
            _verify(graph, read(file), sampler.latent_size, classes, path)
            file.rename(hidden)
        finally:
            file.unlink(missing_ok=True)


class ExportedGenerator(nn.Module):
    """The exported module: it takes and returns tensors only. The noise of a generator with styles is fixed.

    main_field : the field of G's output that D judges, if G returns a NamedTuple
    """

    def __init__(self, g: nn.Module, main_field: str = "images"):
        super().__init__()
        self.g = g
        self.main_field = main_field

    def forward(self, z: Tensor, label: Tensor | None = None) -> Tensor:
        g: Any = self.g
        if has_styles(g):
            return g.from_styles(g.styles(z, label))
        return primary_array(g(z, label), self.main_field)


def frozen_copy(g: nn.Module) -> nn.Module:
    """Copy a network in eval mode on the CPU, with spectral norm applied to the weights."""
    net = copy.deepcopy(g).cpu().float().eval().requires_grad_(False)
    for module in list(net.modules()):
        if parametrize.is_parametrized(module):
            _remove_parametrizations(module)
    return net


def _remove_parametrizations(module: nn.Module) -> None:
    """Replace parametrized weights by their values.

    torch's own function would change the class, which the copy shares with the original.
    """
    weights = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # pyright: ignore
    module.__class__ = type(module).__bases__[0]
    del module._modules["parametrizations"]
    for name, value in weights.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def example_inputs(batch_size: int, latent: int, classes: int) -> tuple[Tensor, ...]:
    """Draw z [N, latent], and labels [N] if there are classes. They depend on the batch size only."""
    rng = philox_generator(0, "graph", position=batch_size)
    z = torch.from_numpy(rng.standard_normal((batch_size, latent), dtype="float32"))
    return (z, torch.from_numpy(rng.integers(classes, size=batch_size))) if classes else (z,)


def _verify(
    graph: ExportedGenerator, run_exported: Callable[..., Tensor], latent: int, classes: int, path: Path
) -> None:
    for count in VERIFIED_BATCH_SIZES:
        inputs = example_inputs(count, latent, classes)
        expected = graph(*inputs)
        actual = run_exported(*inputs)
        error = float((expected - actual).abs().max()) if expected.shape == actual.shape else float("inf")
        if not error <= TOLERANCE:
            raise RunError(f"{path}: {count} images differ by {error:.2g} from the network's, more than {TOLERANCE:g}")


def _dynamic_shapes(inputs: Sequence[Tensor]) -> dict[str, Any]:
    number = torch.export.Dim("number")
    return {name: {0: number} for name, _ in zip(("z", "label"), inputs)}


def _write_pt2(graph: ExportedGenerator, inputs: tuple[Tensor, ...], path: Path, metadata: dict[str, Any]) -> None:
    program = torch.export.export(graph, inputs, dynamic_shapes=_dynamic_shapes(inputs), strict=False)
    torch.export.save(program, path, extra_files={"metadata.json": json.dumps(metadata)})


def _load_pt2(path: Path) -> Callable[..., Tensor]:
    return torch.export.load(path).module()


def _write_onnx(graph: ExportedGenerator, inputs: tuple[Tensor, ...], path: Path, metadata: dict[str, Any]) -> None:
    _require_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    names = ["z", "label"][: len(inputs)]
    program = torch.onnx.export(
        graph,
        inputs,
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["images"],
        dynamic_shapes=_dynamic_shapes(inputs),
    )
    assert program is not None
    program.model.metadata_props["paragan"] = json.dumps(metadata)
    program.save(path, external_data=False)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401  # pyright: ignore
        import onnxruntime  # noqa: F401  # pyright: ignore
        import onnxscript  # noqa: F401  # pyright: ignore
    except ImportError as error:
        raise UsageError(f"--format onnx needs {error.name}: pip install onnx onnxruntime onnxscript") from error


def _load_onnx(path: Path) -> Callable[..., Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run_session(*inputs: Tensor) -> Tensor:
        (images,) = session.run(["images"], {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        return torch.from_numpy(images)

    return run_session
