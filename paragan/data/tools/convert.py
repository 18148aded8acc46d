"""A set of images, written in another format: `paragan data convert` and `paragan data shard`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from paragan.core.atomic_write import atomic_output, require_absent
from paragan.core.errors import RunError, UsageError
from paragan.core.rng import epoch_permutation
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import choose_resolution, scan_headers
from paragan.data.decode import DecodeFailure, center_crop_resize, decode_image, decode_into, read_header
from paragan.data.source import Record, Source
from paragan.data.storage.filesystem import format_error
from paragan.data.tools.image_info import detect_format, is_rotated
from paragan.data.tools.parallel_map import ProgressFn, ordered_parallel_map
from paragan.data.tools.writers import DatasetInfo, OutputFormat


@dataclass(frozen=True)
class ConvertOptions:
    """How images are written.

    resolution : of squares; None leaves files as they are, and gives pixels the size that all share, or what training
        would choose
    encoding   : of files; None keeps what is a file of that size already, byte for byte, and makes the others PNG
    quality    : of JPEG, 1 to 100, without subsampling of colour
    labels     : whether they are kept
    skip_bad   : whether what cannot be decoded is left out, rather than refused
    shuffle    : a seed, for another order
    """

    resolution: int | None = None
    encoding: Literal["png", "jpg"] | None = None
    quality: int = 95
    labels: bool = True
    skip_bad: bool = False
    shuffle: int | None = None

    def __post_init__(self):
        if self.resolution is not None and self.resolution < 1:
            raise UsageError(f"--resolution {self.resolution} is no size: use 1 or more, such as 64")
        if self.shuffle is not None and not 0 <= self.shuffle < 2**63:
            raise UsageError(f"--shuffle {self.shuffle} is no seed: use 0 or more, and less than 2^63")
        if not 1 <= self.quality <= 100:
            raise UsageError(f"--quality {self.quality} must be between 1 and 100, such as 95")


@dataclass(frozen=True, eq=False)
class ConvertResult:
    """What was written: images, [R, R, C] where they are pixels, and what was left out."""

    count: int
    shape: tuple[int, int, int] | None
    bad_samples: BadSamples
    notes: tuple[str, ...]


def convert(
    source: Source,
    out: Path,
    output_format: OutputFormat,
    options: ConvertOptions,
    *,
    progress: ProgressFn | None = None,
    finalize: Callable[[Path], object] | None = None,
) -> ConvertResult:
    """Write all of `source` to `out`, in its order, decoding each on the way; complete or not at all.

    finish : is given the path before it gets its name, to add to it

    What was left out is listed in `out.bad.txt`. Raises `Unusable` for an `out` that exists or cannot be written, for
    images that cannot be decoded, and for what the format cannot hold.
    """
    require_absent(out)
    bad = BadSamples(None, len(source), source.sample_name, 1.0)
    rows = _good_indices(source, bad, progress) if options.skip_bad else np.arange(len(source))
    rows = rows if options.shuffle is None else rows[epoch_permutation(options.shuffle, 0, len(rows))]
    labels = source.labels[rows] if options.labels and source.labels is not None else None
    shape = _output_shape(source, options.resolution) if output_format.stores_pixels else None
    whole = DatasetInfo(len(rows), labels, source.classes if labels is not None else (), shape)
    _check_empty_classes(output_format, whole)
    work = _make_encoder(source, options) if shape is None else _make_decoder(source, shape)
    with _reraise_as_run_error(out), atomic_output(out) as hidden:
        writer = output_format.make_writer(hidden, whole)
        try:
            with closing(
                ordered_parallel_map(
                    len(rows), lambda i: work(int(rows[i])), is_local=source.is_local, progress=progress
                )
            ) as records:
                for index, record in zip(rows, records):
                    if isinstance(record, DecodeFailure):
                        raise UsageError(_bad_image_message(source.sample_name(int(index)), record.reason))
                    writer.add(record)
        finally:
            writer.close()
        if finalize:
            finalize(hidden)
        if bad.reasons:
            _write_bad_list(bad, out)
    return ConvertResult(len(rows), shape, bad, _describe_order(output_format, whole))


@contextmanager
def _reraise_as_run_error(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else format_error(error)
        raise RunError(f"{out} cannot be written: {reason}: make room, or name another place") from None


def encode_record(record: Record, options: ConvertOptions) -> bytes:
    """A record as a file: the very same where nothing else is wanted. Raises `DecodeError`, for what it keeps too."""
    image, side = decode_image(record), options.resolution
    if isinstance(record, bytes) and _is_encoded(record, options):
        return record
    pixels = np.asarray(image) if side is None else center_crop_resize(image, side, 1 if image.mode == "L" else 3)
    image = Image.fromarray(pixels[:, :, 0] if image.mode == "L" and side else pixels)  # without EXIF, which is done
    file = io.BytesIO()
    if options.encoding == "jpg":
        image.save(file, "JPEG", quality=options.quality, subsampling=0)
    else:
        image.save(file, "PNG")
    return file.getvalue()


def _is_encoded(record: bytes, options: ConvertOptions) -> bool:
    if options.encoding and detect_format(record) != {"png": "PNG", "jpg": "JPEG"}[options.encoding]:
        return False
    if not options.resolution:
        return True
    about = read_header(record)
    return (about.width, about.height) == (options.resolution, options.resolution) and not is_rotated(record)


def _make_encoder(source: Source, options: ConvertOptions) -> Callable[[int], Record]:
    return lambda index: encode_record(source.read(index), options)


def _make_decoder(source: Source, shape: tuple[int, int, int]) -> Callable[[int], Record]:
    def work(index: int) -> np.ndarray:
        out = np.empty(shape, np.uint8)
        decode_into(source.read(index), out)
        return out

    return work


def _good_indices(source: Source, bad_samples: BadSamples, progress: ProgressFn | None) -> np.ndarray:
    """[n] the images that can be decoded; the others are in `bad`."""

    def work(index: int) -> None:
        decode_image(source.read(index))

    for index, result in enumerate(
        ordered_parallel_map(len(source), work, is_local=source.is_local, progress=progress)
    ):
        if isinstance(result, DecodeFailure):
            bad_samples.report(index, result.reason)
    if len(bad_samples.reasons) == len(source):
        raise UsageError(
            f"data: none of the {len(source):,} images of {source.location} can be decoded, {_example_failure(bad_samples)}"
        )
    return np.setdiff1d(np.arange(len(source)), list(bad_samples.reasons))


def _output_shape(source: Source, resolution: int | None) -> tuple[int, int, int]:
    """The one shape [R, R, C] of all: what they have already, where that is a square; else as `load` has it."""
    seen = scan_headers(source, BadSamples(None, len(source), source.sample_name, 1.0))
    first = int(seen.sizes[0, 0])
    side = resolution or (first if (seen.sizes == first).all() else choose_resolution(seen.sizes))
    return side, side, 1 if seen.is_grey else 3


def _check_empty_classes(output_format: OutputFormat, info: DatasetInfo) -> None:
    if output_format.allows_empty_classes or info.labels is None:
        return
    counts = np.bincount(info.labels, minlength=len(info.classes))
    if not counts.all():
        name = info.classes[int(counts.argmin())]
        raise UsageError(
            f"data: class {name!r} has no image, which a {output_format.name} cannot tell: use an .npz, or --no-labels"
        )


def _bad_image_message(name: str, reason: str) -> str:
    return (
        f"data: {name} cannot be decoded: {reason}: replace or remove it, or leave out all such with --skip-bad "
        "(`paragan data inspect` lists them)"
    )


def _example_failure(bad_samples: BadSamples) -> str:
    index, reason = next(iter(bad_samples.reasons.items()))
    return f"such as {bad_samples.sample_name(index)}: {reason}"


def _write_bad_list(bad_samples: BadSamples, out: Path) -> None:
    with atomic_output(out.with_name(f"{out.name}.bad.txt")) as path:
        path.write_text("\n".join(bad_samples.to_lines()) + "\n", errors="surrogateescape")


def _describe_order(output_format: OutputFormat, info: DatasetInfo) -> tuple[str, ...]:
    if output_format.name != "folder" or info.labels is None or (np.diff(info.labels) >= 0).all():
        return ()
    return ("a folder has its images class by class: within each they are in the order they had",)
