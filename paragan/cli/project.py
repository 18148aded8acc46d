"""`paragan project`: the styles of an image, for a model with styles."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from paragan.cli.common import add_command, add_nets_option, check_no_extra_arguments, check_seed
from paragan.cli.sample import MODEL_HELP, load_model_from_options
from paragan.core.errors import UsageError

EXAMPLES = """examples:
  paragan project runs/00000-* photo.png --out projection           target.png, projection.png, styles.npz
  paragan project runs/00000-* cat.png --label cat --steps 1000 --out projection
"""
PROGRESS_STEPS = 100  # between two lines


def add_project_command(commands: Any) -> None:
    p = add_command(commands, "project", _project, "find the styles of an image (StyleGAN2)", epilog=EXAMPLES)
    p.add_argument("run_dir", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("image", metavar="IMAGE", help="a picture of the size of the model's")
    p.add_argument("--out", required=True, metavar="FOLDER", help="new or empty")
    p.add_argument("--steps", type=int, default=500, metavar="N", help="of gradient descent (500)")
    p.add_argument("--label", metavar="3", help="index or name of its class (default: all classes)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise on styles (0)")
    add_nets_option(p)
    p.set_defaults(data=None, decoder="")


def _project(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    check_no_extra_arguments(rest)
    check_seed(options.seed)
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: must be positive. Use 1 or more")
    folder = Path(options.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: exists and is not an empty folder. Use another name")
    import numpy as np
    from PIL import Image

    from paragan.models.style_space import project

    model = load_model_from_options(options)
    target = _read_image(Path(options.image), model.spec.sample_spec.channels)

    def report(step: int, distance: float) -> None:
        if (step + 1) % PROGRESS_STEPS == 0 or step + 1 == options.steps:
            sys.stdout.write(f"step {step + 1} of {options.steps}: distance {distance:.4g}\n")
            sys.stdout.flush()

    projection = project(model, target, options.steps, options.seed, options.label, report)
    folder.mkdir(parents=True, exist_ok=True)
    for name, pixels in (("target", target), ("projection", projection.image)):
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(folder / f"{name}.png")
    np.savez(folder / "styles.npz", styles=projection.styles)
    sys.stdout.write(f"{projection.psnr_db:.2f} dB; target.png, projection.png and styles.npz in {folder}\n")
    return 0


def _read_image(path: Path, channels: int) -> Any:
    """Read a picture, uint8 [H, W, C]. Raises `UsageError` if it cannot be read, or the model's images are none."""
    import numpy as np

    from paragan.data.decode import DecodeError, decode_image

    if channels not in (1, 3):
        raise UsageError(f"project: the model makes images of {channels} channels. Use a model of 1 or 3 channels")
    try:
        image = decode_image(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a picture ({error}). Use a PNG or JPEG") from error
    return np.array(image.convert("L" if channels == 1 else "RGB")).reshape(image.height, image.width, channels)
