"""The images a run trains on, from wherever they lie, held in memory as uint8."""

import difflib
import hashlib
import os
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from paragan.data.decode import FORMATS, Fault, Header, each, fill, header, picture
from paragan.data.npz import read_npz
from paragan.errors import Unusable

FORMS = f"`digits`, an .npz, or a folder of images ({', '.join(FORMATS)})"

_SPELLED_OUT = 20  # classes described one by one; beyond, the smallest and largest few


@dataclass(frozen=True, eq=False)
class Images:
    """A labelled set of images in memory."""

    images: np.ndarray  # [N, R, R, C] uint8, C 1 (grey) or 3 (RGB)
    labels: np.ndarray | None  # [N] int64 in 0..K-1; None without classes
    classes: tuple[str, ...]  # [K] names; () without
    fingerprint: str  # of shape, pixels and labels: a resume on other data is noticed by it
    notes: tuple[str, ...] = ()  # what was found and done to it, for `describe`

    def describe(self) -> str:
        """A few lines for people: count, size, colour, classes, and what the images were before resizing."""
        count, side, _, channels = self.images.shape
        what = f"{count:,} image{'s' * (count != 1)}, {side} x {side}, {'grey' if channels == 1 else 'RGB'}"
        lines = [what, self._classes(), *self.notes]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False) for line in lines)

    def of_class(self, label: int) -> "Images":
        """The images of one class, without labels. Unusable where there is no such class, or no image of it."""
        if self.labels is None:
            raise Unusable(f"data.only={label}: these images have no classes; leave data.only out")
        if not 0 <= label < len(self.classes):
            raise Unusable(f"data.only={label}: there is no such class; use a number from 0 to {len(self.classes) - 1}")
        mine = self.images[self.labels == label]
        if not len(mine):
            raise Unusable(f"data.only={label}: class {self.classes[label]} has no image; add some, or take another")
        note = f"class {label} ({self.classes[label]}) alone"
        return Images(mine, None, (), fingerprint(mine, None), (*self.notes, note))

    def _classes(self) -> str:
        if self.labels is None:
            return "no classes"
        counts = np.bincount(self.labels, minlength=len(self.classes))  # [K]

        def tell(which: Iterable[int]) -> str:
            return ", ".join(f"{self.classes[label]} ({counts[label]:,})" for label in which)

        if len(counts) <= _SPELLED_OUT:
            return f"{len(counts)} class{'es' * (len(counts) != 1)}: {tell(range(len(counts)))}"
        order = np.argsort(counts, kind="stable")
        return (
            f"{len(counts):,} classes of {counts.min():,} to {counts.max():,} images; "
            f"smallest: {tell(order[:3])}; largest: {tell(order[:-4:-1])}"
        )


def load(where: str, *, resolution: int | None, channels: int | None = None, labels: bool = True) -> Images:
    """Find, check and decode a set of images.

    `where` is the word `digits` (scikit-learn's 1,797 digits of 8 x 8, grey; a folder of that name is
    `./digits`), the path of an `.npz` (`images` uint8 [N, H, W, C] or [N, H, W]; optional `labels`, integers
    [N], and `classes`, names [K]), or a folder: `PATH/<class>/*.png|jpg|jpeg|webp|bmp` (sub-folders in the
    order of their names are the labels) or images directly in it (no classes). Hidden files are ignored.

    Every image is cropped to the largest square in its centre and resized to R x R (LANCZOS); one of that
    size is untouched, bit for bit. Transparency is composited on white. `resolution` None takes the native
    size if all images share one that networks accept (square, a power of two from 8 on), else the power of
    two at or above the median of the short sides, at least 8, at most 64. `channels` None is 1 if every image
    is grey, else 3. `labels=False` drops labels and classes.

    Raises `Unusable`, one line, for whatever cannot be used: a path, a format, a damaged file, a folder
    without images, labels that do not fit, or more pixels than half of the machine's memory holds.
    """
    if not where:
        raise Unusable(f"data: nothing is named: give {FORMS}")
    if resolution is not None and resolution < 1:
        raise Unusable(f"resolution: {resolution} is no size: use a power of two from 8 on, such as 32")
    if channels not in (None, 1, 3):
        raise Unusable(f"channels: {channels} is not possible: use 1 (grey) or 3 (RGB)")
    try:
        found = _digits() if where == "digits" else _find(Path(where), labels)
        found = found if labels else replace(found, labels=None, classes=())
        return _decode(found, resolution or choose_resolution(found.sizes), resolution is None, channels)
    except OSError as error:
        name = _shown(error.filename or where)
        raise Unusable(f"data: {name} cannot be read: {error.strerror or error}; check path and permissions") from None


def choose_resolution(sizes: np.ndarray) -> int:
    """The resolution for images of `sizes` [N, 2] (width, height), where nobody asked for one; see `load`."""
    first = int(sizes[0, 0])
    if (sizes == first).all() and first >= 8 and first.bit_count() == 1:
        return first
    median = int(np.ceil(np.median(sizes.min(axis=1))))
    return min(64, max(8, 1 << (median - 1).bit_length()))


def fingerprint(images: np.ndarray, labels: np.ndarray | None) -> str:
    """16 hex digits of the sha256 over shape, pixels [N, R, R, C] uint8 and labels [N] integers."""
    digest = hashlib.sha256(repr((images.shape, labels is not None)).encode())
    digest.update(np.ascontiguousarray(images).reshape(-1).data)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Found:
    """A set as it lies there: enough to choose a resolution, and the way to each image."""

    sizes: np.ndarray  # [N, 2] width, height of those whose header can be read
    grey: bool
    count: int
    picture: Callable[[int], Image.Image]  # upright, opaque, L or RGB; raises DecodeError
    name: Callable[[int], str]
    labels: np.ndarray | None
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    whole: np.ndarray | None = None  # [N, H, W, C], where the set is an array already


def _decode(found: _Found, resolution: int, chosen: bool, channels: int | None) -> Images:
    channels = channels or (1 if found.grey else 3)
    if found.whole is not None and found.whole.shape[1:] == (resolution, resolution, channels):
        images, faults = found.whole, []
    else:
        images, faults = fill(found.count, found.picture, resolution, channels)
    if faults:
        raise Unusable(_damage(faults, found))
    notes = (*_sizes(found.sizes, resolution, chosen), *_colour(found.grey, channels), *found.notes)
    return Images(images, found.labels, found.classes, fingerprint(images, found.labels), notes)


def _damage(faults: list[Fault], found: _Found) -> str:
    first, more = faults[0], len(faults) - 1
    others = f" (and {more:,} more of {found.count:,} images)" if more else ""
    remedy = "replace or remove them" if more else "replace or remove it"
    return f"data: {found.name(first.index)} cannot be decoded: {first.reason}{others}: {remedy}"


# What describe() says ---------------------------------------------------------------------------------------


def _sizes(sizes: np.ndarray, resolution: int, chosen: bool) -> list[str]:
    short = sizes.min(axis=1)
    kinds = np.unique(sizes, axis=0)  # [kinds, 2]
    kinds = kinds[np.argsort(kinds.prod(axis=1), kind="stable")]
    (width, height), (widest, highest) = kinds[0], kinds[-1]
    line = f"found {width} x {height}"
    if len(kinds) > 1:
        line = f"found {len(kinds):,} sizes, {width} x {height} to {widest} x {highest}"
        line += f", median short side {np.median(short):g}"
    done = ["centre-cropped"] * bool((kinds[:, 0] != kinds[:, 1]).any())
    done += [f"resized to {resolution} x {resolution} (LANCZOS)"] * bool((short != resolution).any())
    lines = [f"{line}; {' and '.join(done) or 'untouched'}"]
    if chosen and done:
        lines += [
            f"resolution {resolution} was chosen: the power of two at or above the median short side, "
            f"at least 8, at most 64; give one to change it"
        ]
    return lines


def _colour(grey: bool, channels: int) -> list[str]:
    if grey == (channels == 1):
        return []
    return ["grey repeated to RGB"] if grey else ["colour reduced to grey"]


# Where it may lie -------------------------------------------------------------------------------------------


def _find(path: Path, labels: bool) -> _Found:
    if not path.exists():
        raise Unusable(_missing(path))
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == ".npz":
        stored = read_npz(path, _shown(path), labels=labels)
        notes = (f"ignored keys: {', '.join(map(_shown, stored.ignored))}",) if stored.ignored else ()
        return _array(stored.images, stored.labels, stored.classes, notes, _shown(path))
    if path.suffix.lower() in FORMATS:
        raise Unusable(f"data: {_shown(path)} is one image: give the folder it lies in, {_shown(path.parent)}")
    raise Unusable(f"data: {_shown(path)} has {_extensions([path])}, no format known here: give {FORMS}")


def _missing(path: Path) -> str:
    """Name what does not exist: the first part of the path that is missing, and what is there instead."""
    lost = path
    while lost.parent != lost and not lost.parent.exists():
        lost = lost.parent
    there = [_shown(entry.name) for entry in lost.parent.iterdir()] if lost.parent.is_dir() else []
    near = difflib.get_close_matches(lost.name, [*there, "digits"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"give {FORMS}"
    inside = "" if lost == path else f" (there is no {_shown(lost)})"
    return f"data: {_shown(path)} does not exist{inside}: {hint}"


def _digits() -> _Found:
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    values, labels = load_digits(return_X_y=True)  # [1797, 64] in 0..16
    images = (np.asarray(values) * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8, 1)
    return _array(images, np.asarray(labels, np.int64), tuple("0123456789"), (), "digits")


def _array(
    images: np.ndarray, labels: np.ndarray | None, classes: tuple[str, ...], notes: tuple[str, ...], name: str
) -> _Found:
    count, height, width, channels = images.shape

    def cut(index: int) -> Image.Image:
        return Image.fromarray(images[index, :, :, 0] if channels == 1 else images[index])

    return _Found(
        sizes=np.broadcast_to(np.array([width, height]), (count, 2)),
        grey=channels == 1,
        count=count,
        picture=cut,
        name=lambda index: f"{name}, image {index}",
        labels=labels,
        classes=classes,
        notes=notes,
        whole=images,
    )


def _folder(path: Path) -> _Found:
    files, folders = _list(path)
    images = _images(files)
    if images and folders:
        raise Unusable(
            f"data: {_shown(path)} holds images ({len(images):,}) and folders ({len(folders):,}) side "
            f"by side: move the images into a folder each class, or the folders ({_some(folders)}) away"
        )
    if images:
        return _files(images, None, (), _ignored(files, []))
    if not folders:
        raise Unusable(_nothing(path, files))
    inside = [_list(folder) for folder in folders]
    members = [_images(files) for files, _ in inside]
    everything = [*files, *(file for files, _ in inside for file in files)]
    deeper = [folder for _, folders in inside for folder in folders]
    if not all(members):
        raise Unusable(_bare(path, folders, members, everything, deeper))
    labels = np.repeat(np.arange(len(folders)), [len(member) for member in members])  # [N] int64
    classes = tuple(_shown(folder.name) for folder in folders)
    return _files([image for member in members for image in member], labels, classes, _ignored(everything, deeper))


def _files(paths: list[Path], labels: np.ndarray | None, classes: tuple[str, ...], notes: list[str]) -> _Found:
    def decode(index: int) -> Image.Image:
        return picture(paths[index])

    found = each(len(paths), lambda index: header(paths[index]))
    headers = [one for one in found if isinstance(one, Header)]
    clear = sum(one.clear for one in headers)
    notes = notes + [f"{clear:,} with transparency, composited on white"] * bool(clear)
    result = _Found(
        sizes=np.array([(one.width, one.height) for one in headers]),
        grey=all(one.grey for one in headers),
        count=len(paths),
        picture=decode,  # meets those without a readable header again, and reports them with the rest
        name=lambda index: _shown(paths[index]),
        labels=labels,
        classes=classes,
        notes=tuple(notes),
    )
    if not headers:
        raise Unusable(_damage([one for one in found if isinstance(one, Fault)], result))
    return result


def _list(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files and folders in a folder, by name, without the hidden ones. Broken links count as files."""
    with os.scandir(folder) as entries:
        seen = [entry for entry in entries if not entry.name.startswith(".")]
    folders = [Path(entry) for entry in seen if entry.is_dir()]
    files = [Path(entry) for entry in seen if not entry.is_dir() and (entry.is_file() or entry.is_symlink())]
    return sorted(files), sorted(folders)


def _images(files: list[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in FORMATS]


def _ignored(files: list[Path], folders: list[Path]) -> list[str]:
    others = [file for file in files if file.suffix.lower() not in FORMATS]
    lines = [f"ignored other files ({len(others):,}): {_extensions(others)}"] * bool(others)
    return lines + [f"ignored folders within classes ({len(folders):,}): {_some(folders)}"] * bool(folders)


def _nothing(path: Path, files: list[Path]) -> str:
    wanted = f"put {', '.join(FORMATS)} into it, or into a folder each class"
    if not files:
        return f"data: {_shown(path)} is empty (hidden files do not count): {wanted}"
    others = f"{_extensions(files)} ({len(files):,} file{'s' * (len(files) != 1)})"
    return f"data: {_shown(path)} holds no image, only {others}: {wanted}"


def _bare(path: Path, folders: list[Path], members: list[list[Path]], files: list[Path], deeper: list[Path]) -> str:
    """Some class has no image; or all have none, and `path` probably is a level too high."""
    bare = [folder for folder, member in zip(folders, members, strict=True) if not member]
    if len(bare) < len(folders):
        others = f", like {len(bare) - 1:,} more" if len(bare) > 1 else ""
        remedy = f"add one ({', '.join(FORMATS)}) or remove the folder"
        return f"data: {_shown(bare[0])}: this class has no image{others}: {remedy}"
    within = f"data: {_shown(path)} and its {len(folders):,} folders ({_some(folders)}) hold no image"
    if deeper:
        return f"{within}, only more folders: give one of them, such as {_shown(deeper[0].parent)}"
    return f"{within}{f', only {_extensions(files)}' if files else ''}: put {', '.join(FORMATS)} into them"


def _extensions(files: list[Path]) -> str:
    return ", ".join(sorted({_shown(file.suffix.lower()) or "(no extension)" for file in files})[:10])


def _some(paths: list[Path]) -> str:
    return ", ".join(_shown(path.name) for path in paths[:3]) + ", ..." * (len(paths) > 3)


def _shown(name: str | Path) -> str:
    """A name that stays on one line and can be printed: control and undecodable characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))
