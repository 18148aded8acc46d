"""`paragan sample` and `paragan serve`: samples of a trained model as files, as a video, or on a web page."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import (
    add_command,
    add_decoder_option,
    add_nets_option,
    check_no_extra_arguments,
    check_seed,
    check_truncation,
    local_folder,
)
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.models.model import Model
    from paragan.nets import Spec

MODEL_HELP = "a run folder, a model folder, RUN_DIR/best, s3://bucket/run, or user/name on the Hugging Face hub"

EXAMPLES = """examples:
  paragan sample runs/00000-* --labels 3,7 --out grid.png            or samples.npz, or a folder
  paragan sample runs/00001-* --out reconstructions                  of a vocoder: WAV files, from the data of the run
  paragan sample runs/00000-* --video walk.mp4 --seconds 8           through the latent space and back; .gif, .webp
  paragan sample runs/00000-* --mix 4x6 --out mixed.png              StyleGAN2: rows and columns share styles
  paragan sample user/name --truncation 0.7 --out grid.png           a model of the Hugging Face hub
"""


def add_sample_command(commands: Any) -> None:
    p = add_command(commands, "sample", _sample, "generate images with a trained model", epilog=EXAMPLES)
    p.add_argument("run_dir", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--count", type=int, default=64, metavar="N", help="number of samples (64)")
    p.add_argument(
        "--labels", metavar="3,7", help="indices or names of classes, used in turn (default: as often as in the data)"
    )
    p.add_argument("--truncation", type=float, default=1.0, metavar="PSI", help="below 1: less variety (1)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the latents (0)")
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", metavar="FILE|FOLDER", help="grid.png, samples.npz or a folder, of WAV files if samples are waves"
    )
    where.add_argument("--video", metavar="FILE", help="a walk through samples in a loop: .mp4, .gif, .webp")
    p.add_argument("--mix", metavar="ROWSxCOLUMNS", help="a grid of mixed styles (StyleGAN2), in place of --count")
    p.add_argument("--mix-from", type=int, default=0, metavar="LAYER", help="the first layer of the column (half)")
    p.add_argument("--seconds", type=float, default=8.0, metavar="S", help="length of the video (8)")
    p.add_argument("--fps", type=float, default=30.0, metavar="F", help="frames per second of the video (30)")
    p.add_argument("--stops", type=int, default=8, metavar="N", help="samples that the video passes through (8)")
    add_nets_option(p)
    add_decoder_option(p)
    p.add_argument("--data", metavar="PATH", help="input data of G, if it takes data (default: those of the run)")


def _sample(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    check_no_extra_arguments(rest)
    if options.count < 1:
        raise UsageError(f"--count {options.count}: must be positive. Use 1 or more")
    check_truncation(options.truncation)
    check_seed(options.seed)
    if options.video:
        return _save_video(options)
    model = load_model_from_options(options)
    if options.mix:
        return _save_mixed_styles(options, model)
    min_side = 64 if Path(options.out).suffix.lower() == ".png" else 0
    spec = model.spec.sample_spec
    _check_memory(f"--count {options.count}", options.count, spec, min_side, "samples; another --seed makes more")
    labels = model.labels(options.count, _split_labels(options), options.seed)
    samples = model.sampler.images(range(options.count), labels, options.seed, options.truncation)
    _save_samples(options, model, samples, labels)
    kind = "images"
    if model.spec.array_shape:
        kind = f"waves, {model.spec.sample_rate} Hz," if model.spec.sample_rate else "records"
    sys.stdout.write(f"{options.count} {kind} in {options.out}\n{_describe_visible_channels(model, options.out)}")
    return 0


def _save_mixed_styles(options: argparse.Namespace, model: Model) -> int:
    from paragan.core.image_grid import integer_upscale, make_grid
    from paragan.models.style_space import mix_styles, style_sampler

    sides = [int(side) for side in options.mix.split("x") if side.isdecimal()]
    if len(sides) != 2 or not all(1 <= side <= 64 for side in sides):
        raise UsageError(f"--mix {options.mix}: is no size of a grid. Use 4x6, each 1 to 64")
    if Path(options.out).suffix.lower() != ".png":
        raise UsageError(f"--out {options.out}: mixed styles are a picture. Use mixed.png")
    if options.labels:
        raise UsageError("--labels: mixed styles are of classes as often as in the data. Leave it out")
    g: Any = style_sampler(model, "--mix").g
    _check_memory(f"--mix {options.mix}", (sides[0] + 1) * (sides[1] + 1), model.spec.sample_spec, 64, "images")
    from_layer = options.mix_from or g.num_styles // 2
    images = mix_styles(model, sides[0], sides[1], from_layer, options.seed, options.truncation)
    make_grid(images, sides[1] + 1, integer_upscale(images)).save(options.out)
    size = f"{sides[0]} x {sides[1]}"
    sys.stdout.write(f"{size} images in {options.out}: styles of the column from layer {from_layer} on\n")
    return 0


def _describe_visible_channels(model: Model, out: str) -> str:
    """Return a line if a picture shows a part of the channels of its images; else nothing."""
    channels = model.spec.sample_spec.channels
    if channels in (0, 1, 3) or Path(out).suffix.lower() in ("", ".npz"):
        return ""
    visible = "three" if channels > 3 else "one"
    return f"it shows the first {visible} of {channels} channels; --out samples.npz has all\n"


def _check_memory(option: str, count: int, spec: Spec, min_side: int, hint: str) -> None:
    """Check that `count` samples fit into memory, where up to four copies exist at once.

    min_side: smaller images are enlarged to at least this many pixels.
    """
    from paragan.data.decode import ram_bytes

    scale = 1 if spec.array_shape else max(1, min_side // spec.size.short_side)
    sample_bytes = math.prod(spec.shape) * scale**2 * (4 if spec.array_shape else 1)
    max_count = ram_bytes() // (4 * sample_bytes)
    if count > max_count:
        raise UsageError(f"{option}: more than the memory of this machine holds. Use at most {max_count} {hint}")


def _save_samples(options: argparse.Namespace, model: Model, samples: Any, labels: Any) -> None:
    from paragan.core.image_grid import save_arrays, save_images

    if model.spec.array_shape:
        x = samples.numpy()
        rate = model.spec.sample_rate
        save_arrays(x, labels, Path(options.out), lambda: _plot_records(options, x), model.classes, rate)
    else:
        save_images(samples.permute(0, 2, 3, 1).numpy(), labels, Path(options.out), model.classes)


def _save_video(options: argparse.Namespace) -> int:
    from paragan.models.latent_walk import walk
    from paragan.models.video import MIN_SIDE_PIXELS, check_video_options, write_video

    if not 0 < options.seconds <= 3600 or not 1 <= options.fps <= 120 or options.stops < 2:
        raise UsageError(
            "--seconds, --fps, --stops: out of range. Use --seconds above 0 and at most 3600, --fps from 1 to 120, "
            "--stops 2 or more"
        )
    check_video_options(Path(options.video), options.fps)
    num_frames = max(2, int(options.seconds * options.fps))
    if options.stops > num_frames:
        raise UsageError(
            f"--stops {options.stops}: more than the frames of the video. Use 2 to {num_frames} (--seconds x --fps)"
        )
    model = load_model_from_options(options)
    product = f"--seconds {options.seconds:g} x --fps {options.fps:g}"
    _check_memory(product, num_frames, model.spec.sample_spec, MIN_SIDE_PIXELS, "frames")
    frames_per_stop = max(1, round(options.seconds * options.fps / options.stops))
    frames = walk(model, options.stops, frames_per_stop, options.seed, _split_labels(options), options.truncation)
    write_video(frames, Path(options.video), options.fps)
    sys.stdout.write(f"{len(frames)} frames in {options.video}\n{_describe_visible_channels(model, options.video)}")
    return 0


def _split_labels(options: argparse.Namespace) -> list[str] | None:
    return options.labels.split(",") if options.labels else None


def load_model_from_options(options: argparse.Namespace) -> Model:
    """Load the model that a command names (options `run_dir`, `nets`, `data`, `decoder`)."""
    from paragan.models.load import load

    options.run_dir = local_folder(options.run_dir)
    dataset = load_conditioning_data(options, Path(options.run_dir))
    return load(options.run_dir, nets=options.nets, dataset=dataset, decoder=options.decoder)


def load_conditioning_data(options: argparse.Namespace, path: Path) -> Any:
    """Load the data that networks may take as input: those of --data, or of the run. None if there is no need.

    Args:
        options: of a command; --nets names user-defined networks.
        path: the model: a run folder, or a folder in it, or a file in that.
    """
    from paragan.config.resolve import load_dataset
    from paragan.config.user_code import conditioning_input_of
    from paragan.train.saved_run import data_options_of_model, load_builtin_nets, load_run_without_user_code

    model_dir = path.parent if path.is_file() else path
    run_dir = next((folder for folder in (model_dir, model_dir.parent) if (folder / "run.yaml").exists()), None)
    if not options.data and not (run_dir and (options.nets or conditioning_input_of(load_builtin_nets(run_dir)))):
        return None
    data = load_run_without_user_code(run_dir).data if run_dir else data_options_of_model(model_dir)
    decoder = options.decoder or data.decoder
    return load_dataset(dataclasses.replace(data, path=options.data or data.path, decoder=decoder))


def _plot_records(options: argparse.Namespace, records: Any) -> Any:
    """Plot records of numbers, with the plot of user-defined networks if they have one."""
    from paragan.config.user_code import load_user_nets
    from paragan.core.array_plots import plot_arrays
    from paragan.train.callbacks.sample_images import render_samples

    dataset = load_conditioning_data(options, Path(options.run_dir))
    if dataset is None:
        return plot_arrays(records, records)
    return render_samples(load_user_nets(options.nets) if options.nets else None, records, dataset)


# serve ------------------------------------------------------------------------------------------------


def add_serve_command(commands: Any) -> None:
    p = add_command(commands, "serve", _serve, "serve a web page to sample from a model and interpolate")
    p.add_argument("run_dir", metavar="MODEL", help=MODEL_HELP)
    p.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on; 0.0.0.0: all interfaces (127.0.0.1)"
    )
    p.add_argument("--port", type=int, default=7860, metavar="N", help="0: any free port (7860)")
    add_nets_option(p)
    add_decoder_option(p)
    p.set_defaults(data=None)


def _serve(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.web_server import check_port
    from paragan.models.server import serve

    check_no_extra_arguments(rest)
    check_port(options.port)
    serve(load_model_from_options(options), options.host, options.port, sys.stdout)
    return 0
