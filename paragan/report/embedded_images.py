"""The pictures of a run, as data inside a page."""

import base64
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

MAX_GRIDS = 16  # a page shows at most
MAX_PRINTED_GRIDS = 5  # of them
MAX_DECODED_PIXELS = 24_000_000  # pixels decoded at most to make grids smaller: a page is written within two seconds
PNG_END = b"IEND\xaeB`\x82"  # of every PNG that was written to its end
MAX_PIXELATED_WIDTH = 400  # pixels across, up to which a grid is shown enlarged with hard edges


@dataclass(frozen=True)
class EmbeddedImage:
    name: str  # the file's
    width: int
    uri: str
    is_original: bool  # the file's own bytes; otherwise smaller or compressed

    @property
    def is_small(self) -> bool:
        return self.width <= MAX_PIXELATED_WIDTH


@dataclass(frozen=True)
class ImageGallery:
    fakes: tuple[tuple[int, EmbeddedImage], ...]  # by kimg, oldest first
    reals: EmbeddedImage | None
    notes: tuple[str, ...]

    @property
    def printed_kimg(self) -> set[int]:
        """The kimg of the latest and of a few before it, which a print shows."""
        return {self.fakes[place][0] for place in evenly_spaced(len(self.fakes), MAX_PRINTED_GRIDS)}


def find_sample_grids(run_dir: Path) -> list[tuple[int, Path]]:
    """`(kimg, path)` of every `fakes<kimg>.png`, oldest first."""
    found = ((re.fullmatch(r"fakes(\d{6,})\.png", path.name), path) for path in run_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """At most `most` of `count` places, evenly, with the first and the last: `spread(9, 3) == [0, 4, 8]`."""
    if count <= max_count:
        return list(range(count))
    if max_count == 1:
        return [count - 1]
    return [round(place * (count - 1) / (max_count - 1)) for place in range(max_count)]


def make_gallery(run_dir: Path, max_chars: int) -> ImageGallery:
    """At most GRIDS of the run's grids and its reals, in at most `room` characters of page.

    Files that fit go in as they are. Where they do not, the latest and the reals get a quarter of the room
    each; the others share the rest, and are fewer if making them all smaller took long.
    """
    found, real = find_sample_grids(run_dir), run_dir / "reals.png"
    chosen = [found[place] for place in evenly_spaced(len(found), MAX_GRIDS)]
    files = {path: path.read_bytes() for _, path in [*chosen, (0, real)] if path.exists()}
    large = small = max_chars
    if sum(_data_uri_length(len(data)) for data in files.values()) > max_chars:
        affordable = MAX_DECODED_PIXELS // max(map(_num_pixels, files.values()))
        chosen = [chosen[place] for place in evenly_spaced(len(chosen), max(affordable, 2))]
        large, small = max_chars // 4, max_chars // 2 // max(len(chosen) - 1, 1)

    latest = chosen[-1][1] if chosen else None
    shown = {
        path: _embed_bytes(path.name, files[path], large if path in (latest, real) else small)
        for path in [*(path for _, path in chosen), real]
        if path in files
    }
    fakes = tuple((kimg, picture) for kimg, path in chosen if (picture := shown[path]))
    notes = [f"{path.name} is no whole picture and is left out." for path in shown if not shown[path]]
    if len(chosen) < len(found):
        notes.append(f"{len(chosen)} of the run's {len(found)} grids.")
    if not all(picture.is_original for picture in shown.values() if picture):
        notes.append("Some are smaller or compressed here; the run folder has them whole.")
    return ImageGallery(fakes, shown.get(real), tuple(notes))


def latest_grid(run_dir: Path, max_chars: int) -> tuple[int, EmbeddedImage] | None:
    """`(kimg, picture)` of the newest grid that is whole, in at most `limit` characters of page."""
    for kimg, path in reversed(find_sample_grids(run_dir)):
        if found := embed_image(path, max_chars):
            return kimg, found
    return None


def embed_image(path: Path, max_chars: int) -> EmbeddedImage | None:
    """A PNG file in at most `limit` characters of page; None where there is none, or it is not whole."""
    return _embed_bytes(path.name, path.read_bytes(), max_chars) if path.is_file() else None


def _data_uri_length(num_bytes: int) -> int:
    return 4 * (num_bytes // 3 + 1) + len("data:image/jpeg;base64,")


def _num_pixels(data: bytes) -> int:
    image = _open_image(data)
    return image.width * image.height if image else 1


def _open_image(data: bytes) -> Image.Image | None:
    """None for what is no picture, or one so large that Pillow takes it for an attack."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data))
        except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning):
            return None


def _embed_bytes(name: str, data: bytes, max_chars: int) -> EmbeddedImage | None:
    image = _open_image(data)
    if image is None or not data.endswith(PNG_END):
        return None
    if _data_uri_length(len(data)) <= max_chars:
        return EmbeddedImage(name, image.width, _data_uri("png", data), is_original=True)
    smaller = _compress_to_jpeg(image, max_chars)
    return EmbeddedImage(name, image.width, _data_uri("jpeg", smaller), is_original=False) if smaller else None


def _compress_to_jpeg(image: Image.Image, max_chars: int) -> bytes | None:
    """As JPEG, halved until it fits."""
    try:
        image = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for damaged data
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
