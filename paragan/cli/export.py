"""`paragan export` and `paragan import`: write models for other programs, read models of other libraries."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, add_decoder_option, add_nets_option, check_no_extra_arguments
from paragan.cli.sample import MODEL_HELP, load_model_from_options
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.models.model import Model

EXPORT_EXAMPLES = """examples:
  paragan export runs/00000-* --out folder                           weights, config.json, a model card, samples
  paragan export runs/00000-* --push user/name                       the same, to the Hugging Face hub
  paragan export runs/00000-* --format onnx --out g.onnx             images = g(z, label), any number of them
  paragan export runs/00000-* --format torch-export --out g.pt2      for torch.export.load
"""

IMPORT_HELP = """BigGAN of BigGAN-PyTorch; BigGAN, SNGAN, SAGAN and ContraGAN of StudioGAN. Resolution, widths, classes
and attention follow from the shapes. The result is a model like any other: sample, export, train --init-from.
"""

IMPORT_EXAMPLES = """examples:
  paragan import G_ema.pth --from biggan-pytorch --discriminator D.pth --out biggan128
  paragan import model=G_ema-best-weights-step=100000.pth --from studiogan --classes names.txt --out sagan
"""


# names of files, and what writes one instead of a folder
FILE_SUFFIXES = {".onnx": "--format onnx, or ", ".pt2": "--format torch-export, or "}
FILE_SUFFIXES |= dict.fromkeys((".safetensors", ".zip", ".pt", ".pth"), "")


def add_export_command(commands: Any) -> None:
    summary = "write a model for other programs: a folder, ONNX, torch.export, the Hugging Face hub"
    p = add_command(commands, "export", _export, summary, epilog=EXPORT_EXAMPLES)
    p.add_argument("run_dir", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--format", choices=["safetensors", "onnx", "torch-export"], default="safetensors")
    p.add_argument("--out", metavar="FOLDER|FILE", help="a new folder; for a graph a new file, .onnx or .pt2")
    p.add_argument("--push", metavar="USER/NAME", help="to the Hugging Face hub; log in with `hf auth login`")
    add_nets_option(p)
    add_decoder_option(p)
    p.set_defaults(data=None)


def _export(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    check_no_extra_arguments(rest)
    if bool(options.out) == bool(options.push):
        raise UsageError("export: has no target. Use either --out FOLDER|FILE or --push USER/NAME")
    if options.push and options.format != "safetensors":
        raise UsageError(f"--format {options.format}: --push writes safetensors. Leave --format out")
    model = load_model_from_options(options)
    sys.stdout.write(_push_to_hub(model, options.push) if options.push else _export_to_path(model, options))
    return 0


def _export_to_path(model: Model, options: argparse.Namespace) -> str:
    out = Path(options.out)
    if options.format == "safetensors":
        from paragan.models.export_folder import check_new_folder, write_model_folder

        if out.suffix in FILE_SUFFIXES:
            usable = FILE_SUFFIXES[out.suffix]
            raise UsageError(f"--out {out}: --format safetensors writes a folder. Use {usable}the name of a folder")
        check_new_folder(out)
        write_model_folder(model, out)
        generators = f" with {model.spec.classes} generators" if model.is_per_label else ""
        return f"model{generators} in {out}; paragan.load({str(out)!r}) reads it{_loading_hint(model)}\n"
    from paragan.models.export_graph import TOLERANCE, VERIFIED_BATCH_SIZES, export_graphs

    files = export_graphs(model, options.format, out)
    graphs = f"{len(files)} graphs" if len(files) > 1 else "graph"
    sizes = ", ".join(map(str, VERIFIED_BATCH_SIZES))
    return f"{graphs} in {out}: within {TOLERANCE:g} of the network for {sizes} images\n"


def _push_to_hub(model: Model, name: str) -> str:
    from paragan.models.hub import push_model

    return f"model at {push_model(model, name)}; paragan.load({name!r}) reads it{_loading_hint(model)}\n"


def _loading_hint(model: Model) -> str:
    from paragan.models.model_card import takes_latents

    return "" if takes_latents(model) else ", with dataset=... as its README.md says"


def add_import_command(commands: Any) -> None:
    summary = "convert a model of another library"
    p = add_command(commands, "import", _import, summary, details=IMPORT_HELP, epilog=IMPORT_EXAMPLES)
    p.add_argument("file", metavar="FILE", help="the generator's state dict: .pth, .safetensors")
    p.add_argument("--from", dest="library", required=True, choices=["biggan-pytorch", "studiogan"])
    p.add_argument("--out", required=True, metavar="FOLDER", help="a new folder for the model")
    p.add_argument(
        "--discriminator", metavar="FILE", help="its discriminator, needed to continue training with --init-from"
    )
    p.add_argument(
        "--nets",
        default="auto",
        choices=["auto", "biggan", "contragan", "sagan", "sngan"],
        help="the family, if the file does not tell: BigGAN or ContraGAN, SAGAN without attention or SNGAN",
    )
    p.add_argument("--classes", metavar="FILE", help="names of the classes, one per line (default: numbers)")
    p.add_argument("--bn-eps", type=float, metavar="X", help="of its batch norms (BigGAN-PyTorch 1e-5, StudioGAN 1e-4)")


def _import(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.models.import_weights import import_weights

    check_no_extra_arguments(rest)
    if options.bn_eps is not None and not 0 <= options.bn_eps <= 0.1:
        raise UsageError(f"--bn-eps {options.bn_eps}: out of range. Use 0 to 0.1; 1e-5 and 1e-4 are usual")
    model = import_weights(
        Path(options.file),
        options.library,
        Path(options.out),
        discriminator_file=Path(options.discriminator) if options.discriminator else None,
        family=options.nets,
        classes=_read_class_names(Path(options.classes)) if options.classes else [],
        eps=options.bn_eps,
    )
    num_parameters = sum(parameter.numel() for parameter in model.g.parameters())
    family = model.config["net"]["name"]
    spec = model.spec
    sys.stdout.write(
        f"{family}, {spec.resolution} px, {spec.classes} classes, {num_parameters / 1e6:.2f}M parameters in G"
        f"{', with its discriminator' if options.discriminator else ''}: {options.out}\n"
    )
    return 0


def _read_class_names(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--classes {path}: cannot be read: {error}") from error
