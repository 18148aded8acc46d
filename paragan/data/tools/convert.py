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

from paragan.core.atomic_write import aside, refuse_existing
from paragan.core.errors import Failed, Unusable
from paragan.core.rng import shuffled
from paragan.data.bad_samples import Bad
from paragan.data.dataset import choose_resolution, glance
from paragan.data.decode import Fault, fit, header, picture, place
from paragan.data.source import Record, Source
from paragan.data.storage.filesystem import one_line
from paragan.data.tools.image_info import form_of, turned
from paragan.data.tools.parallel_map import Tell, flow
from paragan.data.tools.writers import Form, Whole


@dataclass(frozen=True)
class Wanted:
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
            raise Unusable(f"--resolution {self.resolution} is no size: use 1 or more, such as 64")
        if self.shuffle is not None and not 0 <= self.shuffle < 2**63:
            raise Unusable(f"--shuffle {self.shuffle} is no seed: use 0 or more, and less than 2^63")
        if not 1 <= self.quality <= 100:
            raise Unusable(f"--quality {self.quality} must be between 1 and 100, such as 95")


@dataclass(frozen=True, eq=False)
class Converted:
    """What was written: images, [R, R, C] where they are pixels, and what was left out."""

    count: int
    shape: tuple[int, int, int] | None
    bad: Bad
    notes: tuple[str, ...]


def convert(
    source: Source,
    out: Path,
    form: Form,
    wanted: Wanted,
    *,
    tell: Tell | None = None,
    finish: Callable[[Path], object] | None = None,
) -> Converted:
    """Write all of `source` to `out`, in its order, decoding each on the way; complete or not at all.

    finish : is given the path before it gets its name, to add to it

    What was left out is listed in `out.bad.txt`. Raises `Unusable` for an `out` that exists or cannot be written, for
    images that cannot be decoded, and for what the format cannot hold.
    """
    refuse_existing(out)
    bad = Bad(None, len(source), source.name, 1.0)
    rows = _good(source, bad, tell) if wanted.skip_bad else np.arange(len(source))
    rows = rows if wanted.shuffle is None else rows[shuffled(wanted.shuffle, 0, len(rows))]
    labels = source.labels[rows] if wanted.labels and source.labels is not None else None
    shape = _shape(source, wanted.resolution) if form.pixels else None
    whole = Whole(len(rows), labels, source.classes if labels is not None else (), shape)
    _refuse_empty(form, whole)
    work = _packing(source, wanted) if shape is None else _placing(source, shape)
    with _writing(out), aside(out) as hidden:
        writer = form.make(hidden, whole)
        try:
            with closing(flow(len(rows), lambda i: work(int(rows[i])), near=source.near, tell=tell)) as records:
                for index, record in zip(rows, records):
                    if isinstance(record, Fault):
                        raise Unusable(_refusal(source.name(int(index)), record.reason))
                    writer.add(record)
        finally:
            writer.close()
        if finish:
            finish(hidden)
        if bad.reasons:
            _list(bad, out)
    return Converted(len(rows), shape, bad, _notes(form, whole))


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else one_line(error)
        raise Failed(f"{out} cannot be written: {reason}: make room, or name another place") from None


def packed(record: Record, wanted: Wanted) -> bytes:
    """A record as a file: the very same where nothing else is wanted. Raises `DecodeError`, for what it keeps too."""
    image, side = picture(record), wanted.resolution
    if isinstance(record, bytes) and _fits(record, wanted):
        return record
    pixels = np.asarray(image) if side is None else fit(image, side, 1 if image.mode == "L" else 3)
    image = Image.fromarray(pixels[:, :, 0] if image.mode == "L" and side else pixels)  # without EXIF, which is done
    file = io.BytesIO()
    if wanted.encoding == "jpg":
        image.save(file, "JPEG", quality=wanted.quality, subsampling=0)
    else:
        image.save(file, "PNG")
    return file.getvalue()


def _fits(record: bytes, wanted: Wanted) -> bool:
    if wanted.encoding and form_of(record) != {"png": "PNG", "jpg": "JPEG"}[wanted.encoding]:
        return False
    if not wanted.resolution:
        return True
    about = header(record)
    return (about.width, about.height) == (wanted.resolution, wanted.resolution) and not turned(record)


def _packing(source: Source, wanted: Wanted) -> Callable[[int], Record]:
    return lambda index: packed(source.read(index), wanted)


def _placing(source: Source, shape: tuple[int, int, int]) -> Callable[[int], Record]:
    def work(index: int) -> np.ndarray:
        out = np.empty(shape, np.uint8)
        place(source.read(index), out)
        return out

    return work


def _good(source: Source, bad: Bad, tell: Tell | None) -> np.ndarray:
    """[n] the images that can be decoded; the others are in `bad`."""

    def work(index: int) -> None:
        picture(source.read(index))

    for index, result in enumerate(flow(len(source), work, near=source.near, tell=tell)):
        if isinstance(result, Fault):
            bad.add(index, result.reason)
    if len(bad.reasons) == len(source):
        raise Unusable(f"data: none of the {len(source):,} images of {source.where} can be decoded, {_such_as(bad)}")
    return np.setdiff1d(np.arange(len(source)), list(bad.reasons))


def _shape(source: Source, resolution: int | None) -> tuple[int, int, int]:
    """The one shape [R, R, C] of all: what they have already, where that is a square; else as `load` has it."""
    seen = glance(source, Bad(None, len(source), source.name, 1.0))
    first = int(seen.sizes[0, 0])
    side = resolution or (first if (seen.sizes == first).all() else choose_resolution(seen.sizes))
    return side, side, 1 if seen.grey else 3


def _refuse_empty(form: Form, whole: Whole) -> None:
    if form.empty or whole.labels is None:
        return
    counts = np.bincount(whole.labels, minlength=len(whole.classes))
    if not counts.all():
        name = whole.classes[int(counts.argmin())]
        raise Unusable(
            f"data: class {name!r} has no image, which a {form.name} cannot tell: use an .npz, or --no-labels"
        )


def _refusal(name: str, reason: str) -> str:
    return (
        f"data: {name} cannot be decoded: {reason}: replace or remove it, or leave out all such with --skip-bad "
        "(`paragan data inspect` lists them)"
    )


def _such_as(bad: Bad) -> str:
    index, reason = next(iter(bad.reasons.items()))
    return f"such as {bad.name(index)}: {reason}"


def _list(bad: Bad, out: Path) -> None:
    with aside(out.with_name(f"{out.name}.bad.txt")) as path:
        path.write_text("\n".join(bad.lines()) + "\n", errors="surrogateescape")


def _notes(form: Form, whole: Whole) -> tuple[str, ...]:
    if form.name != "folder" or whole.labels is None or (np.diff(whole.labels) >= 0).all():
        return ()
    return ("a folder has its images class by class: within each they are in the order they had",)
