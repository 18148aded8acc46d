"""The images of a run as data URIs, within a limit of characters."""

import base64
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

MAX_GRIDS = 16  # on a page
MAX_PRINTED_GRIDS = 5  # of them, when the page is printed
MAX_DECODED_PIXELS = 24_000_000  # to shrink grids: a page must be written within two seconds
PNG_END = b"IEND\xaeB`\x82"  # the last bytes of every complete PNG
MAX_PIXELATED_WIDTH = 400  # pixels; narrower grids are enlarged with hard edges


@dataclass(frozen=True)
class EmbeddedImage:
    """An image as a data URI."""

    name: str  # of the file
    width: int  # pixels
    uri: str
    is_original: bool  # the bytes of the file; otherwise shrunk or compressed

    @property
    def is_small(self) -> bool:
        """Whether the page enlarges it with hard edges."""
        return self.width <= MAX_PIXELATED_WIDTH


@dataclass(frozen=True)
class ImageGallery:
    """The sample grids of a run and its real images."""

    fakes: tuple[tuple[int, EmbeddedImage], ...]  # (kimg, grid), oldest first
    reals: EmbeddedImage | None
    notes: tuple[str, ...]

    @property
    def printed_kimg(self) -> set[int]:
        """The kimg of the grids that a printed page shows."""
        return {self.fakes[i][0] for i in evenly_spaced(len(self.fakes), MAX_PRINTED_GRIDS)}


def find_sample_grids(run_dir: Path) -> list[tuple[int, Path]]:
    """Return `(kimg, path)` of every `fakes<kimg>.png`, oldest first."""
    files = ((re.fullmatch(r"fakes(\d{6,})\.png", path.name), path) for path in run_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in files if match)


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """Return `max_count` of `count` indices at most, first and last included: `evenly_spaced(9, 3) == [0, 4, 8]`."""
    if count <= max_count:
        return list(range(count))
    if max_count == 1:
        return [count - 1]
    return [round(i * (count - 1) / (max_count - 1)) for i in range(max_count)]


def make_gallery(run_dir: Path, max_chars: int) -> ImageGallery:
    """Embed at most MAX_GRIDS of the run's grids and its reals, in at most `max_chars` characters of page.

    If all files fit, their bytes are embedded unchanged. Otherwise the latest grid and the reals get a quarter of the
    characters each and the other grids share the rest; there are fewer of them if shrinking all would take too long.
    """
    grids = find_sample_grids(run_dir)
    reals = run_dir / "reals.png"
    chosen = [grids[i] for i in evenly_spaced(len(grids), MAX_GRIDS)]
    files = {path: path.read_bytes() for _, path in [*chosen, (0, reals)] if path.is_file()}
    large = max_chars
    small = max_chars
    if sum(_data_uri_length(len(data)) for data in files.values()) > max_chars:
        max_grids = MAX_DECODED_PIXELS // max(map(_num_pixels, files.values()))
        chosen = [chosen[i] for i in evenly_spaced(len(chosen), max(max_grids, 2))]
        large = max_chars // 4
        small = max_chars // 2 // max(len(chosen) - 1, 1)

    latest = chosen[-1][1] if chosen else None
    images: dict[Path, EmbeddedImage | None] = {}
    for path in [*(path for _, path in chosen), reals]:
        if path in files:
            images[path] = embed_png(path.name, files[path], large if path in (latest, reals) else small)
    fakes = tuple((kimg, image) for kimg, path in chosen if (image := images.get(path)))
    left_out = [path for path in [*(path for _, path in chosen), *images] if not images.get(path)]
    notes = [f"{path.name} is not a complete image and is left out." for path in dict.fromkeys(left_out)]
    if len(chosen) < len(grids):
        notes.append(f"{len(chosen)} of the run's {len(grids)} grids.")
    if not all(image.is_original for image in images.values() if image):
        notes.append("Some are shrunk or compressed here; the run folder has the originals.")
    return ImageGallery(fakes, images.get(reals), tuple(notes))


def latest_grid(run_dir: Path, max_chars: int) -> tuple[int, EmbeddedImage] | None:
    """Return `(kimg, image)` of the newest complete grid, in at most `max_chars` characters of page."""
    for kimg, path in reversed(find_sample_grids(run_dir)):
        if image := embed_image(path, max_chars):
            return kimg, image
    return None


def embed_image(path: Path, max_chars: int) -> EmbeddedImage | None:
    """Embed a PNG file in at most `max_chars` characters of page. None if it is missing or incomplete."""
    return embed_png(path.name, path.read_bytes(), max_chars) if path.is_file() else None


def _data_uri_length(num_bytes: int) -> int:
    return 4 * (num_bytes // 3 + 1) + len("data:image/jpeg;base64,")


def _num_pixels(data: bytes) -> int:
    image = _open_image(data)
    return image.width * image.height if image else 1


def _open_image(data: bytes) -> Image.Image | None:
    """Return None for anything but an image, and for one so large that Pillow takes it for an attack."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data))
        except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning):
            return None


def embed_png(name: str, data: bytes, max_chars: int) -> EmbeddedImage | None:
    """Embed the content of a PNG file in at most `max_chars` characters of page. None if it is incomplete."""
    image = _open_image(data)
    if image is None or not data.endswith(PNG_END):
        return None
    if _data_uri_length(len(data)) <= max_chars:
        return EmbeddedImage(name, image.width, _data_uri("png", data), is_original=True)
    jpeg = _compress_to_jpeg(image, max_chars)
    return EmbeddedImage(name, image.width, _data_uri("jpeg", jpeg), is_original=False) if jpeg else None


def _compress_to_jpeg(image: Image.Image, max_chars: int) -> bytes | None:
    """Encode as JPEG, halving the size until it fits."""
    try:
        image = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # Pillow raises these for damaged data
        return None
    while True:
        out = io.BytesIO()
        image.save(out, "jpeg", quality=90)
        if _data_uri_length(out.tell()) <= max_chars:
            return out.getvalue()
        if min(image.size) < 32:
            return None
        image = image.reduce(2)


def _data_uri(image_format: str, data: bytes) -> str:
    return f"data:image/{image_format};base64,{base64.b64encode(data).decode()}"
