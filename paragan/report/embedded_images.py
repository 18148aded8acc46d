"""The pictures of a run, as data inside a page."""

import base64
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

GRIDS = 16  # a page shows at most
PRINTED = 5  # of them
DECODED = 24_000_000  # pixels decoded at most to make grids smaller: a page is written within two seconds
END = b"IEND\xaeB`\x82"  # of every PNG that was written to its end
SMALL = 400  # pixels across, up to which a grid is shown enlarged with hard edges


@dataclass(frozen=True)
class Picture:
    name: str  # the file's
    width: int
    uri: str
    exact: bool  # the file's own bytes; otherwise smaller or compressed

    @property
    def small(self) -> bool:
        return self.width <= SMALL


@dataclass(frozen=True)
class Gallery:
    fakes: tuple[tuple[int, Picture], ...]  # by kimg, oldest first
    reals: Picture | None
    notes: tuple[str, ...]

    @property
    def printed(self) -> set[int]:
        """The kimg of the latest and of a few before it, which a print shows."""
        return {self.fakes[place][0] for place in spread(len(self.fakes), PRINTED)}


def grids(run_dir: Path) -> list[tuple[int, Path]]:
    """`(kimg, path)` of every `fakes<kimg>.png`, oldest first."""
    found = ((re.fullmatch(r"fakes(\d{6,})\.png", path.name), path) for path in run_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly, with the first and the last: `spread(9, 3) == [0, 4, 8]`."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def gallery(run_dir: Path, room: int) -> Gallery:
    """At most GRIDS of the run's grids and its reals, in at most `room` characters of page.

    Files that fit go in as they are. Where they do not, the latest and the reals get a quarter of the room
    each; the others share the rest, and are fewer if making them all smaller took long.
    """
    found, real = grids(run_dir), run_dir / "reals.png"
    chosen = [found[place] for place in spread(len(found), GRIDS)]
    files = {path: path.read_bytes() for _, path in [*chosen, (0, real)] if path.exists()}
    large = small = room
    if sum(_encoded(len(data)) for data in files.values()) > room:
        affordable = DECODED // max(map(_pixels, files.values()))
        chosen = [chosen[place] for place in spread(len(chosen), max(affordable, 2))]
        large, small = room // 4, room // 2 // max(len(chosen) - 1, 1)

    latest = chosen[-1][1] if chosen else None
    shown = {
        path: _picture(path.name, files[path], large if path in (latest, real) else small)
        for path in [*(path for _, path in chosen), real]
        if path in files
    }
    fakes = tuple((kimg, picture) for kimg, path in chosen if (picture := shown[path]))
    notes = [f"{path.name} is no whole picture and is left out." for path in shown if not shown[path]]
    if len(chosen) < len(found):
        notes.append(f"{len(chosen)} of the run's {len(found)} grids.")
    if not all(picture.exact for picture in shown.values() if picture):
        notes.append("Some are smaller or compressed here; the run folder has them whole.")
    return Gallery(fakes, shown.get(real), tuple(notes))


def latest(run_dir: Path, limit: int) -> tuple[int, Picture] | None:
    """`(kimg, picture)` of the newest grid that is whole, in at most `limit` characters of page."""
    for kimg, path in reversed(grids(run_dir)):
        if found := picture_in(path, limit):
            return kimg, found
    return None


def picture_in(path: Path, limit: int) -> Picture | None:
    """A PNG file in at most `limit` characters of page; None where there is none, or it is not whole."""
    return _picture(path.name, path.read_bytes(), limit) if path.is_file() else None


def _encoded(size: int) -> int:
    return 4 * (size // 3 + 1) + len("data:image/jpeg;base64,")


def _pixels(data: bytes) -> int:
    image = _open(data)
    return image.width * image.height if image else 1


def _open(data: bytes) -> Image.Image | None:
    """None for what is no picture, or one so large that Pillow takes it for an attack."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data))
        except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning):
            return None


def _picture(name: str, data: bytes, limit: int) -> Picture | None:
    image = _open(data)
    if image is None or not data.endswith(END):
        return None
    if _encoded(len(data)) <= limit:
        return Picture(name, image.width, _uri("png", data), exact=True)
    smaller = _squeeze(image, limit)
    return Picture(name, image.width, _uri("jpeg", smaller), exact=False) if smaller else None


def _squeeze(image: Image.Image, limit: int) -> bytes | None:
    """As JPEG, halved until it fits."""
    try:
        image = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for damaged data
        return None
    while True:
        out = io.BytesIO()
        image.save(out, "jpeg", quality=90)
        if _encoded(out.tell()) <= limit:
            return out.getvalue()
        if min(image.size) < 32:
            return None
        image = image.reduce(2)


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
