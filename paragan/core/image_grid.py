"""Write samples: images as a grid, an `.npz` or a folder of PNGs; arrays as an `.npz`, a picture or a folder of WAV."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.core.wav_files import encode_wav

GAP_PX = 2  # between the images of a grid
GREY = 128  # colour of the gap
IMAGE_OUTPUTS_HINT = "grid.png, samples.npz, or a folder (a name without extension)"
WAVE_OUTPUTS_HINT = "a folder (a name without extension), samples.npz, or picture.png"


def make_grid(images: np.ndarray, columns: int | None = None, scale: int = 1) -> Image.Image:
    """Tile images row by row, with a grey gap between them.

    Args:
        images: [N, H, W, C] uint8; of more than three channels the first three are shown (`visible_channels`).
        columns: images in a row; None makes the grid as square as possible.
        scale: each pixel becomes `scale` x `scale` pixels.

    Raises:
        UsageError: another array, or `columns` or `scale` below 1.
    """
    _check_images(images, None)
    if columns is not None and columns < 1:
        raise UsageError(f"columns={columns}: not possible. Use 1 or more.")
    if scale < 1:
        raise UsageError(f"scale={scale}: not possible. Use 1 or more.")
    images = visible_channels(images)
    count, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    height *= scale
    width *= scale
    tiles = np.full((rows * columns, height + GAP_PX, width + GAP_PX, channels), GREY, np.uint8)
    tiles[:count, :height, :width] = images.repeat(scale, axis=1).repeat(scale, axis=2)
    sheet = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    sheet = sheet.reshape(rows * (height + GAP_PX), columns * (width + GAP_PX), channels)
    return _to_pil(sheet[:-GAP_PX, :-GAP_PX])


def integer_upscale(images: np.ndarray) -> int:
    """Return the factor that enlarges images [N, H, W, C] to a short side of about 64 pixels, to show details."""
    return max(1, 64 // min(images.shape[1:3]))


def visible_channels(images: np.ndarray) -> np.ndarray:
    """Return the channels that a picture shows, [..., 1 or 3]: the first three, or the first one of two."""
    return images[..., : 3 if images.shape[-1] >= 3 else 1]


def save_images(images: np.ndarray, labels: np.ndarray | None, out: Path, classes: Sequence[str] = ()) -> None:
    """Write images in the format that the name of `out` implies.

    `.png` is a grid (without labels), which shows the first three of more channels. `.npz` holds `images` uint8
    [N, H, W, C] and, if given, `labels` int64 [N] and `classes` [K]. A name without extension is a folder:
    `out/<class>/000000.png`, or `out/000000.png` without labels; files of four channels are RGB and alpha. Without
    class names, or where they cannot be folders, the class is its index, padded with zeros to one width. A file appears
    complete or not at all and replaces an older one; a folder must be new or empty.

    Args:
        images: [N, H, W, C] uint8.
        labels: [N] integers, or None.
        out: the file or folder.
        classes: [K] names of the classes.

    Raises:
        UsageError: another extension, or `out` cannot be written.
    """
    out = Path(out)
    _check_images(images, labels)
    try:
        _writer_for(out)(images, labels, out, classes)
    except OSError as error:
        raise UsageError(f"--out={error.filename or out}: cannot be written: {error.strerror or error}") from None


def save_arrays(
    x: np.ndarray,
    labels: np.ndarray | None,
    out: Path,
    make_picture: Callable[[], np.ndarray],
    classes: Sequence[str] = (),
    sample_rate: int = 0,
) -> None:
    """Write arrays of numbers: as an `.npz` that `--data` accepts, or as a picture; waves also as a folder of WAV.

    Args:
        x: [N, ...] float32; waves are [N, C, T].
        labels: [N] integers, or None.
        out: a name ending in `.npz` or `.png`; for waves also one without extension, a folder as in `save_images`.
        make_picture: returns the picture [H, W, 3] uint8; called for `.png` only.
        classes: [K] names of the classes.
        sample_rate: of waves, Hz; 0 for other arrays.

    Raises:
        UsageError: another extension, or `out` cannot be written.
    """
    suffix = "" if out.is_dir() else out.suffix.lower()
    if sample_rate and not suffix:
        _write_waves(x, labels, out, classes, sample_rate)
        return
    if suffix not in (".npz", ".png"):
        if sample_rate:
            raise UsageError(f"--out={out}: not possible for waves. Use {WAVE_OUTPUTS_HINT}.")
        raise UsageError(f"--out={out}: not possible for arrays of numbers. Use samples.npz or picture.png.")
    arrays = {"x": x} | _label_arrays(labels, classes)
    with atomic_output(out) as path, path.open("wb") as file:
        if suffix == ".png":
            Image.fromarray(make_picture()).save(file, format="PNG")
        else:
            np.savez(file, allow_pickle=False, **arrays)


def _label_arrays(labels: np.ndarray | None, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the labels and class names of an npz."""
    if labels is None:
        return {}
    names = {"classes": np.array(list(classes))} if classes else {}
    return {"labels": labels.astype(np.int64)} | names


def _writer_for(out: Path) -> Callable[[np.ndarray, np.ndarray | None, Path, Sequence[str]], None]:
    suffix = "" if out.is_dir() else out.suffix.lower()
    writers = {".png": _write_grid, ".npz": _write_npz, "": _write_folder}
    if suffix not in writers:
        raise UsageError(f"--out={out}: unknown extension {suffix}. Use {IMAGE_OUTPUTS_HINT}.")
    return writers[suffix]


def _write_grid(images: np.ndarray, labels: np.ndarray | None, out: Path, classes: Sequence[str]) -> None:
    with atomic_output(out) as path:
        make_grid(images, scale=integer_upscale(images)).save(path, format="PNG")


def _write_npz(images: np.ndarray, labels: np.ndarray | None, out: Path, classes: Sequence[str]) -> None:
    arrays = {"images": images} | _label_arrays(labels, classes)
    with atomic_output(out) as path, path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _write_folder(images: np.ndarray, labels: np.ndarray | None, out: Path, classes: Sequence[str]) -> None:
    _check_folder(out, IMAGE_OUTPUTS_HINT)
    if images.shape[3] not in (1, 3, 4):
        raise UsageError(f"--out={out}: files hold 1, 3 or 4 channels, not {images.shape[3]}. Use samples.npz.")
    paths = _make_folders(out, _file_names(len(images), ".png", labels, classes))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path, image: _to_pil(image).save(path), paths, images))


def _write_waves(
    waves: np.ndarray, labels: np.ndarray | None, out: Path, classes: Sequence[str], sample_rate: int
) -> None:
    _check_folder(out, WAVE_OUTPUTS_HINT)
    try:
        for path, wave in zip(_make_folders(out, _file_names(len(waves), ".wav", labels, classes)), waves):
            path.write_bytes(encode_wav(wave, sample_rate))
    except OSError as error:
        raise UsageError(f"--out={error.filename or out}: cannot be written: {error.strerror or error}") from None


def _check_folder(out: Path, outputs_hint: str) -> None:
    """Raise UsageError unless `out` is a new or empty folder."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out={out}: this is a file. Use {outputs_hint}.")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out={out}: the folder is not empty. Name a new one.")


def _make_folders(out: Path, names: Sequence[str]) -> list[Path]:
    """Create the folders of files with these names in `out`. Returns the paths of the files."""
    paths = [out / name for name in names]
    for folder in sorted({path.parent for path in paths}):
        folder.mkdir(parents=True, exist_ok=True)
    return paths


def _file_names(count: int, suffix: str, labels: np.ndarray | None, classes: Sequence[str]) -> list[str]:
    if labels is None:
        return [f"{index:06d}{suffix}" for index in range(count)]
    width = len(str(labels.max()))
    has_folder_names = bool(classes) and _can_be_folders(classes)
    count_by_label: dict[int, int] = {}
    names = []
    for label in labels.tolist():
        number = count_by_label.get(label, 0)
        folder = classes[label] if has_folder_names else f"{label:0{width}d}"
        names.append(f"{folder}/{number:06d}{suffix}")
        count_by_label[label] = number + 1
    return names


def _can_be_folders(classes: Sequence[str]) -> bool:
    """Return whether class names can be names of folders on every system, and read again as they are."""
    is_plain = all(name.isprintable() and name == name.strip() and name[:1] not in ("", ".") for name in classes)
    has_separator = any(set(name) & set('/\\:*?"<>|') for name in classes)
    return is_plain and not has_separator and len({name.casefold() for name in classes}) == len(classes)


def _check_images(images: np.ndarray, labels: np.ndarray | None) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
        raise UsageError(
            f"images: {images.dtype} {list(images.shape)} is not possible. Use uint8 [N, H, W, C] with N at least 1."
        )
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or labels.min() < 0):
        raise UsageError(
            f"labels: {labels.dtype} {list(labels.shape)} is not possible. Use [{len(images)}] integers from 0 on."
        )


def _to_pil(pixels: np.ndarray) -> Image.Image:  # [H, W, C] uint8
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
