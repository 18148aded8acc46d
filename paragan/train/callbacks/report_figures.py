"""What a report shows of a model beside its grids: nearest training images, and the way from one sample to another.

RUN/figures/figures.json, *.png        read by report/figures.py

    make_figures(folder, dataset)  # at the end of a run, and by `paragan report` where the model is newer

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

from paragan.core.atomic_write import atomic_output, atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.eval.features import FeatureSpace, pixels
from paragan.models.interpolation import label_embeddings, sample_interpolated, slerp
from paragan.models.model import Model, find_model_dir, label_dir, load_model
from paragan.models.sampler import LatentSource, PerLabelSampler, Sampler, sample_latent
from paragan.report.embedded_images import evenly_spaced
from paragan.report.figures import FIGURES_DIR, INDEX_FILE, read_index
from paragan.train.callbacks.sample_images import SAMPLE_SEED
from paragan.train.console import RunConsole

MAX_SEARCH_VALUES = 200_000_000  # numbers of real images, features times images, that neighbours are sought among
MAX_THOROUGH_SEARCH_VALUES = 10 * MAX_SEARCH_VALUES  # where somebody waits for just that
BLOCK_IMAGES = 256  # real images that are looked at together
NUM_FAKES, NUM_NEIGHBORS, NUM_BASELINE_REALS = (
    10,
    5,
    50,
)  # fakes, neighbours of each, reals whose own neighbours say what is usual
INTERPOLATION_STEPS, NUM_PATHS = 8, 4  # images of a strip, strips of a kind
MAX_SIDE_PX = 128  # pixels of an image in a strip, at most
GAP_PX = 6  # between a fake and its neighbours

CLASS_INTERPOLATION_TEXT = (
    "The latent stays; what the generator knows of the class, its embeddings, goes in a straight line from one "
    "to the other."
)


@dataclass(frozen=True)
class ImageStrip:
    """Images [n, C, H, W] uint8 side by side; the first is apart from the others if they are its neighbours."""

    images: Tensor
    caption: str
    alt: str
    gap_after_first: bool = False


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    description: str
    strips: tuple[ImageStrip, ...]


def make_figures(
    folder: Path,
    dataset: Dataset | None,
    *,
    nets: Any = None,
    device: torch.device = CPU,
    space: FeatureSpace | None = None,
    max_search_values: int = MAX_SEARCH_VALUES,
    no_neighbors_reason: str = "",
) -> None:
    """Make what there is to show of the model in a run folder, and write it there: nothing of one that makes no images
    from latents. Unusable where it cannot be loaded.

    images : the data it was trained on; None where they cannot be had
    nets   : networks of the user's own
    space  : where neighbours are near (pixels)
    reason : why no neighbours are looked for, if they are not
    """
    weights = weights_digest(folder)  # before they are read: a run may replace them, and what is shown is old then
    model = load_model(folder, device, nets, dataset)
    space = space or pixels(model.spec.resolution, model.spec.channels)
    if dataset is not None and not no_neighbors_reason and str(model.config.get("data")) != dataset.fingerprint:
        no_neighbors_reason = "the data there are not those that the model was trained on"
    fakes, shown, thorough = ModelSamples(model, _trained_labels(folder, model)), list[Figure](), True
    if fakes.is_available:
        if dataset is not None and not no_neighbors_reason:
            of = len(dataset.images)
            among = min(of, max(2 * NUM_NEIGHBORS, max_search_values // space.num_features))
            thorough = among == of or max_search_values >= MAX_THOROUGH_SEARCH_VALUES
            shown.append(nearest_neighbors_figure(fakes, dataset, space, among))
        shown += interpolation_figures(fakes)
    about = {
        "format": 1,
        "model": weights,
        "kimg": model.kimg,
        "space": space.name,
        "thorough": thorough and not (fakes.is_available and no_neighbors_reason),
        "missing_reasons": [f"Nearest training images are not shown: {no_neighbors_reason}."]
        if fakes.is_available and no_neighbors_reason
        else [],
    }
    write_figures(folder / FIGURES_DIR, shown, about)


def make_final_figures(folder: Path, nets: Any, dataset: Dataset, device: torch.device, console: RunConsole) -> None:
    """What the end of a run leaves. Neighbours are sought among data in memory alone: whoever trains does not wait."""
    reason = "" if dataset.in_memory else "the data are streamed; `paragan report` looks for them"
    try:
        make_figures(folder, dataset, nets=nets, device=device, no_neighbors_reason=reason)
    except (UsageError, OSError) as error:
        console.print(f"the report shows no neighbours and interpolations: {error}")


def is_outdated(folder: Path, space: str) -> bool:
    """Whether the model in a run folder has something to show that is not there, or is of a former model."""
    index = read_index(folder)
    found = index.get("model"), index.get("space"), index.get("thorough")
    return found != (weights_digest(folder), space, True)


def weights_digest(folder: Path) -> str:
    """16 hex digits of the weights of the generator, or of those of all labels."""
    told, where = hashlib.sha256(), find_model_dir(folder)
    for file in sorted(where.rglob("model.safetensors")):
        told.update(str(file.relative_to(where)).encode())
        with file.open("rb") as weights:
            told.update(hashlib.file_digest(weights, "sha256").digest())
    return told.hexdigest()[:16]


# Fakes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSamples:
    """Images of a model. labels: those that it has a generator for; () without classes."""

    model: Model
    labels: tuple[int, ...]

    @property
    def is_available(self) -> bool:
        """Whether there are any: images, made of latents."""
        if self.model.spec.array_shape:
            return False
        sampler = self.sampler
        return bool(self.labels) if isinstance(sampler, PerLabelSampler) else isinstance(sampler.source, LatentSource)

    @property
    def sampler(self) -> Sampler | PerLabelSampler:
        return self.model.sampler

    def latent(self, index: int) -> Tensor:
        """[latent] of a sample."""
        size = self._sampler_for(self.labels[0] if self.labels else None).latent_size
        return torch.from_numpy(sample_latent(SAMPLE_SEED, index, size))

    def first_samples(self, count: int) -> tuple[Tensor, list[int | None]]:
        """[n, C, H, W] uint8, those that a grid begins with, and their labels."""
        if not self.labels:
            return self.sampler.images(range(count), None, SAMPLE_SEED), [None] * count
        labels = self.labels[:count]
        return self.sampler.images(range(len(labels)), np.array(labels, np.int64), SAMPLE_SEED), list(labels)

    def interpolate(self, endpoints: tuple[int, int], label: int | None) -> Tensor:
        """[STEPS, C, H, W] uint8, from one sample's latent to another's."""
        t, (a, b) = (
            torch.linspace(0, 1, INTERPOLATION_STEPS),
            (self.latent(index).expand(INTERPOLATION_STEPS, -1) for index in endpoints),
        )
        conditional = label is not None and isinstance(self.sampler, Sampler)
        return sample_interpolated(
            self._sampler_for(label), slerp(a, b, t), (label, label) if label is not None and conditional else None
        )

    def class_name(self, label: int | None) -> str:
        return "" if label is None else self.model.classes[label]

    def _sampler_for(self, label: int | None) -> Sampler:
        if isinstance(self.sampler, Sampler):
            return self.sampler
        assert label is not None
        return self.sampler.for_label(label)


def _trained_labels(folder: Path, model: Model) -> tuple[int, ...]:
    """Labels that have images in the data, and, in a model per label, a generator."""
    labels = [label for label, share in enumerate(model.sampler.prior.probabilities) if share > 0]
    if isinstance(model.sampler, PerLabelSampler):
        where = find_model_dir(folder)
        labels = [label for label in labels if (label_dir(where, label) / "model.safetensors").exists()]
    return tuple(labels)


# Neighbours -------------------------------------------------------------------------------------------


def nearest_neighbors_figure(samples: ModelSamples, dataset: Dataset, space: FeatureSpace, num_searched: int) -> Figure:
    """Some fakes, and beside each the training images that are nearest to it."""
    made, labels = samples.first_samples(NUM_FAKES)
    rows = np.unique(np.linspace(0, len(dataset.images) - 1, num_searched).round().astype(np.int64))
    probes = rows[evenly_spaced(len(rows), NUM_BASELINE_REALS)]
    asking = torch.cat([space(made), space(_load_images(dataset, probes))]).double()
    blocks = (rows[start : start + BLOCK_IMAGES] for start in range(0, len(rows), BLOCK_IMAGES))
    apart, where = k_nearest(asking, ((block, space(_load_images(dataset, block))) for block in blocks), probes)
    usual = float(apart[len(made) :, 0].median())
    strips = tuple(
        _neighbor_strip(samples, dataset, one, label, apart[i], where[i])
        for i, (one, label) in enumerate(zip(made, labels))
    )
    share = f"all {len(rows):,}" if num_searched == len(dataset.images) else f"{len(rows):,} of {len(dataset.images):,}"
    about = (
        f"On the left a generated image, then the {NUM_NEIGHBORS} nearest to it among {share} training images, by Euclidean "
        f"distance of {space.name}. A training image is {usual:.3g} from its own nearest neighbour, in the median "
        f"of {len(probes)}: a fake that is much nearer than that may be a copy."
    )
    return Figure("neighbours", "Nearest training images", about, strips)


def k_nearest(
    queries: Tensor, blocks: Iterator[tuple[np.ndarray, Tensor]], query_rows: np.ndarray
) -> tuple[Tensor, np.ndarray]:
    """Distances [n, NEAREST] of the nearest of all blocks' features [m, F] to each of [n, F], and their rows. own: the
    rows of the last ones that ask, which are no neighbours of themselves."""
    best = torch.full((len(queries), NUM_NEIGHBORS), torch.inf, dtype=torch.float64)
    where = torch.zeros((len(queries), NUM_NEIGHBORS), dtype=torch.int64)
    mine = torch.full((len(queries),), -1)
    mine[len(queries) - len(query_rows) :] = torch.from_numpy(query_rows)
    for rows, features in blocks:
        there = torch.from_numpy(rows)
        apart = torch.cdist(queries, features.double())
        apart[mine[:, None] == there] = torch.inf
        every, found = torch.cat([best, apart], 1), torch.cat([where, there.expand(len(queries), -1)], 1)
        best, places = every.topk(NUM_NEIGHBORS, largest=False)
        where = found.gather(1, places)
    return best, where.numpy()


def _neighbor_strip(
    samples: ModelSamples, dataset: Dataset, fake: Tensor, label: int | None, distances: Tensor, rows: np.ndarray
) -> ImageStrip:
    there = [place for place in range(len(rows)) if torch.isfinite(distances[place])]
    beside = _load_images(dataset, rows[there])
    told = f"{samples.class_name(label)} · " if label is not None else ""
    caption = f"{told}nearest at {distances[0]:.3g}"
    if label is not None and dataset.labels is not None:
        caption += f": {', '.join(dataset.classes[label] for label in dataset.labels[rows[there]])}"
    asked = f" of class {samples.class_name(label)}" if label is not None else ""
    alt = f"a generated image{asked} and its {len(there)} nearest training images"
    return ImageStrip(torch.cat([fake[None], beside]), caption, alt, gap_after_first=True)


def _load_images(dataset: Dataset, rows: np.ndarray) -> Tensor:
    """[n, C, R, R] uint8 of the data."""
    return torch.from_numpy(np.ascontiguousarray(dataset.images[rows].transpose(0, 3, 1, 2)))


# Interpolations ---------------------------------------------------------------------------------------


def interpolation_figures(samples: ModelSamples) -> list[Figure]:
    """From one latent to another, and, where one network knows all classes, from one class to another."""
    chosen = [samples.labels[place] for place in evenly_spaced(len(samples.labels), NUM_PATHS)] or [None] * NUM_PATHS
    strips = tuple(
        ImageStrip(
            samples.interpolate((2 * path, 2 * path + 1), label),
            f"class {samples.class_name(label)}" if label is not None else f"latents {2 * path} to {2 * path + 1}",
            f"{INTERPOLATION_STEPS} images on the way from one latent to another",
        )
        for path, label in enumerate(chosen)
    )
    about = f"{INTERPOLATION_STEPS} steps from one latent to another, by spherical interpolation. The ends are samples."
    found = [Figure("latents", "Between latents", about, strips)]
    between = _class_interpolation_strips(samples)
    return [*found, Figure("classes", "Between classes", CLASS_INTERPOLATION_TEXT, between)] if between else found


def _class_interpolation_strips(samples: ModelSamples) -> tuple[ImageStrip, ...]:
    """Of one latent from class to class; none where the generator has no embedding of classes."""
    sampler = samples.sampler
    if len(samples.labels) < 2 or not isinstance(sampler, Sampler) or not label_embeddings(sampler):
        return ()
    ends, t = (
        [samples.labels[place] for place in evenly_spaced(len(samples.labels), 2 * NUM_PATHS)],
        torch.linspace(0, 1, INTERPOLATION_STEPS),
    )
    return tuple(
        ImageStrip(
            sample_interpolated(sampler, samples.latent(path).expand(INTERPOLATION_STEPS, -1), (a, b), t),
            f"{samples.class_name(a)} to {samples.class_name(b)}",
            f"{INTERPOLATION_STEPS} images on the way from class {samples.class_name(a)} to class {samples.class_name(b)}",
        )
        for path, (a, b) in enumerate(zip(ends[::2], ends[1::2]))
    )


# Files ------------------------------------------------------------------------------------------------


def write_figures(folder: Path, figures: Sequence[Figure], metadata: dict[str, Any]) -> None:
    """The pictures first, then what is said of them; former ones go."""
    folder.mkdir(exist_ok=True)
    listed = list[dict[str, Any]]()
    for one in figures:
        strips = list[dict[str, str]]()
        for number, strip in enumerate(one.strips):
            name = f"{one.name}-{number:02d}.png"
            with atomic_output(folder / name) as hidden:
                render_strip(strip).save(hidden, format="png")
            strips.append({"file": name, "caption": strip.caption, "alt": strip.alt})
        listed.append({"title": one.title, "description": one.description, "strips": strips})
    atomic_write_bytes(folder / INDEX_FILE, json.dumps(metadata | {"figures": listed}, indent=1).encode())
    kept = {strip["file"] for one in listed for strip in one["strips"]}
    for file in folder.glob("*.png"):
        if file.name not in kept:
            file.unlink(missing_ok=True)


def render_strip(strip: ImageStrip) -> Image.Image:
    """The images of a strip side by side, enlarged or made smaller to be seen."""
    pixels = strip.images.permute(0, 2, 3, 1).numpy()  # [n, H, W, C]
    side = max(1, 64 // pixels.shape[1]) * pixels.shape[1]
    tiles = [_resize_tile(one, min(side, MAX_SIDE_PX)) for one in pixels]
    gap = GAP_PX if strip.gap_after_first else 0
    sheet = Image.new(tiles[0].mode, (gap + sum(tile.width for tile in tiles), tiles[0].height), "grey")
    across = 0
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (across, 0))
        across += tile.width + (gap if place == 0 else 0)
    return sheet


def _resize_tile(pixels: np.ndarray, side_px: int) -> Image.Image:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    how = Image.Resampling.NEAREST if side_px >= image.width else Image.Resampling.LANCZOS
    return image.resize((side_px, side_px), how)
