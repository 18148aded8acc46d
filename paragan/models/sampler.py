"""Sample images from a trained generator, or from a generator for each label.

Sample i depends only on (seed, i) and its label, not on the other samples of a batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.host_copies import copy_to_device
from paragan.core.philox import philox_generator
from paragan.core.rng import CPU, SampleRng
from paragan.core.types import Batch, primary_array
from paragan.data.dataset import Dataset
from paragan.data.loader.device_transfer import read_model_input
from paragan.game.game import ConditioningFn

MAX_CACHED_BYTES = 1 << 30  # of a per-label model: generators in memory
INPUT_ROWS = 16  # for which `conditioning_input` is called at once
PREFETCH_BYTES = 1 << 28  # of a per-label model: images made ahead


@dataclass(frozen=True)
class LabelPrior:
    """The frequency of each label in the data; () without labels."""

    probabilities: tuple[float, ...]

    @staticmethod
    def from_labels(labels: np.ndarray | None, num_classes: int) -> LabelPrior:
        if labels is None or num_classes == 0:
            return LabelPrior(())
        return LabelPrior(tuple(float(n) / len(labels) for n in np.bincount(labels, minlength=num_classes)))

    def labels(self, seed: int, indices: Sequence[int]) -> np.ndarray | None:
        """Draw the labels of samples, int64 [n]; None without labels."""
        if not self.probabilities:
            return None
        cumulative = np.cumsum(self.probabilities)
        uniform = [philox_generator(seed, "sample label", position=i).random() for i in indices]
        labels = np.searchsorted(cumulative, uniform, side="right")
        return np.minimum(labels, len(self.probabilities) - 1).astype(np.int64)


@dataclass(frozen=True)
class LatentSource:
    """Input of G: latents [n, size], standard normal. See `sample_latent` for truncation."""

    size: int

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        return torch.from_numpy(np.stack([sample_latent(seed, i, self.size, truncation) for i in indices]))


@dataclass(frozen=True)
class DataSource:
    """Input of G if that is data: sample i is made from image i of the data set, modulo its size."""

    dataset: Dataset
    conditioning_input: ConditioningFn

    def reals(self, indices: Sequence[int]) -> Tensor:
        """Return the data that these samples are made from, as networks get them."""
        return read_model_input(self.dataset.images, self.rows(indices)).images

    def __call__(self, indices: Sequence[int], seed: int, truncation: float) -> Tensor:
        starts = range(0, len(indices), INPUT_ROWS)
        return torch.cat([self._inputs_for(list(indices[start : start + INPUT_ROWS]), seed) for start in starts])

    def _inputs_for(self, indices: list[int], seed: int) -> Tensor:
        """Compute the inputs of at most INPUT_ROWS samples, each a function of (seed, index).

        The last sample is repeated up to INPUT_ROWS, since matrix products round differently for other numbers of rows.
        """
        padded = indices + indices[-1:] * (INPUT_ROWS - len(indices))
        rows = self.rows(padded)
        labels = None if self.dataset.labels is None else torch.from_numpy(self.dataset.labels[rows])
        data = read_model_input(self.dataset.images, rows)
        batch = Batch(data.images, labels, SampleRng.of(seed, padded), fields=data.fields)
        return self.conditioning_input(batch)[: len(indices)]

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """Return the indices of the images that these samples are made from, [n]."""
        return np.asarray(indices, np.int64) % len(self.dataset.images)


@dataclass(frozen=True)
class Sampler:
    """Samples images from one generator.

    source     : makes the inputs of G
    to_output  : converts the output of G, to uint8 for images
    main_field : the field of G's output that D judges, if G returns a NamedTuple
    """

    g: nn.Module
    source: LatentSource | DataSource
    prior: LabelPrior
    device: torch.device = CPU
    batch_size: int = 256
    to_output: Callable[[Tensor], Tensor] = field(default_factory=lambda: to_uint8)
    main_field: str = "images"

    @property
    def latent_size(self) -> int:
        """Size of the latents; 0 if G takes data."""
        return self.source.size if isinstance(self.source, LatentSource) else 0

    @property
    def uses_latents(self) -> bool:
        """Whether G takes latents, not data."""
        return isinstance(self.source, LatentSource)

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """Return labels of samples, int64 [n]: drawn from the prior, or of the images if G takes data."""
        if isinstance(self.source, DataSource) and self.prior.probabilities and self.source.dataset.labels is not None:
            return self.source.dataset.labels[self.source.rows(indices)]
        return self.prior.labels(seed, indices)

    def to(self, device: torch.device) -> Sampler:
        """Move the network to a device and return the sampler on it."""
        return replace(self, g=self.g.to(device), device=device)

    @torch.no_grad()
    def images(
        self, indices: Sequence[int], labels: np.ndarray | None, seed: int = 0, truncation: float = 1.0
    ) -> Tensor:
        """Return samples on the CPU, uint8 [n, C, H, W]; of a model of numbers float32 [n, ...].

        labels: int64 [n], or None for an unconditional generator. truncation: of the styles of a generator that has
        some, towards their mean; else of latents, see `sample_latent`.
        """
        batches: list[Tensor] = []
        of_styles = truncation if self.has_styles else 1.0
        for start in range(0, len(indices), self.batch_size):
            rows = slice(start, start + self.batch_size)
            z = self.source(indices[rows], seed, 1.0 if self.has_styles else truncation)
            y = None if labels is None else torch.from_numpy(np.asarray(labels[rows], np.int64))
            batches += self._run(z, y, of_styles)
        return torch.cat(batches)

    @property
    def has_styles(self) -> bool:
        """Return whether G maps latents to styles first (StyleGAN2)."""
        return has_styles(self.g)

    def generate(self, z: Tensor, labels: Tensor | None, style_truncation: float = 1.0) -> Tensor:
        """Return the array that D judges of the output of G, [n, ...], on the device."""
        if style_truncation != 1:
            g: Any = self.g
            return g.from_styles(g.mapping.truncate(g.styles(z, labels), style_truncation), z)
        return primary_array(self.g(z, labels), self.main_field)

    def _run(self, z: Tensor, y: Tensor | None, style_truncation: float) -> list[Tensor]:
        """Return the outputs of G on the host; in smaller batches where the device has too little memory."""
        try:
            labels = None if y is None else copy_to_device(y, self.device)
            return [self.to_output(self.generate(copy_to_device(z, self.device), labels, style_truncation)).cpu()]
        except torch.OutOfMemoryError:
            if len(z) == 1:
                raise
        half = len(z) // 2
        first, second = (None, None) if y is None else (y[:half], y[half:])
        return self._run(z[:half], first, style_truncation) + self._run(z[half:], second, style_truncation)


@dataclass
class PerLabelSampler:
    """Samples images from a generator for each label.

    Generators are loaded when they are needed. The most recently used stay in memory, up to `max_cached_bytes`.

    load_sampler : label -> its sampler
    """

    load_sampler: Callable[[int], Sampler]
    prior: LabelPrior
    device: torch.device = CPU
    max_cached_bytes: int = MAX_CACHED_BYTES
    _cached_samplers: OrderedDict[int, Sampler] = field(default_factory=OrderedDict[int, Sampler])

    def to(self, device: torch.device) -> PerLabelSampler:
        """Return the sampler on another device."""
        return PerLabelSampler(
            lambda label: self.load_sampler(label).to(device), self.prior, device, self.max_cached_bytes
        )

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """Draw labels from the prior, int64 [n]."""
        return self.prior.labels(seed, indices)

    def images(
        self, indices: Sequence[int], labels: np.ndarray | None, seed: int = 0, truncation: float = 1.0
    ) -> Tensor:
        """Return samples on the CPU, uint8 [n, C, H, W], made label by label."""
        labels = self.labels(indices, seed) if labels is None else np.asarray(labels)
        assert labels is not None
        order = np.argsort(labels, kind="stable")
        groups: list[Tensor] = []
        for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
            sampler = self.for_label(int(labels[rows[0]]))
            groups.append(sampler.images([indices[row] for row in rows], None, seed, truncation))
        return torch.cat(groups)[torch.from_numpy(np.argsort(order))]

    def for_label(self, label: int) -> Sampler:
        """Return the sampler of one label."""
        if label not in self._cached_samplers:
            self._cached_samplers[label] = self.load_sampler(label)
            while (
                len(self._cached_samplers) > 1
                and sum(module_bytes(cached.g) for cached in self._cached_samplers.values()) > self.max_cached_bytes
            ):
                self._cached_samplers.popitem(last=False)
        self._cached_samplers.move_to_end(label)
        return self._cached_samplers[label]


def has_styles(g: nn.Module) -> bool:
    """Return whether a generator maps latents to styles first: it has `styles`, `from_styles` and `mapping`."""
    return hasattr(g, "from_styles")


def module_bytes(net: nn.Module) -> int:
    """Return the bytes of the weights and buffers of a network."""
    return sum(t.nbytes for t in (*net.parameters(), *net.buffers()))


def prefetch(
    sampler: Sampler | PerLabelSampler, blocks: Sequence[range], seed: int, truncation: float
) -> Callable[[range], Tensor]:
    """Return a function that makes the samples of a block of indices, uint8 [n, C, H, W].

    It has to be called with `blocks` in their order. A per-label model makes several blocks at a time, so that each
    generator is loaded once per PREFETCH_BYTES of images, not once per block.
    """
    ready: dict[int, Tensor] = {}  # first index of a block -> its samples

    def sample_rows(rows: Sequence[int]) -> Tensor:
        return sampler.images(rows, sampler.labels(rows, seed), seed, truncation)

    def sample_block(block: range) -> Tensor:
        if isinstance(sampler, Sampler):
            return sample_rows(block)
        if block.start not in ready:
            first = sample_rows(block)
            num_blocks = max(1, PREFETCH_BYTES // max(first.nbytes, 1))
            position = blocks.index(block)
            window = list(blocks[position : position + num_blocks])
            indices = [index for member in window for index in member]
            samples = sample_rows(indices).split([len(member) for member in window])
            ready.clear()
            ready.update(zip((member.start for member in window), samples, strict=True))
        return ready.pop(block.start)

    return sample_block


def sample_latent(seed: int, index: int, size: int, truncation: float = 1.0) -> np.ndarray:
    """Draw the latent of a sample, float32 [size], standard normal.

    With truncation < 1, values beyond 2 * truncation standard deviations are drawn again (the truncation trick, Brock
    et al. 2019). Below 0.05 that would take too long.
    """
    if not 0.05 <= truncation <= 1:
        raise UsageError(f"truncation={truncation}: out of range. Use a number between 0.05 and 1 (1: no truncation)")
    rng = philox_generator(seed, "sample latent", position=index)
    z = rng.standard_normal(size, dtype=np.float32)
    if truncation < 1:
        while (outside := np.abs(z) > 2 * truncation).any():
            z[outside] = rng.standard_normal(int(outside.sum()), dtype=np.float32)
    return z


def to_float32(output: Tensor) -> Tensor:
    """Convert the output of a model of numbers: float32."""
    return output.float()


def to_uint8(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8, the inverse of `to_model_input`."""
    return images.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
