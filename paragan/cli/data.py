"""`paragan data`: inspect data sets, convert them to other formats, compute their statistics."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import (
    add_command,
    add_label_options,
    check_no_extra_arguments,
    name_label_options,
    parse_size,
    progress_bar,
    select_device,
)
from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.data.source import LabelChoice, Source
    from paragan.data.tools.convert import ConvertResult

ACCEPTED_PATHS = """is anything that `paragan train --data` accepts: `digits`, a folder of images, a folder with one
folder for each class, an .npz, a .zip, an .h5, tar shards, an address."""

RANGE_HELP = "stored values that become black and white: auto, full or MIN:MAX (auto)"

EXAMPLES = """examples:
  paragan data inspect photos/ --sheet photos.png           report contents, problems, and what training would use
  paragan data convert photos/ photos.zip                   the same files in a zip, also for StyleGAN and EDM
  paragan data convert photos/ photos64.npz --resolution 64   squares of 64 x 64, uint8 [N, 64, 64, C]
  paragan data shard photos/ shards/ --shuffle 0            tar shards in random order, to be read over a network
  paragan data index shards/                                build the index of tar shards, so that they open fast
  paragan data stats photos/ --out stats.npz --resolution 32       mu and sigma, for Frechet distances
  paragan data encode photos/ latents.npz --encoder runs/00000-*   latents of a tokenizer, to train on
"""

INSPECT = f"""Every image is read and decoded once. The exit status is 2 if no image can be decoded, and if training
would not accept the data (images outside of the class folders, a class without images); in the second case the report
is printed as well.

The report lists: formats, colours and sizes; images rotated by EXIF, images with transparency; exact copies (equal
pixels, in whatever encoding), and copies in several classes; almost constant images; images that cannot be decoded, and
why; of images with more than 8 bits the range of values that was found, and what was done; what training would use.

PATH {ACCEPTED_PATHS}
"""

INSPECT_EXAMPLES = """examples:
  paragan data inspect digits
  paragan data inspect photos/ --sheet photos.png           also draw a row of images for each class
  paragan data inspect photos/ --json photos.json           also write all results, with names of bad files and copies
  paragan data inspect scans/ --range=0:4095                map these stored values to black and white
  paragan data inspect photos/ --resolution 128             report what training at 128 x 128 would use
  paragan data inspect photos/ --resolution 256x128         at 256 wide, 128 high
"""

CONVERT = f"""Order and labels are kept (a folder stores its images class by class).

The name of TO decides the format:
  photos             a folder with one folder for each class (without labels: a folder of images)
  photos.npz         images uint8 [N, H, W, C], labels, classes
  photos.zip         for StyleGAN and EDM: 00000/img00000000.png, dataset.json; also classes.json
  photos.h5          for BigGAN: imgs uint8 [N, C, H, W], labels
  photos --to tars   tar shards; see `paragan data shard`

Files are copied byte for byte, unless --resolution, --channels or --format change them; those with more than 8 bits
also with --range=MIN:MAX or full, which writes them as 8-bit PNG. An .npz or .h5 has images of one size: their own if
they share one, else the resolution that training would use. Every image is decoded on the way.
If one cannot be decoded, nothing is written; with --skip-bad it is left out and listed in TO.bad.txt. TO appears
complete or not at all.

FROM {ACCEPTED_PATHS}
"""

CONVERT_EXAMPLES = """examples:
  paragan data convert photos/ photos.zip
  paragan data convert photos/ photos64.zip --resolution 64             the largest centred square, Lanczos, PNG
  paragan data convert photos/ small/ --resolution 256 --format jpg --quality 90
  paragan data convert photos.zip photos.h5 --resolution 128 --skip-bad
  paragan data convert photos/ wide.zip --resolution 256x128            the largest centred part of that shape
  paragan data convert icons/ icons.npz --channels 4                    with transparency, uint8 [N, H, W, 4]
  paragan data convert digits digits/ --no-labels
"""

SHARD = f"""Each image becomes KEY.jpg (or .png, ...) and, with labels, KEY.cls in shard-000000.tar, ...; classes.json
has the names of the classes. Equal data sets become equal shards. The index of the shards is written too.

FROM {ACCEPTED_PATHS}
"""

SHARD_EXAMPLES = """examples:
  paragan data shard photos/ shards/
  paragan data shard photos/ shards/ --shuffle 0 --shard-mb 256         for readers that read in order
  paragan data shard photos/ shards/ --resolution 256 --format jpg      smaller, to be sent over a network
"""

INDEX = """Every shard is read once. The index is written to paragan-index.npz in the folder of the shards; it is small
and is downloaded first. Opening a local folder of shards builds a missing or outdated index as well. Build the index of
shards that are served over a network on the server, so that clients do not have to read whole shards.
"""

INDEX_EXAMPLES = """examples:
  paragan data index shards/
  paragan data index 'shards/train-{0000..0099}.tar'
  paragan data index https://host/shards/shard-{000000..000012}.tar --out paragan-index.npz
"""

STATS = f"""The file holds mu [F] and sigma [F, F] float64 (divided by N - 1) under the usual names, and count, space,
space_hash, resizer and image [C, H, W], which say how they were computed.

PATH {ACCEPTED_PATHS}
"""

STATS_EXAMPLES = """examples:
  paragan data stats photos/ --out stats.npz --resolution 32                        of pixels
  paragan data stats photos/ --out stats.npz --features inception --inception pt_inception.pth
  paragan data stats photos/ --out stats.npz --count 10000                          of 10,000 images, evenly spaced
"""

ENCODE = f"""TO holds x float32 [N, c, h, w], with mean 0 and standard deviation 1 in each channel, and labels and
classes. It records that normalisation, the autoencoder and its fingerprint, and where the images are: samples of a run
on TO are decoded, and scores compare them with the images.

The autoencoder is a run or model folder of `paragan train tokenizer`, which also says the size of images, or
module:Class, an nn.Module with to_latents(images [N, C, H, W] in [-1, 1]) and from_latents(latents).

FROM {ACCEPTED_PATHS}
"""

ENCODE_EXAMPLES = """examples:
  paragan data encode photos/ latents.npz --encoder runs/00000-*
  paragan data encode photos/ latents.npz --encoder mine:Autoencoder --resolution 256
  paragan train custom --data latents.npz --nets=gat
"""


def add_data_command(commands: Any) -> None:
    """Add `data` and its subcommands to the parser."""
    group = commands.add_parser(
        "data",
        help="inspect a data set, convert it to another format, compute its statistics",
        description=f"Inspect data sets, convert them, compute their statistics.\n\nPATH {ACCEPTED_PATHS}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_inspect_command,
        _add_convert_command,
        _add_shard_command,
        _add_index_command,
        _add_stats_command,
        _add_encode_command,
    ):
        add(commands)


def _add_subcommand(
    commands: Any, name: str, action: Any, summary: str, details: str, examples: str
) -> argparse.ArgumentParser:
    return add_command(commands, name, action, summary, details=f"\n\n{details}", epilog=examples)


def _add_range_option(p: argparse.ArgumentParser) -> None:
    """Add --range, which errors call --data.range as in other commands."""
    p.add_argument("--range", "--data.range", default="auto", metavar="MIN:MAX", help=RANGE_HELP)


# inspect ----------------------------------------------------------------------------------------------


def _add_inspect_command(commands: Any) -> None:
    p = _add_subcommand(
        commands, "inspect", _inspect, "report the contents and problems of a data set", INSPECT, INSPECT_EXAMPLES
    )
    p.add_argument("path", metavar="PATH")
    _add_decoding_options(p, "of training (default: as in training)")
    _add_range_option(p)
    p.add_argument("--sheet", metavar="FILE.png", help="also draw a few images of each class")
    p.add_argument("--json", metavar="FILE", help="also write all results, with names of images")
    add_label_options(p, "whether to read labels (yes)")


def _inspect(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.atomic_write import atomic_output
    from paragan.core.image_shape import check_channels
    from paragan.data.formats.record_source import RecordSource
    from paragan.data.source import MalformedDataset
    from paragan.data.tools.inspect_dataset import inspect_dataset
    from paragan.data.tools.inspect_records import inspect_records

    check_no_extra_arguments(rest)
    parse_size(options.resolution)
    check_channels("--channels", options.channels)
    if options.sheet and Path(options.sheet).suffix.lower() != ".png":
        raise UsageError(f"--sheet={options.sheet}: the name must end in .png. Use one such as sheet.png.")
    malformed: MalformedDataset | None = None
    try:
        source = _open_images(options, labels=options.labels and (options.label_key or True), accept_records=True)
    except MalformedDataset as error:
        malformed = error
        source = error.source
    if isinstance(source, RecordSource):
        if options.sheet or options.json:
            raise UsageError(
                "--sheet, --json: are for images, and the data are records of several arrays. Leave them out"
            )
        _print_lines(inspect_records(source))
        return 0
    with progress_bar("images inspected") as show_progress:
        report = inspect_dataset(
            source,
            resolution=options.resolution,
            channels=options.channels,
            value_range=options.range,
            progress=show_progress,
        )
    _print_lines(report.to_lines())
    if options.json:
        with atomic_output(Path(options.json)) as path:
            path.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if options.sheet:
        from paragan.data.tools.contact_sheet import make_contact_sheet

        with atomic_output(Path(options.sheet)) as path:
            make_contact_sheet(report).save(path, format="PNG")
    if malformed:
        raise UsageError(f"training would not accept it: {malformed}")
    return 0


# convert, shard ---------------------------------------------------------------------------------------


def _add_convert_command(commands: Any) -> None:
    p = _add_subcommand(commands, "convert", _convert, "write a data set in another format", CONVERT, CONVERT_EXAMPLES)
    p.add_argument("path", metavar="FROM")
    p.add_argument("out", metavar="TO", help="must not exist")
    p.add_argument(
        "--to", choices=["folder", "npz", "zip", "h5", "tars"], help="the format (default: by the name of TO)"
    )
    _add_output_options(p)


def _add_shard_command(commands: Any) -> None:
    p = _add_subcommand(commands, "shard", _convert, "write a data set as WebDataset shards", SHARD, SHARD_EXAMPLES)
    p.set_defaults(to="tars")
    p.add_argument("path", metavar="FROM")
    p.add_argument("out", metavar="TO_FOLDER", help="must not exist")
    _add_output_options(p)


def _add_output_options(p: argparse.ArgumentParser) -> None:
    _add_decoding_options(p, "crop to the largest centred part of this shape, resize with Lanczos")
    _add_range_option(p)
    p.add_argument("--format", choices=["png", "jpg"], help="of files (default: unchanged; png if it is not a file)")
    p.add_argument("--quality", type=int, default=95, metavar="Q", help="of jpg, 1 to 100 (95)")
    add_label_options(p, "whether to write labels (yes)")
    p.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be decoded; see TO.bad.txt")
    p.add_argument("--shuffle", type=int, metavar="SEED", help="write in a random order")
    p.add_argument("--shard-mb", type=float, default=64.0, metavar="MB", help="maximum size of a tar shard (64)")


def _convert(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.atomic_write import require_absent
    from paragan.data.tools.convert import ConvertOptions, convert
    from paragan.data.tools.writers import choose_format
    from paragan.train.shutdown import exit_on_signal

    check_no_extra_arguments(rest)
    out = Path(options.out)
    if not 0.001 <= options.shard_mb <= 1e6:
        raise UsageError(f"--shard-mb={options.shard_mb:g}: out of range. Use 0.001 to 1e6, such as 64.")
    convert_options = ConvertOptions(
        resolution=options.resolution,
        channels=options.channels,
        encoding=options.format,
        quality=options.quality,
        labels=options.labels,
        skip_bad=options.skip_bad,
        shuffle=options.shuffle,
        range=options.range,
    )
    output_format = choose_format(out, options.to, options.shard_mb)
    if output_format.stores_pixels and options.format:
        raise UsageError(
            f"--format={options.format}: an .{output_format.name} stores pixels, not files. Leave --format out."
        )
    require_absent(out)
    finalize = _reindex_folder if output_format.name == "tars" else None
    with exit_on_signal(), progress_bar("images written") as show_progress:
        source = _open_images(options, labels=options.labels and (options.label_key or True))
        result = convert(source, out, output_format, convert_options, progress=show_progress, finalize=finalize)
        _print_lines(_describe_result(result, out))
    return 0


def _describe_result(result: ConvertResult, out: Path) -> list[str]:
    from paragan.core.image_shape import ImageSize
    from paragan.data.dataset import describe_channels

    summary = f"{result.count:,} images in {out}"
    if result.shape:
        height, width, channels = result.shape
        summary += f", each {ImageSize(width, height)}, {describe_channels(channels)}"
    lines = [summary, *result.notes]
    num_bad = len(result.bad_samples.reasons)
    if num_bad:
        lines.append(f"{num_bad:,} cannot be decoded and were left out: {out}.bad.txt lists them")
    return lines


# index ------------------------------------------------------------------------------------------------


def _add_index_command(commands: Any) -> None:
    p = _add_subcommand(commands, "index", _index, "build the index of tar shards", INDEX, INDEX_EXAMPLES)
    p.add_argument("path", metavar="PATH_OR_ADDRESS", help="a folder of tars, or a pattern such as shards/shard-*.tar")
    p.add_argument(
        "--out", metavar="FILE", help="file to write (default: paragan-index.npz in the folder of the shards)"
    )


def _index(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.tools.reindex import reindex

    check_no_extra_arguments(rest)
    out = Path(options.out) if options.out else None
    index, path = reindex(options.path, out, _print_to_stderr)
    _print_lines([f"{len(index):,} images in {len(index.shards):,} shards: {path}"])
    return 0


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _reindex_folder(folder: Path) -> None:
    from paragan.data.tools.reindex import reindex

    reindex(str(folder))


# stats ------------------------------------------------------------------------------------------------


def _add_stats_command(commands: Any) -> None:
    p = _add_subcommand(
        commands, "stats", _stats, "write the mean and covariance for Frechet distances", STATS, STATS_EXAMPLES
    )
    p.add_argument("path", metavar="PATH")
    p.add_argument("--out", required=True, metavar="FILE.npz", help="file to write")
    p.add_argument("--features", default="pixels", metavar="SPACE", help="pixels or inception (pixels)")
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    _add_decoding_options(p, "of the images (default: as in training)")
    _add_range_option(p)
    p.add_argument("--count", type=int, metavar="N", help="use N images, evenly spaced (all)")


def _stats(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.dataset import load_data
    from paragan.train.write_reference import compute_reference, save_reference

    check_no_extra_arguments(rest)
    size = parse_size(options.resolution)
    out = Path(options.out)
    if out.suffix != ".npz":
        raise UsageError(f"--out={out}: the name must end in .npz. Use one such as stats.npz.")
    dataset = load_data(
        options.path,
        resolution=size.resolution if size else None,
        channels=options.channels,
        labels=False,
        cache="stream",
        max_pixels=options.max_pixels,
        value_range=options.range,
    )
    with progress_bar("images measured") as show_progress:
        stats = compute_reference(dataset, options.features, options.inception, options.count, show_progress)
    save_reference(stats, out)
    num_features = stats.space.num_features
    lines = [f"mu [{num_features}] and sigma of {stats.count:,} images, {stats.space.name}, in {out}"]
    num_bad = len(dataset.bad_samples.reasons) if dataset.bad_samples else 0
    if num_bad:
        lines.append(f"{num_bad:,} cannot be decoded and were replaced by others")
    if stats.count <= num_features:
        lines.append(f"fewer images ({stats.count:,}) than features ({num_features:,}): distances are biased upwards")
    _print_lines(lines)
    return 0


# encode -----------------------------------------------------------------------------------------------


def _add_encode_command(commands: Any) -> None:
    p = _add_subcommand(
        commands, "encode", _encode, "write the latents of images in a frozen autoencoder", ENCODE, ENCODE_EXAMPLES
    )
    p.add_argument("path", metavar="FROM")
    p.add_argument("out", metavar="TO.npz", help="must not exist")
    p.add_argument("--encoder", required=True, metavar="MODEL|MODULE:CLASS", help="the autoencoder")
    _add_decoding_options(p, "of the images (default: that of the autoencoder, or as in training)")
    _add_range_option(p)
    add_label_options(p, "whether to write labels (yes)")
    p.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, xpu or mps (default: a GPU if there is one)")


def _encode(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.atomic_write import require_absent
    from paragan.models.autoencoder import load_autoencoder
    from paragan.models.encode_dataset import encode_dataset
    from paragan.train.shutdown import exit_on_signal

    check_no_extra_arguments(rest)
    size = parse_size(options.resolution)
    out = Path(options.out)
    if out.suffix != ".npz":
        raise UsageError(f"{out}: latents are written as .npz. Use a name such as latents.npz")
    require_absent(out)
    device = select_device(options.device, "auto")
    autoencoder = load_autoencoder(options.encoder, "--encoder")
    with exit_on_signal(), progress_bar("images encoded") as show_progress, name_label_options():
        lines = encode_dataset(
            out,
            autoencoder,
            options.path,
            resolution=size.resolution if size else None,
            channels=options.channels,
            labels=options.labels and (options.label_key or True),
            value_range=options.range,
            max_pixels=options.max_pixels,
            device=device,
            show_progress=show_progress,
        )
    _print_lines(lines)
    return 0


# shared -----------------------------------------------------------------------------------------------


def _add_decoding_options(p: argparse.ArgumentParser, use: str) -> None:
    p.add_argument(
        "--resolution", metavar="R|WxH", help=f"one number for squares, or WIDTHxHEIGHT, such as 256x128: {use}"
    )
    p.add_argument(
        "--channels", type=int, metavar="C", help="1 grey, 3 RGB, 4 RGB and alpha, or those of an .npz, .npy or .h5"
    )
    p.add_argument("--max-pixels", type=int, metavar="N", help="decode larger images than 89,478,485 pixels")


def _open_images(options: argparse.Namespace, labels: LabelChoice = True, accept_records: bool = False) -> Source:
    """Open the data set that a command names (options `path`, `channels`, `max_pixels`); it must hold images.

    accept_records: it may also hold records of several arrays.
    """
    from paragan.data.decode import allow_pixels
    from paragan.data.formats.record_source import RecordSource
    from paragan.data.open_source import open_checked_source

    allow_pixels(options.max_pixels)
    with name_label_options():
        source = open_checked_source(options.path, labels=labels, channels=options.channels)
    if source.array is not None and source.array.dtype != "uint8":
        raise UsageError(
            f"data: {source.location} holds numbers {list(source.array.shape)}, and `paragan data` is for images"
        )
    if isinstance(source, RecordSource) and not accept_records:
        raise UsageError(
            f"data: {source.location} holds records of several arrays, and `paragan data` converts images only"
        )
    return source


def _print_lines(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
