"""Make the figures of a report that need the model: nearest training images, and interpolations between samples.

RUN/figures/figures.json, *.png        read by report/figures.py

The page only reads files, so these are made at the end of a run, and by `paragan report` if the model is newer: the
index holds a digest of the weights. Only generators that make images from latents have figures. Classes are mixed by
hooks on G's embeddings (models/interpolation.py), so no network has to know about it.
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
from paragan.core.image_grid import integer_upscale, visible_channels
from paragan.core.image_shape import ImageSize
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.eval.features import FeatureSpace, pixels
from paragan.models.interpolation import label_embeddings, sample_interpolated, slerp
from paragan.models.model import Model, load_model
from paragan.models.model_files import find_model_dir
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import LatentSource, PerLabelSampler, Sampler, sample_latent
from paragan.report.embedded_images import evenly_spaced
from paragan.report.figures import FIGURES_DIR, INDEX_FILE, read_index
from paragan.train.callbacks.sample_images import SAMPLE_SEED
from paragan.train.console import RunConsole

FORMAT_VERSION = 2
MAX_SEARCH_VALUES = 200_000_000  # features times images among which neighbors are searched
MAX_THOROUGH_SEARCH_VALUES = 10 * MAX_SEARCH_VALUES  # for the command that makes only these figures
BLOCK_IMAGES = 256  # real images in memory at once
NUM_FAKES = 10
NUM_NEIGHBORS = 5  # of each fake
NUM_BASELINE_REALS = 50  # whose own nearest neighbors show which distance is usual
INTERPOLATION_STEPS = 8  # images of a strip
NUM_PATHS = 4  # strips of a kind
MAX_SIDE_PX = 128  # of an image in a strip
GAP_PX = 6  # between a fake and its neighbors

CLASS_INTERPOLATION_TEXT = (
    "The latent stays the same. The generator's embeddings of the class are interpolated linearly from one to the "
    "other."
)


@dataclass(frozen=True)
class ImageStrip:
    """Images [n, C, H, W] uint8 side by side, with a gap after the first if the others are its neighbors."""

    images: Tensor
    caption: str
    alt: str
    gap_after_first: bool = False


@dataclass(frozen=True)
class Figure:
    """A titled group of strips. `name` begins the names of its files."""

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
    """Make the figures of the model in a run folder and write them there; none if it makes no images from latents.

    Args:
        dataset: the data it was trained on; None if they cannot be read.
        nets: networks of the user's own.
        space: features by whose distance neighbors are found (default: pixels).
        max_search_values: limit on features times real images; more are sampled evenly.
        no_neighbors_reason: why no neighbors are searched, shown in the report; "" to search them.

    Raises:
        UsageError: the model cannot be loaded.
    """
    weights = weights_digest(folder)  # before they are read: if a run replaces them meanwhile, the figures are outdated
    decoder = dataset.encoding.decoder if dataset and dataset.encoding else ""
    model = load_model(folder, device, nets, dataset, decoder)
    sample_spec = model.spec.sample_spec
    space = space or pixels(sample_spec.resolution, sample_spec.channels)
    if dataset is not None and not no_neighbors_reason and str(model.config.get("data")) != dataset.fingerprint:
        no_neighbors_reason = "the data there are not those that the model was trained on"
    samples = ModelSamples(model, _trained_labels(folder, model))
    figures: list[Figure] = []
    missing: list[str] = []
    thorough = True
    if samples.is_available:
        if dataset is not None and not no_neighbors_reason:
            reals = dataset.originals
            num_images = len(reals.images)
            num_searched = min(num_images, max(2 * NUM_NEIGHBORS, max_search_values // space.num_features))
            thorough = num_searched == num_images or max_search_values >= MAX_THOROUGH_SEARCH_VALUES
            figures.append(nearest_neighbors_figure(samples, reals, space, num_searched))
        figures += interpolation_figures(samples)
        if no_neighbors_reason:
            missing = [f"Nearest training images are not shown: {no_neighbors_reason}."]
    metadata = {
        "format": FORMAT_VERSION,
        "model": weights,
        "kimg": model.kimg,
        "space": space.name,
        "thorough": thorough and not missing,
        "missing_reasons": missing,
    }
    write_figures(folder / FIGURES_DIR, figures, metadata)


def make_final_figures(folder: Path, nets: Any, dataset: Dataset, device: torch.device, console: RunConsole) -> None:
    """Make the figures at the end of a run. Neighbors are searched only among data in memory, which takes seconds."""
    try:
        reason = "" if dataset.originals.in_memory else "the data are streamed; `paragan report` searches them"
    except UsageError as error:  # the images of latents are not where they were
        reason = str(error)
    try:
        make_figures(folder, dataset, nets=nets, device=device, no_neighbors_reason=reason)
    except (UsageError, OSError) as error:
        console.print(f"the report has no neighbors and interpolations: {error}")


def is_outdated(folder: Path, space: str) -> bool:
    """Return True if the figures in a run folder are missing, of an earlier model, or not thorough."""
    index = read_index(folder)
    return (index.get("model"), index.get("space"), index.get("thorough")) != (weights_digest(folder), space, True)


def weights_digest(folder: Path) -> str:
    """Return 16 hex digits of the weights of the generator, or of those of all labels."""
    digest = hashlib.sha256()
    model_dir = find_model_dir(folder)
    for file in sorted(model_dir.rglob("model.safetensors")):
        digest.update(str(file.relative_to(model_dir)).encode())
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.hexdigest()[:16]


# Fakes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSamples:
    """Images of a model. `labels` are those that it has a generator for; () without classes."""

    model: Model
    labels: tuple[int, ...]

    @property
    def is_available(self) -> bool:
        """Whether the model makes images from latents."""
        if self.model.spec.array_shape:
            return False
        sampler = self.sampler
        return bool(self.labels) if isinstance(sampler, PerLabelSampler) else isinstance(sampler.source, LatentSource)

    @property
    def sampler(self) -> Sampler | PerLabelSampler:
        """The sampler of the model."""
        return self.model.sampler

    def latent(self, index: int) -> Tensor:
        """Return the latent [latent_size] of a sample."""
        size = self._sampler_for(self.labels[0] if self.labels else None).latent_size
        return torch.from_numpy(sample_latent(SAMPLE_SEED, index, size))

    def first_samples(self, count: int) -> tuple[Tensor, list[int | None]]:
        """Return the first samples of a grid, [n, C, H, W] uint8, and their labels."""
        if not self.labels:
            return self.sampler.images(range(count), None, SAMPLE_SEED), [None] * count
        labels = self.labels[:count]
        return self.sampler.images(range(len(labels)), np.array(labels, np.int64), SAMPLE_SEED), list(labels)

    def interpolate(self, endpoints: tuple[int, int], label: int | None) -> Tensor:
        """Return [INTERPOLATION_STEPS, C, H, W] uint8, from the latent of one sample to that of another."""
        start, end = (self.latent(index).expand(INTERPOLATION_STEPS, -1) for index in endpoints)
        z = slerp(start, end, torch.linspace(0, 1, INTERPOLATION_STEPS))
        labels = (label, label) if label is not None and isinstance(self.sampler, Sampler) else None
        return sample_interpolated(self._sampler_for(label), z, labels)

    def class_name(self, label: int | None) -> str:
        """Return the name of a class; "" without one."""
        return "" if label is None else self.model.classes[label]

    def _sampler_for(self, label: int | None) -> Sampler:
        if isinstance(self.sampler, Sampler):
            return self.sampler
        assert label is not None
        return self.sampler.for_label(label)


def _trained_labels(folder: Path, model: Model) -> tuple[int, ...]:
    """Return the labels that have images in the data and, in a model per label, a generator."""
    labels = [label for label, probability in enumerate(model.sampler.prior.probabilities) if probability > 0]
    if isinstance(model.sampler, PerLabelSampler):
        model_dir = find_model_dir(folder)
        labels = [label for label in labels if (label_dir(model_dir, label) / "model.safetensors").exists()]
    return tuple(labels)


# Neighbors -------------------------------------------------------------------------------------------


def nearest_neighbors_figure(samples: ModelSamples, dataset: Dataset, space: FeatureSpace, num_searched: int) -> Figure:
    """Show some fakes, and beside each its nearest training images.

    Args:
        num_searched: how many training images, evenly chosen, are searched.
    """
    fakes, labels = samples.first_samples(NUM_FAKES)
    rows = np.unique(np.linspace(0, len(dataset.images) - 1, num_searched).round().astype(np.int64))
    baseline_rows = rows[evenly_spaced(len(rows), NUM_BASELINE_REALS)]
    queries = torch.cat([space(fakes), space(_load_images(dataset, baseline_rows))]).double()
    blocks = (rows[start : start + BLOCK_IMAGES] for start in range(0, len(rows), BLOCK_IMAGES))
    features = ((block, space(_load_images(dataset, block))) for block in blocks)
    distances, neighbors = k_nearest(queries, features, baseline_rows)
    usual = float(distances[len(fakes) :, 0].median())
    strips = tuple(
        _neighbor_strip(samples, dataset, fake, label, distances[i], neighbors[i])
        for i, (fake, label) in enumerate(zip(fakes, labels))
    )
    searched = f"all {len(rows):,}"
    if num_searched < len(dataset.images):
        searched = f"{len(rows):,} of {len(dataset.images):,}"
    description = (
        f"On the left a generated image, then the {NUM_NEIGHBORS} nearest to it among {searched} training images, by "
        f"Euclidean distance of {space.name}. A training image is {usual:.3g} from its own nearest neighbor (median "
        f"of {len(baseline_rows)}): a fake that is much nearer than that may be a copy."
    )
    return Figure("neighbors", "Nearest training images", description, strips)


def k_nearest(
    queries: Tensor, blocks: Iterator[tuple[np.ndarray, Tensor]], query_rows: np.ndarray
) -> tuple[Tensor, np.ndarray]:
    """Find the nearest rows of a stream of features.

    Args:
        queries: [n, F] float64.
        blocks: (rows, features [m, F]).
        query_rows: the rows of the last queries: a row is no neighbor of itself.

    Returns:
        Distances and rows of the nearest, both [n, NUM_NEIGHBORS], nearest first; infinite where there are fewer.
    """
    best = torch.full((len(queries), NUM_NEIGHBORS), torch.inf, dtype=torch.float64)
    best_rows = torch.zeros((len(queries), NUM_NEIGHBORS), dtype=torch.int64)
    self_rows = torch.full((len(queries),), -1)
    self_rows[len(queries) - len(query_rows) :] = torch.from_numpy(query_rows)
    for block_rows, features in blocks:
        rows = torch.from_numpy(block_rows)
        distances = torch.cdist(queries, features.double())
        distances[self_rows[:, None] == rows] = torch.inf
        candidates = torch.cat([best, distances], 1)
        candidate_rows = torch.cat([best_rows, rows.expand(len(queries), -1)], 1)
        best, columns = candidates.topk(NUM_NEIGHBORS, largest=False)
        best_rows = candidate_rows.gather(1, columns)
    return best, best_rows.numpy()


def _neighbor_strip(
    samples: ModelSamples, dataset: Dataset, fake: Tensor, label: int | None, distances: Tensor, rows: np.ndarray
) -> ImageStrip:
    rows = rows[torch.isfinite(distances).numpy()]
    caption = f"nearest at {distances[0]:.3g}"
    alt = f"a generated image and its {len(rows)} nearest training images"
    if label is not None:
        name = samples.class_name(label)
        caption = f"{name} · {caption}"
        alt = f"a generated image of class {name} and its {len(rows)} nearest training images"
        if dataset.labels is not None:
            caption += f": {', '.join(dataset.classes[label] for label in dataset.labels[rows])}"
    images = torch.cat([fake[None], _load_images(dataset, rows)])
    return ImageStrip(images, caption, alt, gap_after_first=True)


def _load_images(dataset: Dataset, rows: np.ndarray) -> Tensor:
    """Return images of the data, [n, C, H, W] uint8."""
    return torch.from_numpy(np.ascontiguousarray(dataset.images[rows].transpose(0, 3, 1, 2)))


# Interpolations ---------------------------------------------------------------------------------------


def interpolation_figures(samples: ModelSamples) -> list[Figure]:
    """Show the way from one latent to another and, where one network knows all classes, from one class to another."""
    labels: Sequence[int | None] = [None] * NUM_PATHS
    if samples.labels:
        labels = [samples.labels[index] for index in evenly_spaced(len(samples.labels), NUM_PATHS)]
    strips = tuple(
        ImageStrip(
            samples.interpolate((2 * path, 2 * path + 1), label),
            f"class {samples.class_name(label)}" if label is not None else f"latents {2 * path} to {2 * path + 1}",
            f"{INTERPOLATION_STEPS} images from one latent to another",
        )
        for path, label in enumerate(labels)
    )
    description = f"{INTERPOLATION_STEPS} steps of spherical interpolation between two latents. The ends are samples."
    figures = [Figure("latents", "Between latents", description, strips)]
    class_strips = _class_interpolation_strips(samples)
    if class_strips:
        figures.append(Figure("classes", "Between classes", CLASS_INTERPOLATION_TEXT, class_strips))
    return figures


def _class_interpolation_strips(samples: ModelSamples) -> tuple[ImageStrip, ...]:
    """Return strips of one latent from class to class; none if the generator has no class embeddings."""
    sampler = samples.sampler
    if len(samples.labels) < 2 or not isinstance(sampler, Sampler) or not label_embeddings(sampler):
        return ()
    labels = [samples.labels[index] for index in evenly_spaced(len(samples.labels), 2 * NUM_PATHS)]
    t = torch.linspace(0, 1, INTERPOLATION_STEPS)
    strips: list[ImageStrip] = []
    for path, (start, end) in enumerate(zip(labels[::2], labels[1::2])):
        images = sample_interpolated(sampler, samples.latent(path).expand(INTERPOLATION_STEPS, -1), (start, end), t)
        names = f"{samples.class_name(start)} to {samples.class_name(end)}"
        strips.append(ImageStrip(images, names, f"{INTERPOLATION_STEPS} images from class {names}"))
    return tuple(strips)


# Files ------------------------------------------------------------------------------------------------


def write_figures(folder: Path, figures: Sequence[Figure], metadata: dict[str, Any]) -> None:
    """Write the pictures first, then the index that names them; remove earlier pictures."""
    folder.mkdir(exist_ok=True)
    entries: list[dict[str, Any]] = []
    for figure in figures:
        strips: list[dict[str, str]] = []
        for number, strip in enumerate(figure.strips):
            name = f"{figure.name}-{number:02d}.png"
            with atomic_output(folder / name) as temporary:
                render_strip(strip).save(temporary, format="png")
            strips.append({"file": name, "caption": strip.caption, "alt": strip.alt})
        entries.append({"title": figure.title, "description": figure.description, "strips": strips})
    atomic_write_bytes(folder / INDEX_FILE, json.dumps(metadata | {"figures": entries}, indent=1).encode())
    current = {strip["file"] for entry in entries for strip in entry["strips"]}
    for file in folder.glob("*.png"):
        if file.name not in current:
            file.unlink(missing_ok=True)


def render_strip(strip: ImageStrip) -> Image.Image:
    """Return the images of a strip side by side, small ones enlarged and large ones reduced."""
    images = visible_channels(strip.images.permute(0, 2, 3, 1).numpy())  # [n, H, W, 1 or 3]
    _, height, width, _ = images.shape
    scale = integer_upscale(images)
    size = ImageSize(scale * width, scale * height).fit_within(MAX_SIDE_PX)
    tiles = [_resize_tile(image, size) for image in images]
    gap_px = GAP_PX if strip.gap_after_first else 0
    sheet = Image.new(tiles[0].mode, (gap_px + sum(tile.width for tile in tiles), tiles[0].height), "grey")
    x = 0
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (x, 0))
        x += tile.width
        if index == 0:
            x += gap_px
    return sheet


def _resize_tile(pixels: np.ndarray, size: ImageSize) -> Image.Image:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    resampling = Image.Resampling.NEAREST if size.width >= image.width else Image.Resampling.LANCZOS
    return image.resize(size, resampling)
