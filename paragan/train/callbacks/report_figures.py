"""What a report shows of a model beside its grids: nearest training images, and the way from one sample to another.

RUN/exhibits/exhibits.json, *.png        read by report/exhibits.py

    exhibit(folder, images)  # at the end of a run, and by `paragan report` where the model is newer

Of generators that make images from latents. A network is asked for a few dozen images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paragan.core.atomic_write import aside, write_whole
from paragan.core.errors import Unusable
from paragan.core.rng import CPU
from paragan.data.dataset import Images
from paragan.eval.features import FeatureSpace, pixels
from paragan.models.interpolation import embeddings, made_of, slerp
from paragan.models.model import Model, load_model, model_folder, part
from paragan.models.sampler import Latents, Merged, Sampler, latent
from paragan.report.embedded_images import spread
from paragan.report.figures import FOLDER, INDEX, read_index
from paragan.train.callbacks.sample_images import GRID_SEED
from paragan.train.console import Screen

LOOKED_AT = 200_000_000  # numbers of real images, features times images, that neighbours are sought among
THOROUGH = 10 * LOOKED_AT  # where somebody waits for just that
BLOCK = 256  # real images that are looked at together
SHOWN, NEAREST, REALS = 10, 5, 50  # fakes, neighbours of each, reals whose own neighbours say what is usual
STEPS, PATHS = 8, 4  # images of a strip, strips of a kind
SIDE = 128  # pixels of an image in a strip, at most
GAP = 6  # between a fake and its neighbours

BETWEEN = (
    "The latent stays; what the generator knows of the class, its embeddings, goes in a straight line from one "
    "to the other."
)


@dataclass(frozen=True)
class Strip:
    """Images [n, C, H, W] uint8 side by side; the first is apart from the others if they are its neighbours."""

    images: Tensor
    caption: str
    alt: str
    apart: bool = False


@dataclass(frozen=True)
class Exhibit:
    name: str
    title: str
    about: str
    strips: tuple[Strip, ...]


def exhibit(
    folder: Path,
    images: Images | None,
    *,
    nets: Any = None,
    device: torch.device = CPU,
    space: FeatureSpace | None = None,
    most: int = LOOKED_AT,
    reason: str = "",
) -> None:
    """Make what there is to show of the model in a run folder, and write it there: nothing of one that makes no images
    from latents. Unusable where it cannot be loaded.

    images : the data it was trained on; None where they cannot be had
    nets   : networks of the user's own
    space  : where neighbours are near (pixels)
    reason : why no neighbours are looked for, if they are not
    """
    weights = digest(folder)  # before they are read: a run may replace them, and what is shown is old then
    model = load_model(folder, device, nets, images)
    space = space or pixels(model.spec.resolution, model.spec.channels)
    if images is not None and not reason and str(model.config.get("data")) != images.fingerprint:
        reason = "the data there are not those that the model was trained on"
    fakes, shown, thorough = Fakes(model, _trained(folder, model)), list[Exhibit](), True
    if fakes.there:
        if images is not None and not reason:
            of = len(images.images)
            among = min(of, max(2 * NEAREST, most // space.num_features))
            thorough = among == of or most >= THOROUGH
            shown.append(neighbours(fakes, images, space, among))
        shown += interpolations(fakes)
    about = {
        "format": 1,
        "model": weights,
        "kimg": model.kimg,
        "space": space.name,
        "thorough": thorough and not (fakes.there and reason),
        "missing": [f"Nearest training images are not shown: {reason}."] if fakes.there and reason else [],
    }
    write(folder / FOLDER, shown, about)


def at_end(folder: Path, nets: Any, images: Images, device: torch.device, screen: Screen) -> None:
    """What the end of a run leaves. Neighbours are sought among data in memory alone: whoever trains does not wait."""
    reason = "" if images.held else "the data are streamed; `paragan report` looks for them"
    try:
        exhibit(folder, images, nets=nets, device=device, reason=reason)
    except (Unusable, OSError) as error:
        screen.say(f"the report shows no neighbours and interpolations: {error}")


def stale(folder: Path, space: str) -> bool:
    """Whether the model in a run folder has something to show that is not there, or is of a former model."""
    index = read_index(folder)
    found = index.get("model"), index.get("space"), index.get("thorough")
    return found != (digest(folder), space, True)


def digest(folder: Path) -> str:
    """16 hex digits of the weights of the generator, or of those of all labels."""
    told, where = hashlib.sha256(), model_folder(folder)
    for file in sorted(where.rglob("model.safetensors")):
        told.update(str(file.relative_to(where)).encode())
        with file.open("rb") as weights:
            told.update(hashlib.file_digest(weights, "sha256").digest())
    return told.hexdigest()[:16]


# Fakes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fakes:
    """Images of a model. labels: those that it has a generator for; () without classes."""

    model: Model
    labels: tuple[int, ...]

    @property
    def there(self) -> bool:
        """Whether there are any: images, made of latents."""
        if self.model.spec.values:
            return False
        sampler = self.sampler
        return bool(self.labels) if isinstance(sampler, Merged) else isinstance(sampler.source, Latents)

    @property
    def sampler(self) -> Sampler | Merged:
        return self.model.sampler

    def latent(self, index: int) -> Tensor:
        """[latent] of a sample."""
        size = self._of(self.labels[0] if self.labels else None).latent
        return torch.from_numpy(latent(GRID_SEED, index, size))

    def first(self, count: int) -> tuple[Tensor, list[int | None]]:
        """[n, C, H, W] uint8, those that a grid begins with, and their labels."""
        if not self.labels:
            return self.sampler.images(range(count), None, GRID_SEED), [None] * count
        labels = self.labels[:count]
        return self.sampler.images(range(len(labels)), np.array(labels, np.int64), GRID_SEED), list(labels)

    def way(self, ends: tuple[int, int], label: int | None) -> Tensor:
        """[STEPS, C, H, W] uint8, from one sample's latent to another's."""
        t, (a, b) = torch.linspace(0, 1, STEPS), (self.latent(index).expand(STEPS, -1) for index in ends)
        conditional = label is not None and isinstance(self.sampler, Sampler)
        return made_of(self._of(label), slerp(a, b, t), (label, label) if label is not None and conditional else None)

    def called(self, label: int | None) -> str:
        return "" if label is None else self.model.classes[label]

    def _of(self, label: int | None) -> Sampler:
        if isinstance(self.sampler, Sampler):
            return self.sampler
        assert label is not None
        return self.sampler.of(label)


def _trained(folder: Path, model: Model) -> tuple[int, ...]:
    """Labels that have images in the data, and, in a model per label, a generator."""
    labels = [label for label, share in enumerate(model.sampler.prior.shares) if share > 0]
    if isinstance(model.sampler, Merged):
        where = model_folder(folder)
        labels = [label for label in labels if (part(where, label) / "model.safetensors").exists()]
    return tuple(labels)


# Neighbours -------------------------------------------------------------------------------------------


def neighbours(fakes: Fakes, images: Images, space: FeatureSpace, among: int) -> Exhibit:
    """Some fakes, and beside each the training images that are nearest to it."""
    made, labels = fakes.first(SHOWN)
    rows = np.unique(np.linspace(0, len(images.images) - 1, among).round().astype(np.int64))
    probes = rows[spread(len(rows), REALS)]
    asking = torch.cat([space(made), space(_tensor(images, probes))]).double()
    blocks = (rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK))
    apart, where = nearest(asking, ((block, space(_tensor(images, block))) for block in blocks), probes)
    usual = float(apart[len(made) :, 0].median())
    strips = tuple(
        _with_neighbours(fakes, images, one, label, apart[i], where[i])
        for i, (one, label) in enumerate(zip(made, labels))
    )
    share = f"all {len(rows):,}" if among == len(images.images) else f"{len(rows):,} of {len(images.images):,}"
    about = (
        f"On the left a generated image, then the {NEAREST} nearest to it among {share} training images, by Euclidean "
        f"distance of {space.name}. A training image is {usual:.3g} from its own nearest neighbour, in the median "
        f"of {len(probes)}: a fake that is much nearer than that may be a copy."
    )
    return Exhibit("neighbours", "Nearest training images", about, strips)


def nearest(asking: Tensor, blocks: Iterator[tuple[np.ndarray, Tensor]], own: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Distances [n, NEAREST] of the nearest of all blocks' features [m, F] to each of [n, F], and their rows. own: the
    rows of the last ones that ask, which are no neighbours of themselves."""
    best = torch.full((len(asking), NEAREST), torch.inf, dtype=torch.float64)
    where = torch.zeros((len(asking), NEAREST), dtype=torch.int64)
    mine = torch.full((len(asking),), -1)
    mine[len(asking) - len(own) :] = torch.from_numpy(own)
    for rows, features in blocks:
        there = torch.from_numpy(rows)
        apart = torch.cdist(asking, features.double())
        apart[mine[:, None] == there] = torch.inf
        every, found = torch.cat([best, apart], 1), torch.cat([where, there.expand(len(asking), -1)], 1)
        best, places = every.topk(NEAREST, largest=False)
        where = found.gather(1, places)
    return best, where.numpy()


def _with_neighbours(
    fakes: Fakes, images: Images, fake: Tensor, label: int | None, apart: Tensor, rows: np.ndarray
) -> Strip:
    there = [place for place in range(len(rows)) if torch.isfinite(apart[place])]
    beside = _tensor(images, rows[there])
    told = f"{fakes.called(label)} · " if label is not None else ""
    caption = f"{told}nearest at {apart[0]:.3g}"
    if label is not None and images.labels is not None:
        caption += f": {', '.join(images.classes[label] for label in images.labels[rows[there]])}"
    asked = f" of class {fakes.called(label)}" if label is not None else ""
    alt = f"a generated image{asked} and its {len(there)} nearest training images"
    return Strip(torch.cat([fake[None], beside]), caption, alt, apart=True)


def _tensor(images: Images, rows: np.ndarray) -> Tensor:
    """[n, C, R, R] uint8 of the data."""
    return torch.from_numpy(np.ascontiguousarray(images.images[rows].transpose(0, 3, 1, 2)))


# Interpolations ---------------------------------------------------------------------------------------


def interpolations(fakes: Fakes) -> list[Exhibit]:
    """From one latent to another, and, where one network knows all classes, from one class to another."""
    chosen = [fakes.labels[place] for place in spread(len(fakes.labels), PATHS)] or [None] * PATHS
    strips = tuple(
        Strip(
            fakes.way((2 * path, 2 * path + 1), label),
            f"class {fakes.called(label)}" if label is not None else f"latents {2 * path} to {2 * path + 1}",
            f"{STEPS} images on the way from one latent to another",
        )
        for path, label in enumerate(chosen)
    )
    about = f"{STEPS} steps from one latent to another, by spherical interpolation. The ends are samples."
    found = [Exhibit("latents", "Between latents", about, strips)]
    between = _between_classes(fakes)
    return [*found, Exhibit("classes", "Between classes", BETWEEN, between)] if between else found


def _between_classes(fakes: Fakes) -> tuple[Strip, ...]:
    """Of one latent from class to class; none where the generator has no embedding of classes."""
    sampler = fakes.sampler
    if len(fakes.labels) < 2 or not isinstance(sampler, Sampler) or not embeddings(sampler):
        return ()
    ends, t = [fakes.labels[place] for place in spread(len(fakes.labels), 2 * PATHS)], torch.linspace(0, 1, STEPS)
    return tuple(
        Strip(
            made_of(sampler, fakes.latent(path).expand(STEPS, -1), (a, b), t),
            f"{fakes.called(a)} to {fakes.called(b)}",
            f"{STEPS} images on the way from class {fakes.called(a)} to class {fakes.called(b)}",
        )
        for path, (a, b) in enumerate(zip(ends[::2], ends[1::2]))
    )


# Files ------------------------------------------------------------------------------------------------


def write(folder: Path, shown: Sequence[Exhibit], about: dict[str, Any]) -> None:
    """The pictures first, then what is said of them; former ones go."""
    folder.mkdir(exist_ok=True)
    listed = list[dict[str, Any]]()
    for one in shown:
        strips = list[dict[str, str]]()
        for number, strip in enumerate(one.strips):
            name = f"{one.name}-{number:02d}.png"
            with aside(folder / name) as hidden:
                picture(strip).save(hidden, format="png")
            strips.append({"file": name, "caption": strip.caption, "alt": strip.alt})
        listed.append({"title": one.title, "about": one.about, "strips": strips})
    write_whole(folder / INDEX, json.dumps(about | {"shown": listed}, indent=1).encode())
    kept = {strip["file"] for one in listed for strip in one["strips"]}
    for file in folder.glob("*.png"):
        if file.name not in kept:
            file.unlink(missing_ok=True)


def picture(strip: Strip) -> Image.Image:
    """The images of a strip side by side, enlarged or made smaller to be seen."""
    pixels = strip.images.permute(0, 2, 3, 1).numpy()  # [n, H, W, C]
    side = max(1, 64 // pixels.shape[1]) * pixels.shape[1]
    tiles = [_tile(one, min(side, SIDE)) for one in pixels]
    gap = GAP if strip.apart else 0
    sheet = Image.new(tiles[0].mode, (gap + sum(tile.width for tile in tiles), tiles[0].height), "grey")
    across = 0
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (across, 0))
        across += tile.width + (gap if place == 0 else 0)
    return sheet


def _tile(pixels: np.ndarray, side: int) -> Image.Image:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    how = Image.Resampling.NEAREST if side >= image.width else Image.Resampling.LANCZOS
    return image.resize((side, side), how)
