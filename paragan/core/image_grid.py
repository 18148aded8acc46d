"""Images for people and for other programs: a grid, an `.npz`, or a folder of PNGs."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError

GAP_PX, GREY = 2, 128  # pixels between images, and their colour
IMAGE_OUTPUTS_HINT = "grid.png, samples.npz, or a folder (a name without extension)"


def make_grid(images: np.ndarray, columns: int | None = None, scale: int = 1) -> Image.Image:
    """Tile `images` [N, H, W, C] uint8, C 1 or 3, row by row with grey gutters of GAP pixels between them; the rest of
    the last row is grey too.

    `columns` None makes it as square as possible. Each pixel becomes `scale` x `scale` pixels. Raises
    `Unusable` for other arrays, and for columns or scale below 1.
    """
    _check_images(images, None)
    if columns is not None and columns < 1:
        raise UsageError(f"columns: {columns} is not possible: use 1 or more")
    if scale < 1:
        raise UsageError(f"scale: {scale} is not possible: use 1 or more")
    count, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows, height, width = math.ceil(count / columns), height * scale, width * scale
    tiles = np.full((rows * columns, height + GAP_PX, width + GAP_PX, channels), GREY, np.uint8)
    tiles[:count, :height, :width] = images.repeat(scale, axis=1).repeat(scale, axis=2)
    sheet = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    sheet = sheet.reshape(rows * (height + GAP_PX), columns * (width + GAP_PX), channels)
    return _to_pil(sheet[:-GAP_PX, :-GAP_PX])


def integer_upscale(images: np.ndarray) -> int:
    """How much to enlarge images [N, H, W, C] so that people see them: to about 64 pixels."""
    return max(1, 64 // images.shape[1])


def save_images(images: np.ndarray, labels: np.ndarray | None, out: Path) -> None:
    """Write `images` [N, H, W, C] uint8, with `labels` [N] integers or None, in the form that `out` names.

    `.png` is a grid (without labels); `.npz` holds `images` uint8 [N, H, W, C] and, if there are any,
    `labels` int64 [N]; a name without extension is a folder, `out/<label>/000000.png`, or `out/000000.png`
    without labels. Labels are padded with zeros to one width, so that the order of names is theirs. A file
    appears complete or not at all and replaces an older one; a folder must be new or empty. Raises `Unusable`
    for any other name, and if it cannot be written.
    """
    out = Path(out)
    _check_images(images, labels)
    try:
        _writer_for(out)(images, labels, out)
    except OSError as error:
        raise UsageError(f"out: {error.filename or out} cannot be written: {error.strerror or error}") from None


def save_arrays(x: np.ndarray, labels: np.ndarray | None, out: Path, make_picture: Callable[[], np.ndarray]) -> None:
    """Write `x` float32 [N, ...] with `labels` [N]: as an `.npz` that `--data` takes, or as the picture that `draw`
    makes, `.png`. Raises `Unusable` for any other name."""
    suffix = out.suffix.lower()
    if out.is_dir() or suffix not in (".npz", ".png"):
        raise UsageError(f"out: {out} is not possible for numbers: use samples.npz, or picture.png")
    with atomic_output(out) as path, path.open("wb") as file:
        if suffix == ".png":
            Image.fromarray(make_picture()).save(file, format="PNG")
        else:
            np.savez(file, allow_pickle=False, x=x, **({} if labels is None else {"labels": labels.astype(np.int64)}))


def _writer_for(out: Path) -> Callable[[np.ndarray, np.ndarray | None, Path], None]:
    suffix = "" if out.is_dir() else out.suffix.lower()
    writers = {".png": _write_grid, ".npz": _write_npz, "": _write_folder}
    if suffix not in writers:
        raise UsageError(f"out: {out} has the unknown extension {suffix}: use {IMAGE_OUTPUTS_HINT}")
    return writers[suffix]


def _write_grid(images: np.ndarray, labels: np.ndarray | None, out: Path) -> None:
    with atomic_output(out) as path:
        make_grid(images, scale=integer_upscale(images)).save(path, format="PNG")


def _write_npz(images: np.ndarray, labels: np.ndarray | None, out: Path) -> None:
    arrays = {"images": images} if labels is None else {"images": images, "labels": labels.astype(np.int64)}
    with atomic_output(out) as path, path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _write_folder(images: np.ndarray, labels: np.ndarray | None, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"out: {out} is a file: use {IMAGE_OUTPUTS_HINT}")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"out: the folder {out} is not empty: name a new one")
    paths = [out / name for name in _file_names(len(images), labels)]
    for folder in sorted({path.parent for path in paths}):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path, image: _to_pil(image).save(path), paths, images))


def _file_names(count: int, labels: np.ndarray | None) -> list[str]:
    if labels is None:
        return [f"{index:06d}.png" for index in range(count)]
    width = len(str(labels.max()))
    seen: dict[int, int] = {}
    names = []
    for label in labels.tolist():
        names.append(f"{label:0{width}d}/{seen.get(label, 0):06d}.png")
        seen[label] = seen.get(label, 0) + 1
    return names


def _check_images(images: np.ndarray, labels: np.ndarray | None) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise UsageError(
            f"images: {images.dtype} {list(images.shape)} is not possible: "
            "use uint8 [N, H, W, C] with N at least 1, C 1 or 3"
        )
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or labels.min() < 0):
        raise UsageError(
            f"labels: {labels.dtype} {list(labels.shape)} is not possible: use integers from 0 on, [{len(images)}]"
        )


def _to_pil(pixels: np.ndarray) -> Image.Image:  # [H, W, C] uint8
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
