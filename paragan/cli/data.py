"""`paragan data ...`: look at sets of images, write them in other formats, measure them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.cli.common import add_command, check_no_extra_arguments
from paragan.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from paragan.data.source import Source
    from paragan.data.tools.convert import ConvertResult
    from paragan.data.tools.parallel_map import ProgressFn

ACCEPTED_PATHS = """is whatever `paragan train --data` takes: `digits`, a folder of images or of a folder each class,
an .npz, a .zip, an .h5, tar shards, an address."""

EXAMPLES = """examples:
  paragan data inspect photos/ --sheet photos.png           what is there, what is wrong, what training would use
  paragan data convert photos/ photos.zip                   every file as it is, for StyleGAN and EDM too
  paragan data convert photos/ photos64.npz --resolution 64   squares of 64 x 64, uint8 [N, 64, 64, C]
  paragan data shard photos/ shards/ --shuffle 0            tar shards to be read over a network, in random order
  paragan data index shards/                                list what is in tar shards, so that opening them is quick
  paragan data stats photos/ --out stats.npz --resolution 32       mu and sigma, for Frechet distances
"""

INSPECT = f"""Every image is read and decoded once. Status 2 where none can be, and where training would refuse what is
there (images beside the folders of classes, a class without any): it is described all the same.

It says: formats, colours and sizes; what is turned by EXIF or has transparency; exact copies (equal pixels, however
they are stored), and those of them that lie in several classes; what is next to constant; what cannot be decoded, and
why; what training would make of it.

PATH {ACCEPTED_PATHS}
"""

INSPECT_EXAMPLES = """examples:
  paragan data inspect digits
  paragan data inspect photos/ --sheet photos.png           a row of images for each class, to look at
  paragan data inspect photos/ --json photos.json           everything, each bad file and copy by name
  paragan data inspect photos/ --resolution 128             what training at 128 x 128 would take
"""

CONVERT = f"""The order and the labels stay (a folder has its images class by class).

TO says the format by its name:
  photos             a folder of a folder each class (without labels: of images)
  photos.npz         images uint8 [N, R, R, C], labels, classes
  photos.zip         as StyleGAN and EDM read it: 00000/img00000000.png, dataset.json; classes.json beside
  photos.h5          imgs uint8 [N, C, R, R], labels, as BigGAN reads it
  photos --to tars   tar shards; see `paragan data shard`

Files stay as they are, byte for byte, unless --resolution or --format ask for something else; .npz and .h5 take one
size, that of all images or what training would choose. Every image is decoded on the way: with a bad one nothing is
written, or with --skip-bad all but these, which TO.bad.txt lists. TO appears complete, or not at all.

FROM {ACCEPTED_PATHS}
"""

CONVERT_EXAMPLES = """examples:
  paragan data convert photos/ photos.zip
  paragan data convert photos/ photos64.zip --resolution 64             the largest centred square, Lanczos, PNG
  paragan data convert photos/ small/ --resolution 256 --format jpg --quality 90
  paragan data convert photos.zip photos.h5 --resolution 128 --skip-bad
  paragan data convert digits digits/ --no-labels
"""

SHARD = f"""Each image becomes KEY.jpg (or .png, ...) and, with labels, KEY.cls in shard-000000.tar, ...;
classes.json beside them has the names. Equal sets become equal bytes. The index that makes opening them quick is
written too.

FROM {ACCEPTED_PATHS}
"""

SHARD_EXAMPLES = """examples:
  paragan data shard photos/ shards/
  paragan data shard photos/ shards/ --shuffle 0 --shard-mb 256         for readers that only go through them in order
  paragan data shard photos/ shards/ --resolution 256 --format jpg      smaller, to be sent over a network
"""

INDEX = """Every shard is read once; what is found is kept in paragan-index.npz beside them, small enough to be fetched
first. Opening a folder of shards here makes it too if it is missing or does not fit; for shards that are read over a
network, make it where they lie and put it beside them, so that nobody has to read them whole.
"""

INDEX_EXAMPLES = """examples:
  paragan data index shards/
  paragan data index 'shards/train-{0000..0099}.tar'
  paragan data index https://host/shards/shard-{000000..000012}.tar --out paragan-index.npz
"""

STATS = f"""The file holds mu [F] and sigma [F, F] float64 (divided by N - 1), as other programs name them, and
count, space, space_hash, resizer and image [C, H, W], which say how they were made.

PATH {ACCEPTED_PATHS}
"""

STATS_EXAMPLES = """examples:
  paragan data stats photos/ --out stats.npz --resolution 32                        of pixels
  paragan data stats photos/ --out stats.npz --features inception --inception pt_inception.pth
  paragan data stats photos/ --out stats.npz --count 10000                          of 10,000, evenly chosen
"""


def add_data_command(commands: Any) -> None:
    """Add `data` and its commands."""
    group = commands.add_parser(
        "data",
        help="look at a set of images, write it in another format, measure it",
        description=f"Look at sets of images, write them in other formats, measure them.\n\nPATH {ACCEPTED_PATHS}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_inspect_command, _add_convert_command, _add_shard_command, _add_index_command, _add_stats_command):
        add(commands)


def _add_subcommand(
    commands: Any, name: str, action: Any, summary: str, details: str, examples: str
) -> argparse.ArgumentParser:
    return add_command(commands, name, action, summary, details=f"\n\n{details}", epilog=examples)


# inspect ----------------------------------------------------------------------------------------------


def _add_inspect_command(commands: Any) -> None:
    p = _add_subcommand(
        commands, "inspect", _inspect, "say what a set is, and what is wrong with it", INSPECT, INSPECT_EXAMPLES
    )
    p.add_argument("path", metavar="PATH")
    p.add_argument("--resolution", type=int, metavar="R", help="what training would be asked for")
    p.add_argument("--sheet", metavar="FILE.png", help="also draw a few images of each class")
    p.add_argument("--json", metavar="FILE", help="also write everything that was found, by name")


def _inspect(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.atomic_write import atomic_output
    from paragan.data.source import MalformedDataset
    from paragan.data.tools.inspect_dataset import inspect_dataset

    check_no_extra_arguments(rest)
    _check_resolution(options.resolution)
    if options.sheet and Path(options.sheet).suffix.lower() != ".png":
        raise UsageError(f"--sheet {options.sheet} must end in .png, such as sheet.png")
    odd = None
    try:
        source = _open_images(options.path)
    except MalformedDataset as error:
        source, odd = error.source, error
    with _progress_bar("images looked at") as tell:
        found = inspect_dataset(source, resolution=options.resolution, progress=tell)
    _print_lines(found.to_lines())
    if options.json:
        with atomic_output(Path(options.json)) as path:
            path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    if options.sheet:
        from paragan.data.tools.contact_sheet import make_contact_sheet

        with atomic_output(Path(options.sheet)) as path:
            make_contact_sheet(found).save(path, format="PNG")
    if odd:
        raise UsageError(f"training would refuse it: {odd}")
    return 0


# convert, shard ---------------------------------------------------------------------------------------


def _add_convert_command(commands: Any) -> None:
    p = _add_subcommand(commands, "convert", _convert, "write a set in another format", CONVERT, CONVERT_EXAMPLES)
    p.add_argument("path", metavar="FROM")
    p.add_argument("out", metavar="TO", help="must not exist yet")
    p.add_argument("--to", choices=["folder", "npz", "zip", "h5", "tars"], help="the format, if its name does not say")
    _add_output_options(p)


def _add_shard_command(commands: Any) -> None:
    p = _add_subcommand(commands, "shard", _convert, "write a set as WebDataset tar shards", SHARD, SHARD_EXAMPLES)
    p.set_defaults(to="tars")
    p.add_argument("path", metavar="FROM")
    p.add_argument("out", metavar="TO_FOLDER", help="must not exist yet")
    _add_output_options(p)


def _add_output_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--resolution", type=int, metavar="R", help="the largest centred square, resized with Lanczos")
    p.add_argument("--format", choices=["png", "jpg"], help="of files (as they are; png for what is none)")
    p.add_argument("--quality", type=int, default=95, metavar="Q", help="of jpg, 1 to 100 (95)")
    p.add_argument("--labels", action=argparse.BooleanOptionalAction, default=True, help="whether to keep them (yes)")
    p.add_argument("--skip-bad", action="store_true", help="leave out what cannot be decoded; TO.bad.txt lists it")
    p.add_argument("--shuffle", type=int, metavar="SEED", help="in a random order, by this seed")
    p.add_argument("--shard-mb", type=float, default=64.0, metavar="MB", help="size of a tar shard at most (64)")


def _convert(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.core.atomic_write import require_absent
    from paragan.data.tools.convert import ConvertOptions, convert
    from paragan.data.tools.writers import choose_format
    from paragan.train.shutdown import exit_on_signal

    check_no_extra_arguments(rest)
    out = Path(options.out)
    if not 0.001 <= options.shard_mb < 1e6:
        raise UsageError(f"--shard-mb {options.shard_mb:g} must be from 0.001 to 1e6, such as 64")
    wanted = ConvertOptions(
        resolution=options.resolution,
        encoding=options.format,
        quality=options.quality,
        labels=options.labels,
        skip_bad=options.skip_bad,
        shuffle=options.shuffle,
    )
    form = choose_format(out, options.to, options.shard_mb)
    if form.stores_pixels and options.format:
        raise UsageError(f"--format {options.format}: an .{form.name} holds pixels, not files; leave --format out")
    require_absent(out)
    finish = _reindex_folder if form.name == "tars" else None
    with exit_on_signal(), _progress_bar("images written") as tell:
        source = _open_images(options.path, labels=options.labels)
        _print_lines(_describe_result(convert(source, out, form, wanted, progress=tell, finalize=finish), out))
    return 0


def _describe_result(result: ConvertResult, out: Path) -> list[str]:
    what = ""
    if result.shape:
        side, _, channels = result.shape
        what = f", each {side} x {side}, {'grey' if channels == 1 else 'RGB'}"
    left_out = [f"{len(result.bad_samples.reasons):,} cannot be decoded and were left out: {out}.bad.txt lists them"]
    return [f"{result.count:,} images in {out}{what}", *result.notes, *left_out * bool(result.bad_samples.reasons)]


# index ------------------------------------------------------------------------------------------------


def _add_index_command(commands: Any) -> None:
    p = _add_subcommand(commands, "index", _index, "list where the images lie in tar shards", INDEX, INDEX_EXAMPLES)
    p.add_argument("path", metavar="PATH_OR_ADDRESS", help="a folder of tars, or a pattern such as shards/shard-*.tar")
    p.add_argument("--out", metavar="FILE", help="where to write it (beside the shards)")


def _index(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.tools.reindex import reindex

    check_no_extra_arguments(rest)
    index, kept = reindex(options.path, options.out and Path(options.out), _print_to_stderr)
    _print_lines([f"{len(index):,} images in {len(index.shards):,} shards: {kept}"])
    return 0


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _reindex_folder(folder: Path) -> None:
    from paragan.data.tools.reindex import reindex

    reindex(str(folder))


# stats ------------------------------------------------------------------------------------------------


def _add_stats_command(commands: Any) -> None:
    p = _add_subcommand(
        commands, "stats", _stats, "write the moments that Frechet distances compare with", STATS, STATS_EXAMPLES
    )
    p.add_argument("path", metavar="PATH")
    p.add_argument("--out", required=True, metavar="FILE.npz", help="where to write them")
    p.add_argument("--features", default="pixels", metavar="SPACE", help="pixels or inception (pixels)")
    p.add_argument("--inception", metavar="FILE", help="weights of the 2015-12-05 Inception")
    p.add_argument(
        "--resolution", type=int, metavar="R", help="of the squares that are measured (what training would choose)"
    )
    p.add_argument("--count", type=int, metavar="N", help="so many images, evenly chosen (all)")


def _stats(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from paragan.data.dataset import load_data
    from paragan.train.write_reference import compute_reference, save_reference

    check_no_extra_arguments(rest)
    _check_resolution(options.resolution)
    out = Path(options.out)
    if out.suffix != ".npz":
        raise UsageError(f"--out {out} must end in .npz, such as stats.npz")
    images = load_data(options.path, resolution=options.resolution, labels=False, cache="stream")
    with _progress_bar("images measured") as tell:
        found = compute_reference(images, options.features, options.inception, options.count, tell)
    save_reference(found, out)
    bad = len(images.bad_samples.reasons) if images.bad_samples else 0
    notes = [f"{bad:,} cannot be decoded; others stand in"] * bool(bad)
    few = f"fewer images ({found.count:,}) than features ({found.space.num_features:,}): distances are biased upwards"
    notes += [few] * (found.count <= found.space.num_features)
    _print_lines(
        [f"mu [{found.space.num_features}] and sigma of {found.count:,} images, {found.space.name}, in {out}", *notes]
    )
    return 0


# all --------------------------------------------------------------------------------------------------


def _open_images(location: str, labels: bool = True) -> Source:
    """The set that a command names."""
    from paragan.data.open_source import open_source
    from paragan.data.source import DecodeError
    from paragan.data.storage.filesystem import printable, redact_url

    try:
        found = open_source(location, labels=labels)
    except DecodeError as error:
        raise UsageError(f"data: {printable(redact_url(location))}: {error}: check the path or address") from None
    except RunError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        name = printable(error.filename or redact_url(location))
        raise UsageError(
            f"data: {name} cannot be read: {error.strerror or error}; check path and permissions"
        ) from None
    if found.array is not None and found.array.dtype != "uint8":
        raise UsageError(
            f"data: {found.location} holds numbers {list(found.array.shape)}, and `paragan data` is for images"
        )
    return found


def _check_resolution(resolution: int | None) -> None:
    if resolution is not None and resolution < 1:
        raise UsageError(f"--resolution {resolution} is no size: use 1 or more, such as 64")


def _print_lines(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


@contextmanager
def _progress_bar(unit: str, every_s: float = 10.0) -> Iterator[ProgressFn]:
    """A live line on a terminal, a line every ten seconds elsewhere; on stderr, so that answers can be piped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (MofNCompleteColumn(), TextColumn(unit), BarColumn(bar_width=20), TimeRemainingColumn())
    shown_s = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show_progress(done: int, count: int) -> None:
            nonlocal shown_s
            bar.update(task, completed=done, total=count)
            if not console.is_terminal and time.monotonic() - shown_s >= every_s:
                console.print(f"{done:,} of {count:,} {unit}")
                shown_s = time.monotonic()

        yield show_progress
